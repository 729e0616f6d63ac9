"""Stream one completion, with and without an event loop: python -m examples.streaming [HOST:PORT]"""

import asyncio
import sys

from clients import AsyncClient, Client

PROMPT = "def fibonacci(n):"


def blocking(url: str | None) -> None:
    with Client(url) as client:
        for delta in client.generate(PROMPT, max_tokens=16, temperature=0.0):
            print(delta.text, end="", flush=True)
    print(f"\n[{delta.finish_reason.value}: {delta.usage.output_tokens} tokens]")


async def asynchronous(url: str | None) -> None:
    async with AsyncClient(url) as client:
        async for delta in client.generate(PROMPT, max_tokens=16, temperature=0.0):
            print(delta.text, end="", flush=True)
    print(f"\n[{delta.finish_reason.value}: {delta.usage.output_tokens} tokens]")


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else None  # None: $TRIDENT_URL or 127.0.0.1:8001
    blocking(address)
    asyncio.run(asynchronous(address))
