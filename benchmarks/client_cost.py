"""Measure the CPU that a client spends per streamed message: ours and tritonclient's, side by side in one run.

    .venv/bin/python -m benchmarks.client_cost [--messages 6400] [--concurrency 1,32] [--rounds 3]

The source is the scripted replica in a process of its own. Every client reads the same messages and takes the same
three tensors and the final flag out of each. CPU is user + system time of this process (all its threads) per message;
clients take turns, so that a noisy machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import queue
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio

from benchmarks import report
from benchmarks.gateway import contenders
from benchmarks.gateway.script import Pace
from clients import AsyncClient, Client

TOKENS = 400  # messages of a stream


@dataclass(frozen=True)
class Load:
    """What every client reads.

    url: HOST:PORT of the scripted replica.
    prompt: carries the pace of the messages.
    streams: how many in all, ``concurrency`` of them at a time.
    tokens: messages per stream.
    """

    url: str
    prompt: str
    streams: int
    tokens: int
    concurrency: int


def our_async(load: Load) -> int:
    async def read() -> int:
        count = 0

        async def read_stream(_: int) -> None:
            nonlocal count
            async for delta in client.generate(load.prompt, max_tokens=load.tokens):
                count += 1
                _require_content(delta.text, delta.token_ids, delta.finish_reason)

        async with AsyncClient(load.url) as client:
            await _concurrently(read_stream, load)
        return count

    return asyncio.run(read())


def our_sync(load: Load) -> int:
    def read_stream(_: int) -> int:
        count = 0
        for delta in client.generate(load.prompt, max_tokens=load.tokens):
            count += 1
            _require_content(delta.text, delta.token_ids, delta.finish_reason)
        return count

    with Client(load.url) as client, ThreadPoolExecutor(load.concurrency) as threads:
        return sum(threads.map(read_stream, range(load.streams)))


def tritonclient_async(load: Load) -> int:
    async def read() -> int:
        count = 0

        async def read_stream(n: int) -> None:
            nonlocal count

            async def requests():
                yield _triton_request(load, str(n))

            async for result, error in client.stream_infer(requests()):
                if error:
                    raise error
                count += 1
                if _triton_read(result):
                    break

        async with tritonclient.grpc.aio.InferenceServerClient(load.url) as client:
            await _concurrently(read_stream, load)
        return count

    return asyncio.run(read())


def tritonclient_sync(load: Load) -> int:
    """One client per concurrent stream: a tritonclient has a single stream."""

    def several(mine: range) -> int:
        count = 0
        arrived: queue.Queue = queue.Queue()
        with tritonclient.grpc.InferenceServerClient(load.url) as client:
            client.start_stream(lambda result, error: arrived.put((result, error)))
            for n in mine:
                client.async_stream_infer(enable_empty_final_response=True, **_triton_request(load, str(n)))
                while True:
                    result, error = arrived.get()
                    if error:
                        raise error
                    count += 1
                    if _triton_read(result):
                        break
            client.stop_stream()
        return count

    with ThreadPoolExecutor(load.concurrency) as threads:
        return sum(
            threads.map(several, [range(nth, load.streams, load.concurrency) for nth in range(load.concurrency)])
        )


async def _concurrently(read_stream: Callable[[int], Awaitable[None]], load: Load) -> None:
    """Read every stream, ``load.concurrency`` of them at a time."""
    numbers = iter(range(load.streams))

    async def reader() -> None:
        for n in numbers:
            await read_stream(n)

    await asyncio.gather(*(reader() for _ in range(load.concurrency)))


Read = Callable[[Load], int]
READERS: dict[str, Read] = {
    "clients.AsyncClient": our_async,
    "tritonclient.grpc.aio": tritonclient_async,
    "clients.Client": our_sync,
    "tritonclient.grpc": tritonclient_sync,
}
RIVALS = {"clients.AsyncClient": "tritonclient.grpc.aio", "clients.Client": "tritonclient.grpc"}


def _triton_request(load: Load, request_id: str) -> dict:
    text = tritonclient.grpc.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[load.prompt.encode()]], dtype=object))
    limit = tritonclient.grpc.InferInput("max_tokens", [1, 1], "INT32")
    limit.set_data_from_numpy(np.array([[load.tokens]], dtype=np.int32))
    return {"model_name": "ensemble", "inputs": [text, limit], "request_id": request_id}


def _triton_read(result: tritonclient.grpc.InferResult) -> bool:
    """Read the tensors that our client reads; return the final flag."""
    text = result.as_numpy("text_output")
    ids = result.as_numpy("output_ids")
    reason = result.as_numpy("finish_reason")
    _require_content(text.flat[0].decode(), ids.ravel().tolist(), reason is not None and reason.flat[0].decode())
    return result.get_response().parameters["triton_final_response"].bool_param


def _require_content(text: str, ids: object, reason: object) -> None:
    if not text and not ids and not reason:
        raise AssertionError("the message is empty: the comparison would be unfair")


def measure(load: Load, read: Read) -> tuple[float, float]:
    """Return (CPU µs, wall µs) per message, connecting included."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    count = read(load)
    cpu_us, wall_us = (time.process_time() - cpu_s) * 1e6, (time.perf_counter() - wall_s) * 1e6
    if count < load.streams * load.tokens:
        raise AssertionError(f"{count} messages arrived, expected {load.streams * load.tokens}")
    return cpu_us / count, wall_us / count


def table(costs: dict[str, list[tuple[float, float]]]) -> str:
    """Format CPU and wall time per message by client; a client of ours beside tritonclient's of its kind."""
    best = {name: min(cpu for cpu, _ in turns) for name, turns in costs.items()}
    rows = []
    for name, turns in costs.items():
        rival = RIVALS.get(name)
        median, wall = (statistics.median(turn[column] for turn in turns) for column in (0, 1))
        ratio = f"{best[name] / best[rival]:.2f} of {rival}" if rival else ""
        rows.append((name, f"{best[name]:.1f}", f"{median:.1f}", f"{wall:.1f}", ratio))
    return report.table(rows, ("client", "best", "median", "wall", "best, ratio"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=6400, help="per client and round (default: %(default)s)")
    parser.add_argument("--concurrency", default="1,32", metavar="N,…", help="streams at a time (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of each client (default: %(default)s)")
    options = parser.parse_args()
    with TemporaryDirectory() as logs, contenders.scripted("replica", Path(logs)) as url:
        for concurrency in map(int, options.concurrency.split(",")):
            streams = concurrency * max(1, options.messages // TOKENS // concurrency)
            load = Load(url, Pace().prompt(), streams, TOKENS, concurrency)
            for read in READERS.values():
                read(dataclasses.replace(load, streams=1, tokens=50, concurrency=1))  # imports, connections, caches
            costs: dict[str, list[tuple[float, float]]] = {name: [] for name in READERS}
            for _ in range(options.rounds):  # clients take turns
                for name, read in READERS.items():
                    costs[name].append(measure(load, read))
            each = f"{streams * TOKENS} messages a round, {options.rounds} rounds; {os.cpu_count()} cores"
            print(f"CPU per message in µs; concurrency {concurrency}, {each}\n{table(costs)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
