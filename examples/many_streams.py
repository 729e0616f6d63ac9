"""Run many streams over one connection: python -m examples.many_streams [HOST:PORT]"""

import asyncio
import sys

from clients import AsyncClient, Stopwatch

STREAMS = 32


async def one(client: AsyncClient, number: int) -> Stopwatch:
    watch = Stopwatch()
    async for delta in client.generate(f"def step_{number}(x):", max_tokens=16):
        watch.observe(delta)
    return watch


async def main(url: str | None) -> None:
    async with AsyncClient(url) as client:
        watches = await asyncio.gather(*(one(client, number) for number in range(STREAMS)))
    slowest_s = max(watch.ttft_s for watch in watches)
    print(f"{STREAMS} streams, {sum(watch.tokens for watch in watches)} tokens, slowest first token {slowest_s:.3f} s")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
