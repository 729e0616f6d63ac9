"""Measure how long an engine's steps take on a running replica, and write the model of it beside the manifest.

The trials are those of step_trials.py. What was measured is kept until the model is written: a later run goes on. A few
trials tell later how fast the machine is: one that is shared becomes slower or faster by a quarter within an hour, and
forecasts by the model are as far off. Measurements within four minutes have a standard deviation of 7 %, so those who
compare forecasts measure at several times and take the geometric mean.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import beside, figures, report, scrape, service_load
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.step_trials import Experiment, Outcome, by_trial, check_serves, design, reference
from benchmarks.target import EnsembleTarget
from contract import manifest as manifests
from contract import step_model
from contract.errors import EngineFailed, InvalidArgument
from contract.manifest import EngineManifest
from contract.step_model import StepModel

POINTS = "step_model.points.jsonl"
LEAST_SEQ_LEN = 64
# Of the reference trials, and of one measurement at most. The first round is slower: an engine meets these lengths for
# the first time; once it has, one will do.
ROUNDS, MOST_S = 3, 120.0


def fitted(outcomes: list[Outcome], key: dict[str, Any]) -> StepModel:
    """Return the model of the trials' medians without what sending took, with its errors over all outcomes.

    key: manifest_sha256, machine and ``step_model.BESIDE``. Raises InvalidArgument.
    """
    beside_s = StepModel(**key, source=step_model.MEASURED, made="", step_s=1.0, sequence_s=0.0, prefill_token_s=0.0)
    groups = by_trial(outcomes).values()
    middle = [sorted(of, key=lambda one: one.point.seconds)[(len(of) - 1) // 2] for of in groups]
    sent_s = [one.sent * beside_s.sent_s(one.point.sequences) for one in middle]
    terms, _, _ = step_model.fit([one.point for one in middle], sent_s)
    requests_s = [outcome.request_s for outcome in outcomes if outcome.request_s is not None]
    told: dict[str, Any] = {
        **key,
        **terms,
        "source": step_model.MEASURED,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "request_s": max(0.0, statistics.median(requests_s)) if requests_s else 0.0,
        "acceptance": step_model.texts([text for outcome in outcomes for text in outcome.stretches]),
        "points": len(outcomes),
    }
    model = StepModel(**told)
    errors = sorted(100 * abs(_seconds(model, one) / one.point.seconds - 1) for one in outcomes)
    p50, p95 = (errors[round(part * (len(errors) - 1))] for part in (0.5, 0.95))
    return StepModel(**told, error_p50_percent=p50, error_p95_percent=p95)


def compared(outcomes: Sequence[Outcome]) -> dict[str, dict[str, object]]:
    """Return what a step takes in each trial, by figure, for ``benchmarks.suite``."""
    found: dict[str, list[float]] = {}
    for trial, of in by_trial(outcomes).items():
        label = f"a step, ms: {trial.sequences} sequences, prompts of {trial.prompt}, {trial.prefill} read beside them"
        found[label + ", drafted for" * trial.drafted] = [1e3 * outcome.point.seconds for outcome in of]
    return figures.compared(figures.LOWER, found)


def _seconds(model: StepModel, outcome: Outcome) -> float:
    """Return the seconds of a trial's step with as many sendings as it had; prompts alone are sent after a pause."""
    sequences = outcome.point.sequences
    own_s = model.engine_s(*outcome.point.work)
    return own_s + (outcome.sent * model.sent_s(sequences) if sequences else model.idle_s)


def described(model: StepModel, outcomes: list[Outcome]) -> str:
    """Return the points beside the model, and the model, for people."""
    rows = []
    for outcome in sorted(outcomes, key=lambda one: (one.point.prefill_tokens > 0, one.point.sequences)):
        point = outcome.point
        found, cells = _seconds(model, outcome), tuple(map(round, point.work))
        rows.append((*cells, report.ms(point.seconds), report.ms(found), f"{100 * (found / point.seconds - 1):+.0f} %"))
    terms = ", ".join(f"{name} {getattr(model, name):.3g}" for name in step_model.TERMS)
    return (
        report.table(rows, ("sequences", "context", "prefill", "drafted", "ms", "model", "error"))
        + f"\n  {model.points} steps on {model.machine}: error p50 {model.error_p50_percent:.1f} %, "
        + f"p95 {model.error_p95_percent:.1f} %; "
        + f"{report.ms(model.request_s)} ms a request outside the steps\n  {terms}\n  "
        + ", ".join(f"{name} {getattr(model, name):.3g}" for name in step_model.BESIDE)
        + f"\n  {len(model.acceptance)} texts, {model.tokens_per_step:.1f} tokens a step" * bool(model.acceptance)
    )


def run(server: ServerUnderTest, rounds: int, seconds: float, machine: str | None, out: Path | None) -> int:
    """Calibrate the engine of a replica: print the points and the model, write step_model.json, and with ``out`` what
    each trial took to calibrate.json. Returns 0, or 3 if the time was over before every trial was measured.

    machine: of the replica; None: this one. Raises TridentError.
    """
    folder = server.known_engine()
    engine = manifests.load(folder)
    if engine.encoder is not None:
        raise InvalidArgument("engine", f"must generate tokens; {engine.name} is of kind {engine.kind}")
    if engine.max_seq_len < LEAST_SEQ_LEN:
        allowed = f"must have a max_seq_len of {LEAST_SEQ_LEN} at least to be measured"
        raise InvalidArgument("engine", f"{allowed}; {engine.name} has {engine.max_seq_len}")
    digest = manifests.sha256_file(folder / manifests.FILE_NAME)
    check_serves(server, engine.name, digest)
    if engine.draft_tokens and server.metrics_url is None:
        raise InvalidArgument("metrics_url", "must be given: the engine drafts, and its metrics tell what it accepts")
    key = {"manifest_sha256": digest, "machine": machine or step_model.machine_kind()}
    kept, trials, prompts = (out or folder) / POINTS, design(engine), Prompts.for_engine(folder)

    async def measured() -> Experiment:
        async with EnsembleTarget(server.url) as target:
            experiment = Experiment(engine, key, target, prompts, kept)
            experiment.drafted = lambda: scrape.drafted(server.metrics_url or "")
            await experiment.run(trials, rounds, time.monotonic() + seconds)
            return experiment

    experiment = asyncio.run(measured())
    outcomes = experiment.outcomes
    if out is not None:
        report.write_json({"compared": compared(outcomes)}, out, "calibrate")
    if left := len(set(trials) - experiment.left_out - {outcome.trial for outcome in outcomes}):
        print(f"{seconds:g} s are over, {left} of {len(trials)} trials are left: the same command goes on with them")
        return 3
    costs = beside.measured(server, prompts, engine.max_seq_len, engine.max_batch_size)
    model = fitted(outcomes, key | costs | {"draft_tokens": engine.draft_tokens})
    print(described(model, outcomes))

    async def served() -> tuple[list[Record], float]:
        async with EnsembleTarget(server.url) as target:
            serving_s = beside.serving_cpu(server) or (lambda: 0.0)
            return await service_load.served(model, engine, target, prompts, serving_s)

    model = service_load.settled(model, lambda: asyncio.run(served()), partial(reference_s, server, folder, engine))
    trials_s = middle_s([outcome for outcome in outcomes if outcome.trial in reference(engine)])
    if step_model.drifted(ratio := model.reference_s / trials_s):
        print(f"  during the loads steps took {ratio:.2f} times what they took in the trials: calibrate again")
    path = model.save(out or folder)
    kept.unlink()
    print(f"  written: {path}")
    if not costs and machine is None:
        print(f"  no process here serves {server.url}: is it of {model.machine!r}? --machine names another")
    return 0


def reference_s(server: ServerUnderTest, folder: Path, engine: EngineManifest, rounds: int = ROUNDS) -> float:
    """Return the geometric mean of the steps of the reference trials on a replica, in seconds. Raises TridentError."""
    trials = reference(engine)

    async def measured(kept: Path) -> list[Outcome]:
        async with EnsembleTarget(server.url) as target:
            experiment = Experiment(engine, {}, target, Prompts.for_engine(folder), kept)
            await experiment.run(trials, rounds, time.monotonic() + MOST_S)
            return experiment.outcomes

    with TemporaryDirectory() as kept:
        return middle_s(asyncio.run(measured(Path(kept) / "points.jsonl")))


def middle_s(outcomes: list[Outcome]) -> float:
    """Return the geometric mean of the trials' medians in seconds. Raises EngineFailed: there are none."""
    if not outcomes:
        raise EngineFailed(f"no step was measured within {MOST_S:g} s")
    found = by_trial(outcomes).values()
    return statistics.geometric_mean(statistics.median(one.point.seconds for one in of) for of in found)


def steps_take(server: ServerUnderTest, rounds: int = ROUNDS) -> float:
    """Return how many times as long as when the engine was calibrated steps take on a replica. Raises InvalidArgument,
    NotFound: the engine is not known, was not calibrated. TridentError: the replica failed."""
    folder = server.known_engine()
    model, engine = step_model.of_engine(folder), manifests.load(folder)
    if not model.reference_s:
        raise InvalidArgument("engine", f"must have been measured; the step model of {engine.name} is an estimate")
    check_serves(server, engine.name, model.manifest_sha256)
    return reference_s(server, folder, engine, rounds) / model.reference_s


def speed(server: ServerUnderTest, out: Path) -> int:
    """Print ``steps_take``, and write it to speed.json."""
    ratio = steps_take(server)
    print(f"  {step_model.described_drift(ratio)}")
    report.write_json({"steps_take": ratio}, out, "speed")
    return 0
