"""The command line of the benchmarks: commands, the server under test, the load."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import (
    aiperf,
    arrivals,
    cancel,
    efficiency,
    hops,
    lengths,
    measurement,
    peer_servers,
    peers,
    perf_analyzer,
    plots,
    report,
)
from benchmarks.driver import Extent
from benchmarks.figures import Slo
from benchmarks.gateway import run as gateway_run
from benchmarks.measurement import Measurement, ServerUnderTest
from benchmarks.server_process import ENGINES, running_server
from benchmarks.workload import Workload
from clients.terminal import forget_stdout
from clients.wire.connection import Connection
from contract import interpreter
from contract.errors import InvalidArgument, TridentError

RESULTS = Path(__file__).resolve().parent / "results"
DURATION_S, WARMUP_S = 10.0, 1.0
_COMMAND = f"{interpreter.command()} -m benchmarks"
_EPILOG = f"""examples:
  {_COMMAND} run --engine demo --concurrency 32
  {_COMMAND} run --arrivals poisson:5 --input lognormal:200,0.6,800 --output lognormal:100,0.8,400
  {_COMMAND} sweep --engine demo --concurrency 1,2,4,8,16,32,64
  {_COMMAND} sweep --rates 2,4,8,16,32
Without --engine the server at TRIDENT_URL and TRIDENT_METRICS_URL is measured (default: the usual ports here).
"""


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    # SIGTERM raises SystemExit, so that the servers we started are stopped.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output closed it
        forget_stdout()
        return 141
    except TridentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog=_COMMAND,
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    single = commands.add_parser("run", help="one load: every figure, and self-checks")
    _server_options(single)
    _workload_options(single)
    _loop_options(single)
    single.set_defaults(command=run)
    many = commands.add_parser("sweep", help="several loads: the throughput-latency curve")
    _server_options(many)
    _workload_options(many)
    either = many.add_mutually_exclusive_group()
    either.add_argument(
        "--concurrency", default="1,2,4,8,16,32", metavar="N,N,…", help="closed loops (default %(default)s)"
    )
    either.add_argument("--rates", metavar="R,R,…", help="open loops, Poisson, requests per second")
    many.set_defaults(command=sweep)
    cost = commands.add_parser("efficiency", help="the ensemble beside the engine over gRPC and the engine in process")
    cost.add_argument(
        "--engines", default=",".join(efficiency.ENGINES_MEASURED), metavar="NAME,…", help="(%(default)s)"
    )
    cost.add_argument("--rounds", type=_count, default=3, metavar="N", help="rounds of each (default %(default)s)")
    cost.add_argument("--concurrency", default="1,8,32,64", metavar="N,N,…", help="(default %(default)s)")
    cost.add_argument("--out", type=_out, metavar="FOLDER")
    cost.set_defaults(command=run_efficiency)
    hop = commands.add_parser("hops", help="CPU per response by process, and the phases of the time to first token")
    hop.add_argument("--engine", default="demo", metavar="NAME", help="(default %(default)s)")
    hop.add_argument("--concurrency", default="1,32", metavar="N,N,…", help="(default %(default)s)")
    hop.add_argument("--tokens", type=_count, default=128, metavar="N", help="of an answer (default %(default)s)")
    hop.add_argument("--rounds", type=_count, default=3, metavar="N", help="(default %(default)s)")
    hop.add_argument("--out", type=_out, metavar="FOLDER")
    hop.set_defaults(command=run_hops)
    free = commands.add_parser("cancel", help="how soon a cancelled request's slot is free, under load")
    _server_options(free)
    free.add_argument("--samples", type=_count, default=50, metavar="N", help="cancels (default %(default)s)")
    free.add_argument(
        "--streams", default="8,32", metavar="N,N,…", help="streams cancelled together (default %(default)s)"
    )
    free.add_argument("--max-tokens", type=_count, default=480, metavar="N", help="of a stream (default %(default)s)")
    free.add_argument("--out", type=_out, metavar="FOLDER")
    free.set_defaults(command=run_cancel)
    theirs = commands.add_parser("perf-analyzer", help="NVIDIA's perf_analyzer, streaming and unary")
    _server_options(theirs)
    theirs.add_argument("--concurrency", default="1,8,32", metavar="N,N,…", help="(default %(default)s)")
    theirs.add_argument("--rates", default="4,8", metavar="R,R,…", help="requests/s (default %(default)s)")
    theirs.add_argument("--requests", type=_count, default=40, metavar="N", help="per load (default %(default)s)")
    theirs.add_argument("--out", type=_out, metavar="FOLDER")
    theirs.set_defaults(command=run_perf_analyzer)
    http = commands.add_parser("aiperf", help="NVIDIA's AIPerf against the OpenAI gateway")
    http.add_argument("--engine", default="demo", metavar="NAME", help="started with a gateway (default %(default)s)")
    http.add_argument("--url", metavar="URL", help="a gateway that runs already, for --engine's model")
    http.add_argument("--concurrency", default="1,8,32", metavar="N,N,…", help="(default %(default)s)")
    http.add_argument("--rates", default="4", metavar="R,R,…", help="requests/s (default %(default)s)")
    http.add_argument("--requests", type=_count, default=40, metavar="N", help="per load (default %(default)s)")
    http.add_argument("--out", type=_out, metavar="FOLDER")
    http.set_defaults(command=run_aiperf)
    beside = commands.add_parser("peers", help="our server beside vLLM, llama.cpp and transformers serve")
    beside.add_argument("--model", default="demo", metavar="NAME", help="demo or bench-160m (default %(default)s)")
    beside.add_argument("--only", default=",".join(peer_servers.PEERS), metavar="NAME,…", help="(default %(default)s)")
    beside.add_argument("--concurrency", default="1,8,32", metavar="N,N,…", help="(default %(default)s)")
    beside.add_argument("--rounds", type=_count, default=2, metavar="N", help="rounds of each (default %(default)s)")
    beside.add_argument(
        "--duration", type=_positive, default=4.0, metavar="S", help="of a round (default %(default)s s)"
    )
    beside.add_argument("--input", default="128", metavar="TOKENS", help="(default %(default)s)")
    beside.add_argument("--output", default="64", metavar="TOKENS", help="(default %(default)s)")
    beside.add_argument("--out", type=_out, metavar="FOLDER")
    beside.set_defaults(command=run_peers)
    relay = commands.add_parser(
        "gateway", help="latency and CPU that the gateway adds, and its limits, beside LiteLLM and a plain relay"
    )
    relay.add_argument("--only", default=",".join(gateway_run.PARTS), metavar="PART,…", help="(default %(default)s)")
    relay.add_argument("--without-peers", action="store_true", help="the gateway alone")
    relay.add_argument(
        "--rounds", type=_count, default=2, metavar="N", help="rounds of each path (default %(default)s)"
    )
    relay.add_argument("--seconds", type=_positive, default=3.0, metavar="S", help="of a round (default %(default)s)")
    relay.add_argument(
        "--streams", type=_count, default=gateway_run.STREAMS, metavar="N", help="slow streams (default %(default)s)"
    )
    relay.add_argument(
        "--protocols", default="http,grpc", metavar="NAME,…", help="of slow streams and bursts (default %(default)s)"
    )
    relay.add_argument("--out", type=_out, metavar="FOLDER")
    relay.set_defaults(command=run_gateway)
    picture = commands.add_parser("plot", help="plots of what run or sweep wrote")
    picture.add_argument("result", type=Path, metavar="RESULT.json")
    picture.add_argument("--out", type=_out, metavar="FOLDER", help="(default: beside the result)")
    picture.set_defaults(command=plot)
    return whole


def run_perf_analyzer(arguments: argparse.Namespace) -> int:
    levels, rates = _numbers("concurrency", arguments.concurrency, int), _numbers("rates", arguments.rates, float)
    with _server(arguments) as server:
        return perf_analyzer.run(server, levels, rates, arguments.requests, _folder(arguments, "perf-analyzer"))


def run_peers(arguments: argparse.Namespace) -> int:
    levels = tuple(_numbers("concurrency", arguments.concurrency, int))
    subject = peer_servers.subject(arguments.model)
    load = (levels, arguments.rounds, arguments.duration, arguments.input, arguments.output)
    return peers.run(arguments.only.split(","), peers.Plan(subject, *load), _folder(arguments, "peers"))


def run_aiperf(arguments: argparse.Namespace) -> int:
    levels, rates = _numbers("concurrency", arguments.concurrency, int), _numbers("rates", arguments.rates, float)
    loads = (levels, rates, arguments.requests, _folder(arguments, "aiperf").absolute())
    if arguments.url:
        return aiperf.run(arguments.url, arguments.engine, ENGINES / arguments.engine, *loads)
    aiperf.ENVIRONMENT.ensure()
    with peer_servers.gateway(arguments.engine) as url:
        return aiperf.run(url, arguments.engine, ENGINES / arguments.engine, *loads)


def run_gateway(arguments: argparse.Namespace) -> int:
    parts = _among("only", arguments.only, gateway_run.PARTS)
    protocols = _among("protocols", arguments.protocols, ("http", "grpc"))
    rounds, seconds, streams = arguments.rounds, arguments.seconds, arguments.streams
    folder = _folder(arguments, "gateway")
    return gateway_run.run(parts, not arguments.without_peers, rounds, seconds, streams, protocols, folder)


def plot(arguments: argparse.Namespace) -> int:
    for path in plots.draw(arguments.result, arguments.out or arguments.result.parent):
        print(path)
    return 0


def run_hops(arguments: argparse.Namespace) -> int:
    levels = _numbers("concurrency", arguments.concurrency, int)
    return hops.run(arguments.engine, levels, arguments.tokens, arguments.rounds, _folder(arguments, "hops"))


def run_cancel(arguments: argparse.Namespace) -> int:
    streams = _numbers("streams", arguments.streams, int)
    with _server(arguments) as server:
        return cancel.run(server, streams, arguments.samples, arguments.max_tokens, _folder(arguments, "cancel"))


def run_efficiency(arguments: argparse.Namespace) -> int:
    levels = _numbers("concurrency", arguments.concurrency, int)
    return efficiency.run(arguments.engines.split(","), arguments.rounds, levels, _folder(arguments, "efficiency"))


def run(arguments: argparse.Namespace) -> int:
    workload = _workload(arguments, arguments.concurrency, arguments.arrivals)
    with _server(arguments) as server:
        found = _measure("run", workload, server, arguments)
    return _keep([found], "run", arguments, report.of_run(found))


def sweep(arguments: argparse.Namespace) -> int:
    loads: list[tuple[str, int | None, str | None]]
    if arguments.rates:
        loads = [(f"{rate:g}/s", None, f"poisson:{rate}") for rate in _numbers("rates", arguments.rates, float)]
    else:
        levels = _numbers("concurrency", arguments.concurrency, int)
        loads = [(str(level), level, None) for level in levels]
    found: list[Measurement] = []
    with _server(arguments) as server:
        for n, (name, level, rate) in enumerate(loads):
            workload = _workload(arguments, level, rate).with_seed(arguments.seed + n)
            found.append(_measure(name, workload, server, arguments))
    text = f"ms unless a column has another unit; {_described(found[0])}\n{report.of_sweep(found)}"
    return _keep(found, "sweep", arguments, text)


def _measure(name: str, workload: Workload, server: ServerUnderTest, arguments: argparse.Namespace) -> Measurement:
    extent = _extent(arguments, workload)
    options: dict[str, Any] = {"slo": Slo(arguments.slo_ttft_ms / 1e3, arguments.slo_latency_s)}
    options["conditions"] = {"engine": arguments.engine or "unknown", "command": " ".join(sys.argv[1:])}
    if arguments.generators:
        return measurement.measure(name, workload, server, extent, generators=arguments.generators, **options)
    return measurement.measure_unsaturated(name, workload, server, extent, **options)


def _extent(arguments: argparse.Namespace, workload: Workload) -> Extent:
    """Return the run's limits; a trace without limits is replayed whole, without a warm-up."""
    trace = workload.arrivals if isinstance(workload.arrivals, arrivals.Trace) else None
    duration_s, warmup_s, requests = arguments.duration, arguments.warmup, arguments.requests
    if warmup_s is None:
        warmup_s = 0.0 if trace else WARMUP_S
    if duration_s is None and trace:
        return Extent(None, warmup_s, min(requests or len(trace.rows), len(trace.rows)))
    return Extent(DURATION_S if duration_s is None else duration_s, warmup_s, requests)


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[ServerUnderTest]:
    """Yield the server under test, started here with --engine."""
    if arguments.engine:
        with running_server(arguments.engine) as server:
            yield server
        return
    url = arguments.url or os.environ.get("TRIDENT_URL") or "127.0.0.1:8001"
    metrics_url = arguments.metrics_url or os.environ.get("TRIDENT_METRICS_URL")
    if metrics_url is None and url.startswith(("127.0.0.1:", "localhost:")):
        metrics_url = "http://127.0.0.1:8002/metrics"
    folder = arguments.tokenizer or ENGINES / os.environ.get("TRIDENT_ENGINE", "demo")
    Connection(url)  # raises for an invalid address before any load is made
    if arguments.tokenizer and not (folder / "tokenizer.json").exists():
        raise InvalidArgument("tokenizer", f"must be a folder with tokenizer.json, got {folder}")
    yield ServerUnderTest(url, metrics_url, folder)


def _keep(found: list[Measurement], kind: str, arguments: argparse.Namespace, text: str) -> int:
    """Write the results, then print the text. Returns 0 if the self-checks pass, else 3."""
    folder = _folder(arguments, kind)
    paths = [measurement.save(found, folder, kind), *report.write_csv(found, folder, kind)]
    print(f"{text}\n\n  written: {', '.join(str(path) for path in paths)}\n  plots: {_COMMAND} plot {paths[0]}")
    return 0 if all(check.ok is not False for one in found for check in one.checks) else 3


def _folder(arguments: argparse.Namespace, kind: str) -> Path:
    return arguments.out or RESULTS / f"{kind}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"


def _out(text: str) -> Path:
    """Make the folder of results, so that an invalid one fails before the measurement."""
    try:
        (folder := Path(text)).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise argparse.ArgumentTypeError(f"must be a folder that can be made, got {text}: {exc.strerror}") from exc
    return folder


def _workload(arguments: argparse.Namespace, concurrency: int | None, rate: str | None) -> Workload:
    return Workload(
        concurrency=concurrency if rate is None else None,
        arrivals=None if rate is None else arrivals.parse(rate),
        input_tokens=lengths.parse(arguments.input, "input"),
        output_tokens=lengths.parse(arguments.output, "output"),
        prefix_groups=arguments.prefix_groups,
        prefix_tokens=arguments.prefix_tokens,
        cancel_fraction=arguments.cancel_fraction,
        ignore_eos=not arguments.stop_at_end,
        stream=not arguments.unary,
        seed=arguments.seed,
    )


def _server_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("server")
    group.add_argument("--engine", metavar="NAME", help="start a server for engines/NAME and stop it afterwards")
    group.add_argument("--url", metavar="HOST:PORT", help="a server that runs already (TRIDENT_URL, 127.0.0.1:8001)")
    group.add_argument("--metrics-url", metavar="URL", help="its metrics (TRIDENT_METRICS_URL)")
    group.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="its tokenizer.json counts prompt tokens")


def _workload_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("load")
    group.add_argument(
        "--input", default="128", metavar="TOKENS", help=f"prompts: {lengths.FORMS} (default %(default)s)"
    )
    group.add_argument("--output", default="64", metavar="TOKENS", help="answers: likewise (default %(default)s)")
    group.add_argument(
        "--duration", type=_positive, metavar="S", help=f"(default {DURATION_S:g} s; a trace is replayed whole)"
    )
    group.add_argument(
        "--warmup", type=_seconds, metavar="S", help=f"load before that (default {WARMUP_S:g} s; 0 for a trace)"
    )
    group.add_argument("--requests", type=_count, metavar="N", help="at most N")
    group.add_argument("--prefix-groups", type=int, default=0, metavar="N", help="prompts share one of N prefixes …")
    group.add_argument("--prefix-tokens", type=int, default=0, metavar="N", help="… of N tokens")
    group.add_argument(
        "--cancel-fraction", type=float, default=0.0, metavar="F", help="share of requests cancelled midway"
    )
    group.add_argument("--stop-at-end", action="store_true", help="answers may end early, at the model's end token")
    group.add_argument("--unary", action="store_true", help="no streaming: one response per answer")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--generators", type=_count, metavar="N", help="client processes (default: 1, more if it saturates)"
    )
    group.add_argument(
        "--slo-ttft-ms", type=_positive, default=500.0, metavar="MS", help="at P95 (default %(default)g)"
    )
    group.add_argument("--slo-latency-s", type=_positive, default=5.0, metavar="S", help="at P95 (default %(default)g)")
    group.add_argument("--out", type=_out, metavar="FOLDER", help="of JSON and CSV (default benchmarks/results/…)")


def _loop_options(command: argparse.ArgumentParser) -> None:
    either = command.add_mutually_exclusive_group()
    either.add_argument("--concurrency", type=int, default=8, metavar="N", help="closed loop (default %(default)s)")
    either.add_argument("--arrivals", metavar="PROCESS", help=f"open loop: {arrivals.FORMS}")


def _numbers(field: str, text: str, kind: type) -> list:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise InvalidArgument(field, f"must be positive numbers separated by commas, got {text!r}")
    return numbers


def _among(field: str, text: str, allowed: Sequence[str]) -> list[str]:
    words = text.split(",")
    if not set(words) <= set(allowed):
        raise InvalidArgument(field, f"must be of {', '.join(allowed)}, separated by commas, got {text!r}")
    return words


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"must be between 0 and 86400, got {text}")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text}")
    return value


def _described(found: Measurement) -> str:
    workload, engine = found.workload, found.conditions["engine"]
    lengths_text = f"in {workload['input_tokens']}, out {workload['output_tokens']}"
    return f"{lengths_text}; engine {engine}; {report.on(found.conditions)}"
