"""The command line of the benchmarks: what can be measured, of which server, under which load."""

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
from benchmarks.measurement import Measurement, Where
from benchmarks.served import ENGINES, served
from benchmarks.workload import Workload
from clients.terminal import forget_stdout
from clients.wire.connection import Connection, sendable
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
Without --engine the server is the one at TRIDENT_URL and TRIDENT_METRICS_URL, or on this machine's usual ports.
"""


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    # SIGTERM ends us as an exception would, so that no server we started outlives us.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code = arguments.verb(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output went away
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
    verbs = whole.add_subparsers(required=True, metavar="VERB")
    one = verbs.add_parser("run", help="one load, every figure, and whether to believe it")
    _server_options(one)
    _workload_options(one)
    _loop_options(one)
    one.set_defaults(verb=run)
    many = verbs.add_parser("sweep", help="a load after the other: the throughput-latency curve")
    _server_options(many)
    _workload_options(many)
    either = many.add_mutually_exclusive_group()
    either.add_argument(
        "--concurrency", default="1,2,4,8,16,32", metavar="N,N,…", help="closed loops (default %(default)s)"
    )
    either.add_argument("--rates", metavar="R,R,…", help="open loops, Poisson, requests per second")
    many.set_defaults(verb=sweep)
    cost = verbs.add_parser("efficiency", help="the ensemble against the engine over gRPC and the engine itself")
    cost.add_argument(
        "--engines", default=",".join(efficiency.ENGINES_MEASURED), metavar="NAME,…", help="(%(default)s)"
    )
    cost.add_argument("--rounds", type=_count, default=3, metavar="N", help="turns of each (default %(default)s)")
    cost.add_argument("--concurrency", default="1,8,32,64", metavar="N,N,…", help="(default %(default)s)")
    cost.add_argument("--out", type=_out, metavar="FOLDER")
    cost.set_defaults(verb=against_the_engine)
    hop = verbs.add_parser("hops", help="CPU per response by process, and the first token's way")
    hop.add_argument("--engine", default="demo", metavar="NAME", help="(default %(default)s)")
    hop.add_argument("--concurrency", default="1,32", metavar="N,N,…", help="(default %(default)s)")
    hop.add_argument("--tokens", type=_count, default=128, metavar="N", help="of an answer (default %(default)s)")
    hop.add_argument("--rounds", type=_count, default=3, metavar="N", help="(default %(default)s)")
    hop.add_argument("--out", type=_out, metavar="FOLDER")
    hop.set_defaults(verb=by_hop)
    free = verbs.add_parser("cancel", help="how soon a cancelled request's place is free, under load")
    _server_options(free)
    free.add_argument("--samples", type=_count, default=50, metavar="N", help="cancels (default %(default)s)")
    free.add_argument("--streams", default="8,32", metavar="N,N,…", help="loads to cancel whole (default %(default)s)")
    free.add_argument("--max-tokens", type=_count, default=480, metavar="N", help="of a stream (default %(default)s)")
    free.add_argument("--out", type=_out, metavar="FOLDER")
    free.set_defaults(verb=cancel_to_free)
    theirs = verbs.add_parser("perf-analyzer", help="NVIDIA's perf_analyzer, streaming and unary")
    _server_options(theirs)
    theirs.add_argument("--concurrency", default="1,8,32", metavar="N,N,…", help="(default %(default)s)")
    theirs.add_argument("--rates", default="4,8", metavar="R,R,…", help="requests/s (default %(default)s)")
    theirs.add_argument("--requests", type=_count, default=40, metavar="N", help="per load (default %(default)s)")
    theirs.add_argument("--out", type=_out, metavar="FOLDER")
    theirs.set_defaults(verb=by_perf_analyzer)
    http = verbs.add_parser("aiperf", help="NVIDIA's AIPerf against the OpenAI gateway")
    http.add_argument("--engine", default="demo", metavar="NAME", help="started with a gateway (default %(default)s)")
    http.add_argument("--url", metavar="URL", help="a gateway that runs already, for --engine's model")
    http.add_argument("--concurrency", default="1,8,32", metavar="N,N,…", help="(default %(default)s)")
    http.add_argument("--rates", default="4", metavar="R,R,…", help="requests/s (default %(default)s)")
    http.add_argument("--requests", type=_count, default=40, metavar="N", help="per load (default %(default)s)")
    http.add_argument("--out", type=_out, metavar="FOLDER")
    http.set_defaults(verb=by_aiperf)
    beside = verbs.add_parser("peers", help="our server beside vLLM, llama.cpp and transformers serve")
    beside.add_argument("--model", default="demo", metavar="NAME", help="demo or bench-160m (default %(default)s)")
    beside.add_argument("--only", default=",".join(peer_servers.PEERS), metavar="NAME,…", help="(default %(default)s)")
    beside.add_argument("--concurrency", default="1,8,32", metavar="N,N,…", help="(default %(default)s)")
    beside.add_argument("--rounds", type=_count, default=2, metavar="N", help="turns of each (default %(default)s)")
    beside.add_argument(
        "--duration", type=_positive, default=4.0, metavar="S", help="of a turn (default %(default)s s)"
    )
    beside.add_argument("--input", default="128", metavar="TOKENS", help="(default %(default)s)")
    beside.add_argument("--output", default="64", metavar="TOKENS", help="(default %(default)s)")
    beside.add_argument("--out", type=_out, metavar="FOLDER")
    beside.set_defaults(verb=against_peers)
    relay = verbs.add_parser("gateway", help="what the gateway adds and withstands, beside LiteLLM and a plain relay")
    relay.add_argument("--only", default=",".join(gateway_run.PARTS), metavar="PART,…", help="(default %(default)s)")
    relay.add_argument("--without-peers", action="store_true", help="the gateway alone")
    relay.add_argument("--rounds", type=_count, default=2, metavar="N", help="turns of each way (default %(default)s)")
    relay.add_argument("--seconds", type=_positive, default=3.0, metavar="S", help="of a turn (default %(default)s)")
    relay.add_argument(
        "--streams", type=_count, default=gateway_run.CROWD, metavar="N", help="slow (default %(default)s)"
    )
    relay.add_argument("--doors", default="http,grpc", metavar="DOOR,…", help="of slow ones and bursts (%(default)s)")
    relay.add_argument("--out", type=_out, metavar="FOLDER")
    relay.set_defaults(verb=at_the_gateway)
    picture = verbs.add_parser("plot", help="pictures of what run or sweep wrote")
    picture.add_argument("result", type=Path, metavar="RESULT.json")
    picture.add_argument("--out", type=_out, metavar="FOLDER", help="(default: beside the result)")
    picture.set_defaults(verb=plot)
    return whole


def by_perf_analyzer(arguments: argparse.Namespace) -> int:
    levels, rates = _numbers("concurrency", arguments.concurrency, int), _numbers("rates", arguments.rates, float)
    with _server(arguments) as where:
        return perf_analyzer.run(where, levels, rates, arguments.requests, _folder(arguments, "perf-analyzer"))


def against_peers(arguments: argparse.Namespace) -> int:
    levels = tuple(_numbers("concurrency", arguments.concurrency, int))
    subject = peer_servers.subject(arguments.model)
    asked = (levels, arguments.rounds, arguments.duration, arguments.input, arguments.output)
    return peers.run(arguments.only.split(","), peers.Plan(subject, *asked), _folder(arguments, "peers"))


def by_aiperf(arguments: argparse.Namespace) -> int:
    levels, rates = _numbers("concurrency", arguments.concurrency, int), _numbers("rates", arguments.rates, float)
    loads = (levels, rates, arguments.requests, _folder(arguments, "aiperf").absolute())
    if arguments.url:
        return aiperf.run(arguments.url, arguments.engine, ENGINES / arguments.engine, *loads)
    aiperf.ENVIRONMENT.ensure()
    with peer_servers.gateway(arguments.engine) as url:
        return aiperf.run(url, arguments.engine, ENGINES / arguments.engine, *loads)


def at_the_gateway(arguments: argparse.Namespace) -> int:
    parts = _among("only", arguments.only, gateway_run.PARTS)
    doors = _among("doors", arguments.doors, ("http", "grpc"))
    rounds, seconds, streams = arguments.rounds, arguments.seconds, arguments.streams
    folder = _folder(arguments, "gateway")
    return gateway_run.run(parts, not arguments.without_peers, rounds, seconds, streams, doors, folder)


def plot(arguments: argparse.Namespace) -> int:
    for path in plots.draw(arguments.result, arguments.out or arguments.result.parent):
        print(path)
    return 0


def by_hop(arguments: argparse.Namespace) -> int:
    levels = _numbers("concurrency", arguments.concurrency, int)
    return hops.run(arguments.engine, levels, arguments.tokens, arguments.rounds, _folder(arguments, "hops"))


def cancel_to_free(arguments: argparse.Namespace) -> int:
    streams = _numbers("streams", arguments.streams, int)
    with _server(arguments) as where:
        return cancel.run(where, streams, arguments.samples, arguments.max_tokens, _folder(arguments, "cancel"))


def against_the_engine(arguments: argparse.Namespace) -> int:
    levels = _numbers("concurrency", arguments.concurrency, int)
    return efficiency.run(arguments.engines.split(","), arguments.rounds, levels, _folder(arguments, "efficiency"))


def run(arguments: argparse.Namespace) -> int:
    workload = _workload(arguments, arguments.concurrency, arguments.arrivals)
    with _server(arguments) as where:
        found = _measure("run", workload, where, arguments)
    return _keep([found], "run", arguments, report.of_run(found))


def sweep(arguments: argparse.Namespace) -> int:
    if arguments.rates:
        loads = [(f"{rate:g}/s", None, f"poisson:{rate}") for rate in _numbers("rates", arguments.rates, float)]
    else:
        levels = _numbers("concurrency", arguments.concurrency, int)
        loads = [(str(level), level, None) for level in levels]
    found: list[Measurement] = []
    with _server(arguments) as where:
        for n, (name, level, rate) in enumerate(loads):
            workload = _workload(arguments, level, rate).with_seed(arguments.seed + n)
            found.append(_measure(name, workload, where, arguments))
    said = f"ms where not said otherwise; {_said(found[0])}\n{report.of_sweep(found)}"
    return _keep(found, "sweep", arguments, said)


def _measure(name: str, workload: Workload, where: Where, arguments: argparse.Namespace) -> Measurement:
    extent = _extent(arguments, workload)
    options = {"slo": Slo(arguments.slo_ttft_ms / 1e3, arguments.slo_latency_s)}
    options["conditions"] = {"engine": arguments.engine or "not ours", "command": " ".join(sys.argv[1:])}
    if arguments.generators:
        return measurement.measure(name, workload, where, extent, generators=arguments.generators, **options)
    return measurement.measure_unsaturated(name, workload, where, extent, **options)


def _extent(arguments: argparse.Namespace, workload: Workload) -> Extent:
    """A trace is replayed whole, from its first request, unless the command line says otherwise."""
    trace = workload.arrivals if isinstance(workload.arrivals, arrivals.Trace) else None
    duration_s, warmup_s, requests = arguments.duration, arguments.warmup, arguments.requests
    if warmup_s is None:
        warmup_s = 0.0 if trace else WARMUP_S
    if duration_s is None and trace:
        return Extent(None, warmup_s, min(requests or len(trace.rows), len(trace.rows)))
    return Extent(DURATION_S if duration_s is None else duration_s, warmup_s, requests)


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[Where]:
    """The server the command line means: one of our own with --engine, else one that runs already."""
    if arguments.engine:
        with served(arguments.engine) as where:
            yield where
        return
    url = arguments.url or os.environ.get("TRIDENT_URL") or "127.0.0.1:8001"
    metrics_url = arguments.metrics_url or os.environ.get("TRIDENT_METRICS_URL")
    if metrics_url is None and url.startswith(("127.0.0.1:", "localhost:")):
        metrics_url = "http://127.0.0.1:8002/metrics"
    folder = arguments.tokenizer or ENGINES / os.environ.get("TRIDENT_ENGINE", "demo")
    Connection(url)  # raises for what is no address, before a load is made
    if arguments.tokenizer and not (folder / "tokenizer.json").exists():
        raise InvalidArgument("tokenizer", f"there is no tokenizer.json in {folder}")
    yield Where(url, metrics_url, folder)


def _keep(found: list[Measurement], kind: str, arguments: argparse.Namespace, said: str) -> int:
    """Writes what was found, then says it; the exit code is 0 if the self-checks hold."""
    folder = _folder(arguments, kind)
    paths = [measurement.save(found, folder, kind), *report.write_csv(found, folder, kind)]
    print(f"{said}\n\n  written: {', '.join(str(path) for path in paths)}\n  plots: {_COMMAND} plot {paths[0]}")
    return 0 if all(check.ok is not False for one in found for check in one.checks) else 3


def _folder(arguments: argparse.Namespace, kind: str) -> Path:
    return arguments.out or RESULTS / f"{kind}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"


def _out(text: str) -> Path:
    """The folder of results, made now: a measurement shall not be lost for want of it."""
    try:
        (folder := Path(text)).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise argparse.ArgumentTypeError(f"got {text}, where no folder can be made: {exc.strerror}") from exc
    return folder


def _workload(arguments: argparse.Namespace, concurrency: int | None, rate: str | None) -> Workload:
    return Workload(
        concurrency=concurrency if rate is None else None,
        arrivals=None if rate is None else arrivals.parse(rate),
        input_tokens=lengths.parse(arguments.input, "input"),
        output_tokens=lengths.parse(arguments.output, "output"),
        prefix_groups=arguments.prefix_groups,
        prefix_tokens=arguments.prefix_tokens,
        tenants=_tenants(arguments.tenants),
        cancel_fraction=arguments.cancel_fraction,
        ignore_eos=not arguments.stop_at_end,
        stream=not arguments.unary,
        seed=arguments.seed,
    )


def _server_options(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("server")
    group.add_argument("--engine", metavar="NAME", help="start a server for engines/NAME and stop it afterwards")
    group.add_argument("--url", metavar="HOST:PORT", help="a server that runs already (TRIDENT_URL, 127.0.0.1:8001)")
    group.add_argument("--metrics-url", metavar="URL", help="its metrics (TRIDENT_METRICS_URL)")
    group.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="whose tokenizer.json counts prompt tokens")


def _workload_options(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group("load")
    group.add_argument(
        "--input", default="128", metavar="TOKENS", help=f"prompts: {lengths.FORMS} (default %(default)s)"
    )
    group.add_argument("--output", default="64", metavar="TOKENS", help="answers: likewise (default %(default)s)")
    group.add_argument(
        "--duration", type=_positive, metavar="S", help=f"(default {DURATION_S:g} s; of a trace all of it)"
    )
    group.add_argument(
        "--warmup", type=_seconds, metavar="S", help=f"load before that (default {WARMUP_S:g} s; before a trace none)"
    )
    group.add_argument("--requests", type=_count, metavar="N", help="at most so many")
    group.add_argument("--prefix-groups", type=int, default=0, metavar="N", help="prompts share one of N prefixes …")
    group.add_argument("--prefix-tokens", type=int, default=0, metavar="N", help="… of so many tokens")
    group.add_argument("--tenants", default="", metavar="NAME=WEIGHT,…", help="who asks, in the header x-tenant-id")
    group.add_argument("--cancel-fraction", type=float, default=0.0, metavar="F", help="so many callers leave midway")
    group.add_argument("--stop-at-end", action="store_true", help="answers may end early, at the model's end token")
    group.add_argument("--unary", action="store_true", help="whole answers instead of streams")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--generators", type=_count, metavar="N", help="client processes (default: 1, more if it saturates)"
    )
    group.add_argument(
        "--slo-ttft-ms", type=_positive, default=500.0, metavar="MS", help="at P95 (default %(default)g)"
    )
    group.add_argument("--slo-latency-s", type=_positive, default=5.0, metavar="S", help="at P95 (default %(default)g)")
    group.add_argument("--out", type=_out, metavar="FOLDER", help="of JSON and CSV (default benchmarks/results/…)")


def _loop_options(verb: argparse.ArgumentParser) -> None:
    either = verb.add_mutually_exclusive_group()
    either.add_argument("--concurrency", type=int, default=8, metavar="N", help="closed loop (default %(default)s)")
    either.add_argument("--arrivals", metavar="PROCESS", help=f"open loop: {arrivals.FORMS}")


def _tenants(text: str) -> dict[str, float]:
    out = {}
    for part in filter(None, text.split(",")):
        name, _, weight = part.partition("=")
        try:
            if not name or not sendable(name):
                raise ValueError(name)
            out[name] = float(weight or 1)
        except ValueError as exc:
            allowed = "NAME=WEIGHT,NAME=WEIGHT, names in printable ASCII"
            raise InvalidArgument("tenants", f"got {text!r}; allowed is {allowed}") from exc
    return out


def _numbers(field: str, text: str, kind: type) -> list:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise InvalidArgument(field, f"got {text!r}; allowed are numbers above 0 with commas between")
    return numbers


def _among(field: str, text: str, allowed: Sequence[str]) -> list[str]:
    words = text.split(",")
    if not set(words) <= set(allowed):
        raise InvalidArgument(field, f"got {text!r}; allowed are {', '.join(allowed)} with commas between")
    return words


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"got {text}; allowed is 0 to 86400")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"got {text}; allowed is a number above 0")
    return value


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; allowed is a whole number from 1")
    return value


def _said(found: Measurement) -> str:
    workload, engine = found.workload, found.conditions["engine"]
    lengths_said = f"in {workload['input_tokens']}, out {workload['output_tokens']}"
    return f"{lengths_said}; engine {engine}; {report.on(found.conditions)}"
