"""Measure how long an engine's steps take on a running replica, and write the model of it beside the manifest.

The trials are those of a designed experiment (step_trials.py). What was measured is kept until the model is written: a
run that was interrupted goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import beside, figures, lengths, report, scrape, speed
from benchmarks.arrivals import Poisson
from benchmarks.driver import Extent, drive
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts, PromptSource
from benchmarks.record import Record
from benchmarks.step_trials import (
    ANSWER,
    PROBES,
    Experiment,
    Outcome,
    Trial,
    check_serves,
    design,
    reference,
)
from benchmarks.target import EnsembleTarget, Target
from benchmarks.workload import Workload
from contract import manifest as manifests
from contract import step_model
from contract.errors import InvalidArgument
from contract.manifest import EngineManifest
from contract.scheduling import UNDRAFTED_FROM
from contract.step_model import Point, StepModel

POINTS = "step_model.points.jsonl"
LEAST_SEQ_LEN = 64
# An open load, of a part of what the engine can do with so many sequences, and a closed loop of so many. Each of a slow
# engine lasts longer, for as many requests of the open load: with a third of them its steps at 4, 8 and 16 sequences
# differed by up to a third between two loads of SmolLM2.
IN_SERVICE, PART = (8, 32), 0.5
OPEN_REQUESTS, LEAST_S, MOST_S = 120, 12.0, 40.0
# Loads of steps in service, at most; they are sent until two in turn agree: how fast a shared machine is changes.
SERVICE_ROUNDS, AGREED = 4, 0.15
LEAST, MOST = 0.5, 2.0  # that they may change the designed steps by
DRAFTED_ALONE = -1  # beside the logarithms of how many streams decode
GAPS = 20  # of as many streams, that tell how long their steps are
PROMPTS = "prefill_s", "prefill_token_s", "prefill_square_s"  # the terms of prompts


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


def in_service(model: StepModel, records: Sequence[Record]) -> StepModel:
    """Return the model with the steps of an open load, in which requests come one by one, some after a pause.

    Its steps that decode take so many times what the designed ones of as many sequences do, and its prompts what they
    take more: streams that begin and end together are the fastest. Where the engine drafts, of the streams that it may
    draft for only messages of several tokens to one alone tell how long a step took: others may be of either kind.
    """
    spans = [
        (record.timings.first_scheduled_ns / 1e9, record.timings.first_token_ns / 1e9, record)
        for record in records
        if record.ok and record.timings is not None
    ]
    each = statistics.mean(record.input_tokens + record.tokens / 2 for _, _, record in spans) if spans else 0.0
    drafts_up_to = model.drafted_up_to
    # Gaps between messages beside what they take by the model, and steps with a prompt: streams, seconds, its tokens.
    decoded, steps = dict[int, list[tuple[float, float]]](), list[tuple[int, float, int]]()
    alone_s = list[float]()

    def decoding_at(at_s: float) -> int:
        return sum(first_s <= at_s < record.ended_s for _, first_s, record in spans)

    def reading(from_s: float, to_s: float) -> int:
        return sum(begin_s < to_s and first_s > from_s for begin_s, first_s, _ in spans)

    def waits_for_first_token(from_s: float, to_s: float) -> bool:
        """Whether any request did meanwhile: the model counts by itself what that takes of the cores."""
        return any(record.sent_s < to_s and record.messages[0][0] > from_s for _, _, record in spans)

    def drafted_of(streams: int) -> int:
        return streams if streams <= drafts_up_to else 0

    for begin_s, first_s, record in spans:
        for (from_s, _), (to_s, tokens) in zip(record.messages, record.messages[1:], strict=False):
            streams = decoding_at(from_s)
            drafted = streams <= (UNDRAFTED_FROM if drafts_up_to else 0)
            if drafted and (streams > 1 or not 1 < tokens <= 1 + model.draft_tokens):
                continue
            if streams == decoding_at(to_s) and not waits_for_first_token(from_s, to_s):
                own_s = (1 if drafted else tokens) * model.engine_s(streams, streams * each, 0, drafted_of(streams))
                level = DRAFTED_ALONE if drafted else round(math.log2(streams))
                decoded.setdefault(level, []).append((to_s - from_s - model.sent_s(streams), own_s))
        streams = decoding_at(begin_s)
        if reading(begin_s, first_s) == 1:
            steps.append((streams, first_s - begin_s, record.input_tokens))
            if not streams:
                alone_s.append((record.ttft_from_send_s or 0.0) - (first_s - begin_s))
    levels = {level: _ratio(gaps) for level, gaps in decoded.items() if len(gaps) >= GAPS}
    drafted_alone = levels.pop(DRAFTED_ALONE, None)
    plain = levels or {0: drafted_alone or 1.0}

    def factor(streams: int) -> float:
        """Of a plain step."""
        return float(np.interp(math.log2(streams), sorted(plain), [plain[level] for level in sorted(plain)]))

    terms: dict[str, Any] = {}
    if levels or drafted_alone:
        terms = _refitted(model, each, factor, drafted_alone)
    found = dataclasses.replace(model, **terms)
    prompts = _prompts_factor(
        found, [Point(n, n * each, tokens, took_s, drafted_of(n)) for n, took_s, tokens in steps if n]
    )
    terms |= {name: value * prompts for name, value in model.terms.items() if name in PROMPTS}
    found = dataclasses.replace(model, **terms)
    later = [(n, took_s, found.seconds(n, n * each, tokens, drafted_of(n))) for n, took_s, tokens in steps]
    # Percentiles, since a step beside something else that the machine does tells nothing.
    if len(alone_s) >= PROBES:
        terms["request_s"] = statistics.median(alone_s)
        terms["idle_s"] = max(0.0, statistics.median(took_s - whole_s for n, took_s, whole_s in later if not n))
    logs = [math.log(took_s / (whole_s + (not n) * terms.get("idle_s", model.idle_s))) for n, took_s, whole_s in later]
    if len(logs) >= PROBES:
        low, high = np.percentile(logs, [16, 84])
        terms["spread"] = float(high - low) / 2
    found = dataclasses.replace(model, **terms)
    told = ", ".join(f"{2**level} x {plain[level]:.2f}" for level in sorted(plain))
    told += f", with drafts x {drafted_alone:.2f}" if drafted_alone else ""
    print(
        f"  in service, {len(spans)} requests: streams {told}; prompts x {prompts:.2f}, "
        f"{report.ms(found.idle_s)} ms after a pause, spread {found.spread:.2f}"
    )
    return found


def settled(
    model: StepModel, served: Callable[[], tuple[list[Record], float]], reference_s: Callable[[int], float]
) -> StepModel:
    """Return the model with the steps in service of two loads that agree, of the last two where none do.

    served: sends a load and returns its requests and the CPU seconds of a response.
    reference_s: measures so many rounds of the reference trials. They run before each load and after the last, and tell
        how fast the machine was while it served the loads that count.
    """
    rounds: list[tuple[StepModel, list[Record], float]] = []
    # More rounds at first: the server of a resumed calibration may not have met these lengths.
    references, differ = [reference_s(speed.ROUNDS)], math.inf
    while differ > AGREED and len(rounds) < SERVICE_ROUNDS:
        records, response_cpu_s = served()
        references.append(reference_s(1))
        found = in_service(dataclasses.replace(model, response_cpu_s=response_cpu_s), records)
        rounds.append((found, records, response_cpu_s))
        if len(rounds) > 1:
            differ = apart(found, rounds[-2][0])
            print(f"  steps of these two loads differ by {differ:.0%} at most")
    if differ > AGREED:
        print("  the machine's speed changes too much: forecasts by this model are doubtful")
    (_, before, before_cpu_s), (_, last, last_cpu_s) = rounds[-2:]
    response_cpu_s, mean_s = (before_cpu_s + last_cpu_s) / 2, statistics.geometric_mean(references[-3:])
    return in_service(dataclasses.replace(model, response_cpu_s=response_cpu_s, reference_s=mean_s), before + last)


def apart(one: StepModel, other: StepModel) -> float:
    """Return the part by which the slower of two models' steps are longer, where they differ most."""
    kinds = [(n, n * ANSWER, prompt) for n in (1, 4, 32) for prompt in (0, ANSWER)]
    return max(abs(math.log(one.seconds(*kind) / other.seconds(*kind))) for kind in kinds)


def _ratio(gaps: list[tuple[float, float]]) -> float:
    """Return what gaps took over what they take by the model, without those beside something else of the machine."""
    longest = 3 * max(LEAST, statistics.median(took_s / model_s for took_s, model_s in gaps))
    kept = [(took_s, model_s) for took_s, model_s in gaps if took_s <= longest * model_s]
    return _within(sum(took_s for took_s, _ in kept) / sum(model_s for _, model_s in kept))


def _prompts_factor(model: StepModel, steps: Sequence[Point]) -> float:
    """Return the factor of the model's prompt terms at which it agrees with the measured steps, from LEAST to MOST.

    It agrees when the median errors (logarithms), one for each number of streams in powers of two, have a mean of 0:
    a closed loop makes many more steps than few streams do and would decide alone. Medians leave out what other work on
    the machine stretches. 1 where no number of streams has ``PROBES`` steps.

    steps: with a prompt beside streams.
    """
    levels: dict[int, list[Point]] = {}
    for step in steps:
        levels.setdefault(round(math.log2(step.sequences)), []).append(step)
    known = [of for of in levels.values() if len(of) >= PROBES]

    def too_short(factor: float) -> bool:
        terms: dict[str, Any] = {name: factor * value for name, value in model.terms.items() if name in PROMPTS}
        scaled = dataclasses.replace(model, **terms)
        missed = (statistics.median(math.log(step.seconds / scaled.seconds(*step.work)) for step in of) for of in known)
        return statistics.mean(missed) > 0

    if not known:
        return 1.0
    low, high = LEAST, MOST
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if too_short(middle) else (low, middle)
    return (low + high) / 2


def _refitted(
    model: StepModel, context: float, factor: Callable[[int], float], drafted: float | None
) -> dict[str, float]:
    """Return the terms of decoding with which steps of so many sequences take ``factor`` times what they did.

    context: tokens of each. drafted: the factor of steps with drafts; None: that of plain ones.
    """
    points = []
    for streams in (1, 2, 4, 8, 16, 32, 64):
        for each in (context / 2, 2 * context):
            seconds = factor(streams) * model.engine_s(streams, streams * each, 0)
            points.append(Point(streams, streams * each, 0, seconds))
            if model.draft_tokens and streams <= UNDRAFTED_FROM:
                seconds = (drafted or factor(streams)) * model.engine_s(streams, streams * each, 0, streams)
                points.append(Point(streams, streams * each, 0, seconds, streams))
    terms, _, _ = step_model.fit(points)
    return {name: value for name, value in terms.items() if name not in (*PROMPTS, "idle_s")}


def _within(factor: float) -> float:
    return min(MOST, max(LEAST, factor))


async def _served(
    model: StepModel, engine: EngineManifest, target: Target, prompts: PromptSource, serving_s: Callable[[], float]
) -> tuple[list[Record], float]:
    """Send requests as they come in service: to half of what the engine can do with a few sequences, then as many at
    once as make it busy. Return them, and the CPU seconds of a response of the first.

    Each time the texts are others: prompts of earlier loads are in the engine's prefix cache.

    serving_s: returns the CPU seconds of the replica beside its engine so far.
    """
    few, many = (min(streams, engine.max_batch_size) for streams in IN_SERVICE)
    each_s = ANSWER / model.decode_tokens_per_s(few, 2 * ANSWER) + model.prompt_s(ANSWER, engine.max_num_tokens)
    sizes = lengths.parse(f"lognormal:{ANSWER},0.5,{engine.max_seq_len // 2 - 1}", "input")
    open_load = Workload(None, Poisson(PART / each_s), sizes, sizes, seed=time.time_ns())
    duration_s = min(MOST_S, max(LEAST_S, OPEN_REQUESTS * each_s / PART))
    closed_loop = Workload(many, None, sizes, sizes, stagger_s=LEAST_S / 4, seed=time.time_ns())
    extent, before_s = Extent(duration_s, 0.5), serving_s()
    opened = (await drive(open_load, target, prompts, extent)).records
    response_cpu_s = (serving_s() - before_s) / max(1, sum(len(record.messages) for record in opened))
    return opened + (await drive(closed_loop, target, prompts, extent)).records, response_cpu_s


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


def run(server: ServerUnderTest, rounds: int, seconds: float, out: Path | None) -> int:
    """Calibrate the engine of a replica: print the points and the model, write step_model.json, and with ``out`` what
    each trial took to calibrate.json.

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
    key = {"manifest_sha256": digest, "machine": step_model.machine_kind()}
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
            return await _served(model, engine, target, Prompts.for_engine(folder), serving_s)
        finally:
            await target.close()

    model = settled(
        model,
        lambda: asyncio.run(served()),
        lambda rounds: speed.reference_s(server, folder, engine, rounds),
    )
    trials_s = speed.middle_s([outcome for outcome in outcomes if outcome.trial in reference(engine)])
    if step_model.drifted(ratio := model.reference_s / trials_s):
        print(f"  during the loads steps took {ratio:.2f} times what they took in the trials: calibrate again")
    path = model.save(out or folder)
    kept.unlink()
    print(f"  written: {path}")
    return 0
