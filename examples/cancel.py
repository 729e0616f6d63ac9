"""End a generation early: by leaving the loop, by a deadline, and by its id from elsewhere.

python -m examples.cancel [HOST:PORT]
"""

import asyncio
import sys

from clients import AsyncClient
from contract.errors import DeadlineExceeded

PROMPT = "import os"


async def leave(client: AsyncClient) -> None:
    stream = client.generate(PROMPT, max_tokens=500)
    async for _ in stream:
        if stream.tokens >= 3:
            break  # cancels the request: the engine frees its slot at the next step
    print(f"left after {stream.tokens} tokens")


async def deadline(client: AsyncClient) -> None:
    try:
        await client.generate(PROMPT, max_tokens=500, ignore_eos=True, timeout_s=0.05).complete()
        print("complete before the deadline")
    except DeadlineExceeded as error:
        print(f"deadline: {error}")


async def stop_by_id(client: AsyncClient) -> None:
    async for delta in client.generate(PROMPT, max_tokens=500, ignore_eos=True, request_id="example-1"):
        if delta.finish_reason is None:
            await client.stop("example-1")  # from any client, any process
    print(f"stopped: {delta.finish_reason.value}")


async def main(url: str | None) -> None:
    async with AsyncClient(url) as client:
        await leave(client)
        await deadline(client)
        await stop_by_id(client)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
