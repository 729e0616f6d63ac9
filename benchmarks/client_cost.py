"""What one streamed message costs its reader: our clients and tritonclient's, side by side in one run.

    python benchmarks/client_cost.py [--messages 6400] [--at-once 1,32] [--rounds 3] [--gap-ms 0] [--json FILE]

The source is the scripted replica of the tests in a process of its own. Every client reads the same messages and
takes the same three tensors and the final flag out of each. CPU is user + system time of this process (all its
threads) per message; clients take turns, so that a noisy machine disturbs all of them alike. Two bare rows show
what gRPC itself costs before anybody looks into a message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import grpc.experimental
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from clients import AsyncClient, Client  # noqa: E402
from clients.wire import infer_request  # noqa: E402
from clients.wire.request import build  # noqa: E402

PROMPT = "what does a message cost"
GOAL_US = 50.0


def our_async(url: str, streams: int, tokens: int, at_once: int) -> int:
    async def read() -> int:
        count = 0

        async def one(_: int) -> None:
            nonlocal count
            async for delta in client.generate(PROMPT, max_tokens=tokens):
                count += 1
                _looked_at(delta.text, delta.token_ids, delta.finish_reason)

        async with AsyncClient(url) as client:
            await _in_turn(one, streams, at_once)
        return count

    return asyncio.run(read())


def our_sync(url: str, streams: int, tokens: int, at_once: int) -> int:
    def one(_: int) -> int:
        count = 0
        for delta in client.generate(PROMPT, max_tokens=tokens):
            count += 1
            _looked_at(delta.text, delta.token_ids, delta.finish_reason)
        return count

    with Client(url) as client, ThreadPoolExecutor(at_once) as threads:
        return sum(threads.map(one, range(streams)))


def tritonclient_async(url: str, streams: int, tokens: int, at_once: int) -> int:
    async def read() -> int:
        count = 0

        async def one(n: int) -> None:
            nonlocal count

            async def requests():
                yield _triton_request(tokens, str(n))

            async for result, error in client.stream_infer(requests()):
                if error:
                    raise error
                count += 1
                if _triton_read(result):
                    break

        async with tritonclient.grpc.aio.InferenceServerClient(url) as client:
            await _in_turn(one, streams, at_once)
        return count

    return asyncio.run(read())


def tritonclient_sync(url: str, streams: int, tokens: int, at_once: int) -> int:
    """A client has one stream, so there are as many clients as streams at once."""

    def several(mine: range) -> int:
        count = 0
        arrived: queue.Queue = queue.Queue()
        with tritonclient.grpc.InferenceServerClient(url) as client:
            client.start_stream(lambda result, error: arrived.put((result, error)))
            for n in mine:
                client.async_stream_infer(enable_empty_final_response=True, **_triton_request(tokens, str(n)))
                while True:
                    result, error = arrived.get()
                    if error:
                        raise error
                    count += 1
                    if _triton_read(result):
                        break
            client.stop_stream()
        return count

    with ThreadPoolExecutor(at_once) as threads:
        return sum(threads.map(several, [range(nth, streams, at_once) for nth in range(at_once)]))


def bare_async(url: str, streams: int, tokens: int, at_once: int) -> int:
    async def read() -> int:
        count = 0

        async def one(_: int) -> None:
            nonlocal count
            async for _ in method(infer_request.generation(build(PROMPT, max_tokens=tokens), "ensemble")):
                count += 1

        async with grpc.aio.insecure_channel(url) as channel:
            method = channel.unary_stream(infer_request.GENERATE)
            await _in_turn(one, streams, at_once)
        return count

    return asyncio.run(read())


def bare_sync(url: str, streams: int, tokens: int, at_once: int) -> int:
    option = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)

    def one(_: int) -> int:
        return sum(1 for _ in method(infer_request.generation(build(PROMPT, max_tokens=tokens), "ensemble")))

    with grpc.insecure_channel(url, [option]) as channel, ThreadPoolExecutor(at_once) as threads:
        method = channel.unary_stream(infer_request.GENERATE)
        return sum(threads.map(one, range(streams)))


async def _in_turn(one: Callable[[int], Awaitable[None]], streams: int, at_once: int) -> None:
    """``one`` for every stream, so many of them at a time."""
    numbers = iter(range(streams))

    async def reader() -> None:
        for n in numbers:
            await one(n)

    await asyncio.gather(*(reader() for _ in range(at_once)))


Read = Callable[[str, int, int, int], int]
READERS: dict[str, Read] = {
    "clients.AsyncClient": our_async,
    "tritonclient.grpc.aio": tritonclient_async,
    "clients.Client": our_sync,
    "tritonclient.grpc": tritonclient_sync,
    "(bare grpc.aio, nothing read)": bare_async,
    "(bare grpc, nothing read)": bare_sync,
}


def _triton_request(tokens: int, request_id: str) -> dict:
    text = tritonclient.grpc.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[PROMPT.encode()]], dtype=object))
    limit = tritonclient.grpc.InferInput("max_tokens", [1, 1], "INT32")
    limit.set_data_from_numpy(np.array([[tokens]], dtype=np.int32))
    return {"model_name": "ensemble", "inputs": [text, limit], "request_id": request_id}


def _triton_read(result: tritonclient.grpc.InferResult) -> bool:
    """Takes out what ours takes out; returns the final flag."""
    text = result.as_numpy("text_output")
    ids = result.as_numpy("output_ids")
    reason = result.as_numpy("finish_reason")
    _looked_at(text.flat[0].decode(), ids.ravel().tolist(), reason is not None and reason.flat[0].decode())
    return result.get_response().parameters["triton_final_response"].bool_param


def _looked_at(text: str, ids: object, reason: object) -> None:
    if not text and not ids and not reason:
        raise AssertionError("a message without anything in it; the comparison would be unfair")


@contextmanager
def source(gap_ms: float) -> Iterator[str]:
    """The scripted replica as a process; yields where it listens."""
    command = [sys.executable, "-m", "tests.fakes.replica", "--gap-ms", str(gap_ms)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.terminate()


def measure(url: str, read: Read, streams: int, tokens: int, at_once: int = 1) -> tuple[float, float]:
    """(CPU µs, wall µs) per message, connecting included."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    count = read(url, streams, tokens, at_once)
    cpu_us, wall_us = (time.process_time() - cpu_s) * 1e6, (time.perf_counter() - wall_s) * 1e6
    if count < streams * tokens:
        raise AssertionError(f"{count} messages arrived where {streams * tokens} were due")
    return cpu_us / count, wall_us / count


def turns(url: str, streams: int, tokens: int, at_once: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """What ``measure`` found of every client, a value for each round; they take turns."""
    for read in READERS.values():
        read(url, 1, 50, 1)  # imports, connections and caches are warm for all
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in READERS}
    for n in range(rounds):
        for name, read in READERS.items():
            if sys.stderr.isatty():
                print(f"\r  {at_once} at once, round {n + 1}/{rounds}: {name:<32}", end="", file=sys.stderr, flush=True)
            costs[name].append(measure(url, read, streams, tokens, at_once))
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
    parser.add_argument("--at-once", default="1,32", metavar="N,…", help="streams at a time (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns each client takes (default: %(default)s)")
    parser.add_argument(
        "--gap-ms", type=float, default=0.0, help="pause of the source between messages (default: none)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    paced = f"one message per {args.gap_ms:g} ms and stream" if args.gap_ms else "messages as fast as they come"
    found = {}
    with source(args.gap_ms) as url:
        for at_once in map(int, args.at_once.split(",")):
            streams = at_once * max(1, args.messages // args.tokens // at_once)
            found[at_once] = turns(url, streams, args.tokens, at_once, args.rounds)
            each = f"{streams * args.tokens} messages a turn, {args.rounds} turns; {os.cpu_count()} cores"
            show(found[at_once], f"{at_once} at once, {paced}, {each}")
    if args.json:
        figures = {
            at_once: {name: [{"cpu_us": cpu, "wall_us": wall} for cpu, wall in rows] for name, rows in costs.items()}
            for at_once, costs in found.items()
        }
        args.json.write_text(json.dumps({"gap_ms": args.gap_ms, "per_message": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
