"""Spread requests over replicas: python -m examples.balanced HOST:PORT,HOST:PORT

``dns:///NAME:PORT`` and ``file:///PATH`` work in place of a list.
"""

import asyncio
import sys

from clients import BalancedClient


async def main(replicas: str) -> None:
    async with BalancedClient(replicas, pick="power_of_two_choices") as client:
        prompts = [f"def step_{number}(x):" for number in range(20)]
        completions = await asyncio.gather(*(client.complete(prompt, max_tokens=8) for prompt in prompts))
        print(f"{len(completions)} completions from {len(client.loads())} replicas")
        for load in client.loads():
            print(f"{load.name}: {'healthy' if load.healthy else 'not healthy'}, {load.outstanding} outstanding")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001"))
