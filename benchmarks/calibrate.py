"""Measure how long an engine's steps take on a running replica, and write the model of it beside the manifest.

The trials are those of a designed experiment (step_trials.py). What was measured is kept until the model is written: a
run that was interrupted goes on.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import beside, figures, report, scrape, service_load, speed
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.step_trials import Experiment, Outcome, Trial, check_serves, design, reference
from benchmarks.target import EnsembleTarget
from contract import manifest as manifests
from contract import step_model
from contract.errors import InvalidArgument
from contract.step_model import StepModel

POINTS = "step_model.points.jsonl"
LEAST_SEQ_LEN = 64


def fitted(outcomes: list[Outcome], key: dict[str, Any]) -> StepModel:
    """Return the model of the trials' medians without what sending took, with its errors over all outcomes.

    key: manifest_sha256, machine and ``step_model.BESIDE``. Raises InvalidArgument.
    """
    beside_s = StepModel(**key, source=step_model.MEASURED, made="", step_s=1.0, sequence_s=0.0, prefill_token_s=0.0)
    by_trial: dict[Trial, list[Outcome]] = {}
    for outcome in outcomes:
        by_trial.setdefault(outcome.trial, []).append(outcome)
    middle = [sorted(of, key=lambda one: one.point.seconds)[(len(of) - 1) // 2] for of in by_trial.values()]
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
    errors = sorted(error_percent(model, outcome) for outcome in outcomes)
    p50, p95 = (errors[round(part * (len(errors) - 1))] for part in (0.5, 0.95))
    return StepModel(**told, error_p50_percent=p50, error_p95_percent=p95)


def compared(outcomes: Sequence[Outcome]) -> dict[str, dict[str, object]]:
    """Return what a step takes in each trial, by figure, for ``benchmarks.suite``."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        trial = outcome.trial
        label = f"a step, ms: {trial.sequences} sequences, prompts of {trial.prompt}, {trial.prefill} read beside them"
        label += ", drafted for" * trial.drafted
        found.setdefault(label, []).append(1e3 * outcome.point.seconds)
    return figures.compared(figures.LOWER, found)


def error_percent(model: StepModel, outcome: Outcome) -> float:
    return 100 * abs(_seconds(model, outcome) / outcome.point.seconds - 1)


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


def run(server: ServerUnderTest, rounds: int, seconds: float, out: Path | None, machine: str | None = None) -> int:
    """Calibrate the engine of a replica: print the points and the model, write step_model.json, and with ``out`` what
    each trial took to calibrate.json.

    machine: of the replica; None: this one.
    Returns 0, or 3 if the time was over before every trial was measured.
    Raises TridentError.
    """
    folder = server.engine_folder
    if folder is None:
        raise InvalidArgument("engine", "must name the replica's engine: --engine, or --tokenizer FOLDER")
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
    kept, trials = (out or folder) / POINTS, design(engine)

    async def measured() -> Experiment:
        target = EnsembleTarget(server.url)
        try:
            experiment = Experiment(engine, key, target, Prompts.for_engine(folder), kept)
            experiment.drafted = lambda: scrape.drafted(server.metrics_url or "")
            await experiment.run(trials, rounds, time.monotonic() + seconds)
            return experiment
        finally:
            await target.close()

    experiment = asyncio.run(measured())
    outcomes = experiment.outcomes
    if out is not None:
        report.write_json({"compared": compared(outcomes)}, out, "calibrate")
    if left := len(set(trials) - experiment.left_out - {outcome.trial for outcome in outcomes}):
        print(f"{seconds:g} s are over, {left} of {len(trials)} trials are left: the same command goes on with them")
        return 3
    costs = beside.measured(server, Prompts.for_engine(folder), engine.max_seq_len, engine.max_batch_size)
    model = fitted(outcomes, key | costs | {"draft_tokens": engine.draft_tokens})
    print(described(model, outcomes))

    async def served() -> tuple[list[Record], float]:
        target, serving_s = EnsembleTarget(server.url), beside.serving_cpu(server) or (lambda: 0.0)
        try:
            return await service_load.served(model, engine, target, Prompts.for_engine(folder), serving_s)
        finally:
            await target.close()

    model = service_load.settled(
        model, lambda: asyncio.run(served()), lambda rounds: speed.reference_s(server, folder, engine, rounds)
    )
    trials_s = speed.middle_s([outcome for outcome in outcomes if outcome.trial in reference(engine)])
    if step_model.drifted(ratio := model.reference_s / trials_s):
        print(f"  during the loads steps took {ratio:.2f} times what they took in the trials: calibrate again")
    path = model.save(out or folder)
    kept.unlink()
    print(f"  written: {path}")
    if not costs and machine is None:
        print(f"  no process here serves {server.url}: is it of {model.machine!r}? --machine names another")
    return 0
