"""Measure the CPU that a client spends per streamed message: ours and tritonclient's, side by side in one run.

    python -m benchmarks.client_cost [--messages 6400] [--concurrency 1,32] [--rounds 3] [--gap-ms 0] [--json FILE]

The source is the scripted replica in a process of its own. Every client reads the same messages and takes the same
three tensors and the final flag out of each. CPU is user + system time of this process (all its threads) per message;
clients take turns, so that a noisy machine disturbs all of them alike. Two bare rows show what gRPC alone costs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
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

import grpc
import grpc.aio
import grpc.experimental
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio

from benchmarks.gateway import contenders
from benchmarks.gateway.script import Pace
from clients import AsyncClient, Client
from clients.wire import infer_request
from clients.wire.request import build

GOAL_US = 50.0


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

    def request(self) -> bytes:
        return infer_request.generation(build(self.prompt, max_tokens=self.tokens), "ensemble")


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


def bare_async(load: Load) -> int:
    async def read() -> int:
        count = 0

        async def read_stream(_: int) -> None:
            nonlocal count
            async for _ in method(load.request()):
                count += 1

        async with grpc.aio.insecure_channel(load.url) as channel:
            method = channel.unary_stream(infer_request.GENERATE)
            await _concurrently(read_stream, load)
        return count

    return asyncio.run(read())


def bare_sync(load: Load) -> int:
    option = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)

    def read_stream(_: int) -> int:
        return sum(1 for _ in method(load.request()))

    with grpc.insecure_channel(load.url, [option]) as channel, ThreadPoolExecutor(load.concurrency) as threads:
        method = channel.unary_stream(infer_request.GENERATE)
        return sum(threads.map(read_stream, range(load.streams)))


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
    "(bare grpc.aio, nothing read)": bare_async,
    "(bare grpc, nothing read)": bare_sync,
}


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


def measure_all(load: Load, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Run ``measure`` once per client and round; clients take turns."""
    for read in READERS.values():
        read(dataclasses.replace(load, streams=1, tokens=50, concurrency=1))  # imports, connections, caches
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in READERS}
    for n in range(rounds):
        for name, read in READERS.items():
            if sys.stderr.isatty():
                label = f"concurrency {load.concurrency}, round {n + 1}/{rounds}: {name:<32}"
                print(f"\r  {label}", end="", file=sys.stderr, flush=True)
            costs[name].append(measure(load, read))
    if sys.stderr.isatty():
        print("\r" + " " * 70 + "\r", end="", file=sys.stderr)
    return costs


def show(costs: dict[str, list[tuple[float, float]]], conditions: str) -> None:
    best = {name: min(cpu for cpu, _ in rows) for name, rows in costs.items()}
    print(f"CPU per message in µs; {conditions}")
    print(f"{'client':<32} {'best':>7} {'median':>7} {'wall':>7}   ratio")
    for name, rows in costs.items():
        rival = {"clients.AsyncClient": "tritonclient.grpc.aio", "clients.Client": "tritonclient.grpc"}.get(name)
        ratio = f"{best[name] / best[rival]:.2f} of {rival}" if rival else ""
        median, wall = statistics.median(cpu for cpu, _ in rows), statistics.median(wall for _, wall in rows)
        print(f"{name:<32} {best[name]:7.1f} {median:7.1f} {wall:7.1f}   {ratio}".rstrip())
    missed = [name for name in ("clients.AsyncClient", "clients.Client") if best[name] > GOAL_US]
    print(f"goal: at most {GOAL_US:.0f} µs per message: {'missed by ' + ', '.join(missed) if missed else 'met'}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--messages", type=int, default=6400, help="messages per client and round (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=400, help="messages per stream (default: %(default)s)")
    parser.add_argument("--concurrency", default="1,32", metavar="N,…", help="streams at a time (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each client (default: %(default)s)")
    parser.add_argument("--gap-ms", type=float, default=0.0, help="time between messages at the source (default: none)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    args = parser.parse_args()
    paced = f"one message per {args.gap_ms:g} ms and stream" if args.gap_ms else "messages as fast as they come"
    found = {}
    with TemporaryDirectory() as logs, contenders.scripted("replica", Path(logs)) as url:
        for concurrency in map(int, args.concurrency.split(",")):
            streams = concurrency * max(1, args.messages // args.tokens // concurrency)
            load = Load(url, Pace(gap_s=args.gap_ms / 1e3).prompt(), streams, args.tokens, concurrency)
            found[concurrency] = measure_all(load, args.rounds)
            each = f"{streams * args.tokens} messages a round, {args.rounds} rounds; {os.cpu_count()} cores"
            show(found[concurrency], f"concurrency {concurrency}, {paced}, {each}")
    if args.json:
        figures = {
            count: {name: [{"cpu_us": cpu, "wall_us": wall} for cpu, wall in rows] for name, rows in costs.items()}
            for count, costs in found.items()
        }
        args.json.write_text(json.dumps({"gap_ms": args.gap_ms, "per_message": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
