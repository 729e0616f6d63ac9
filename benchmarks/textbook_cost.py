"""Measure what a response and a token cost in our ensembles and in a textbook one (``benchmarks/textbook``), in turn.

All have an engine that computes nothing and makes a token for every sequence at a fixed pace; at pace 0 the table shows
how much one replica can pass. Counted is the CPU of tritonserver and its stubs.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import figures, machine, report
from benchmarks.child_process import ROOT, process, wait_until_answers
from benchmarks.efficiency import EVERY_TOKEN_ENV, Batch, ServingPath, in_turns
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from benchmarks.server_process import ENGINES
from benchmarks.target import DeltaStream, EngineTarget, EnsembleTarget
from benchmarks.workload import PlannedRequest
from clients.wire import infer_request
from clients.wire.connection import DEFAULT_MODEL
from contract import manifest, packed_delta
from contract.generation import TokenDelta
from server import installation, ports, shared_memory, triton_command
from server.repository import read_pipeline
from server.settings import PORT_FIELDS, Settings

TEXTBOOK, PACKED, EACH = "textbook", "packed", ", 1 token/msg"
OURS = {"ensemble": DEFAULT_MODEL, PACKED: packed_delta.MODEL}
CEILING_GOAL = 20_000.0  # tokens/s with an engine that costs nothing
Cost = Callable[[Batch], float]
_COSTS: dict[str, Cost] = {"response": lambda batch: batch.response_us, "token": lambda batch: batch.serving_us}
INPUT_TOKENS, START_S = 64, 60.0
_MOCK = "from benchmarks.mock_engine import TritonPythonModel  # noqa: F401\n"
# SCHED_BATCH (3), as the supervisor starts its own, so that the two differ in nothing else.
_EXEC = (
    "import os, sys; os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); os.execv(sys.argv[1], sys.argv[1:])"
)


class TextbookTarget(EngineTarget):
    """The textbook ensemble of one server: every response is a token."""

    def open(self, request: PlannedRequest) -> DeltaStream:
        inputs: list[tuple[str, str, list]] = [
            ("text_input", "BYTES", [request.prompt]),
            ("max_tokens", "INT32", [request.max_tokens]),
        ]
        parameters: dict[str, bool | int | str] = {"triton_enable_empty_final_response": True}
        payload = infer_request.infer_request("ensemble", str(request.index), inputs, parameters)
        return self._read(payload, INPUT_TOKENS)

    @staticmethod
    def _ids(delta: TokenDelta) -> tuple[int, ...]:
        return (0,)


@contextmanager
def triton(repository: Path, engine: str, env: Mapping[str, str]) -> Iterator[ServerUnderTest]:
    """Run tritonserver alone, without our supervisor, which knows no ensemble but ours."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="trident-bench-")))
        free: dict[str, Any] = dict(zip(PORT_FIELDS, ports.free(3), strict=True))
        settings = Settings(model_repository=repository, state_dir=folder, engine=engine, **free)
        found, prefix = installation.find(), shared_memory.port_prefix(settings.grpc_port)
        models = read_pipeline(repository, engine).names
        argv = triton_command.arguments(settings, found, found.link_backends(folder), prefix, models=models)
        variables = triton_command.environment(settings, found, ENGINES / engine, prefix, env)
        log = folder / "log"
        stack.callback(shared_memory.clean, prefix)
        child = stack.enter_context(process([sys.executable, "-c", _EXEC, *argv], log, variables, pipe_output=False))
        wait_until_answers(f"{settings.http_url}/v2/models/ensemble/ready", child, log, START_S)
        yield ServerUnderTest(settings.grpc_url)


def measure(
    engine: str, step_ms: float, concurrencies: Sequence[int], tokens: int, rounds: int
) -> dict[int, dict[str, list[Batch]]]:
    """Return the batches by concurrency and path. The first round warms up."""
    manifest.load(ENGINES / engine)  # raises where there is none
    prompts = Prompts.for_engine(ENGINES / engine)
    env = os.environ | {"MOCK_STEP_MS": str(step_ms)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="trident-bench-")))
        mock = shutil.copytree(ROOT / "model_repository", folder / "models")
        (mock / "engine" / "1" / "model.py").write_text(_MOCK)
        textbook = stack.enter_context(triton(ROOT / "benchmarks" / "textbook", engine, env))
        paths = {TEXTBOOK: ServingPath(TEXTBOOK, textbook, TextbookTarget(textbook.url, prompts), prompts)}
        for sends, more in ((EACH, EVERY_TOKEN_ENV), ("", {})):
            server = stack.enter_context(triton(mock, engine, env | more))
            for name, model in OURS.items():
                target = EnsembleTarget(server.url, timings=False, model=model)
                paths[name + sends] = ServingPath(name + sends, server, target, prompts)
        return in_turns(paths, concurrencies, rounds, (INPUT_TOKENS, tokens))


def described(found: dict[int, dict[str, list[Batch]]]) -> str:
    """Format the medians, and each path's ratios to the textbook batch of the same round."""
    rows = []
    for concurrency, paths in found.items():
        for name, batches in paths.items():
            cells = []
            for cost in _COSTS.values():
                ratios = _ratios(cost, batches, paths[TEXTBOOK])
                cells += [report.number(statistics.median(map(cost, batches))), report.ranged(ratios)]
            rates = [(b.tokens / b.messages, b.messages / b.wall_s, b.tokens_per_s) for b in batches]
            cells += [report.number(statistics.median(values), 2) for values in zip(*rates, strict=True)]
            rows.append((name, concurrency, *cells))
    header = ("CPU µs", "at", "per response", "of textbook", "per token", "of textbook")
    return report.table(rows, (*header, "tok/msg", "messages/s", "tokens/s"))


def _ratios(cost: Cost, batches: Sequence[Batch], textbook: Sequence[Batch]) -> list[float]:
    """Return the costs over those of the textbook in the same rounds. A short batch of it may take no tick of CPU."""
    return [cost(own) / cost(its) for own, its in zip(batches, textbook, strict=True) if cost(its)]


def compared(found: dict[int, dict[str, list[Batch]]]) -> dict[str, dict[str, object]]:
    """Return what ``benchmarks.suite`` compares: the ratios to the textbook, and tokens per second."""
    lower, higher = {}, {}
    for at, paths in found.items():
        for name, batches in paths.items():
            for unit, cost in _COSTS.items() if name != TEXTBOOK else ():
                ratios = _ratios(cost, batches, paths[TEXTBOOK])
                lower[f"CPU of the textbook's: a {unit}, {name}, {at}"] = ratios
            higher[f"tokens/s: {name}, {at}"] = [batch.tokens_per_s for batch in batches]
    return figures.compared(figures.LOWER, lower) | figures.compared(figures.HIGHER, higher)


def goals(found: dict[int, dict[str, list[Batch]]], step_ms: float) -> list[report.Goal]:
    """Compare the packed ensemble with its goals: at a pace the ratios to the textbook, without one the ceiling."""
    out: list[report.Goal] = []
    for at, paths in found.items():
        for unit, name, bound in (("response", PACKED + EACH, 1.0), ("token", PACKED, 0.5)) if step_ms else ():
            ratio = statistics.median(_ratios(_COSTS[unit], paths[name], paths[TEXTBOOK]) or [math.nan])
            out.append(report.at_most(f"CPU of a {unit} over the textbook's at {at}", ratio, bound))
        if not step_ms:
            speed = statistics.median(batch.tokens_per_s for batch in paths[PACKED])
            out.append(report.at_least(f"tokens/s at {at}", speed, CEILING_GOAL))
    return out


def run(engine: str, step_ms: float, concurrencies: Sequence[int], tokens: int, rounds: int, out: Path) -> int:
    """Measure, print, write textbook.json."""
    conditions = machine.described()
    found = measure(engine, step_ms, concurrencies, tokens, rounds)
    about = f"{tokens} tokens out, a step every {step_ms:g} ms, {rounds} rounds, medians (ranges)"
    print(f"{about}; {report.on(conditions)}\n\n{described(found)}")
    every = [batch for paths in found.values() for batches in paths.values() for batch in batches]
    print(report.disturbance(statistics.mean(batch.others_share for batch in every)), flush=True)
    kept = [asdict(batch) for batch in every]
    verdicts = goals(found, step_ms)
    print(report.verdicts(verdicts))
    table = {"conditions": conditions, "step_ms": step_ms, "batches": kept, "compared": compared(found)}
    return report.write_json(table | {"goals": verdicts, "notes": [about]}, out, "textbook")
