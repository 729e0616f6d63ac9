"""Measure how long an engine's steps take on a running replica, and write the model of it beside the manifest.

Each trial is one design point. Decoding: so many streams at once, from the time when all have their first token until
the first ends. Prefill: prompts of one token's answer, one after the other, beside so many streams; the engine's own
timings say how long the step with the prompt took. Clients, Triton and tokenizers run meanwhile as they do in service,
so what they take from the engine on this machine is in the figures. What was measured is kept until the model is
written: a run that was interrupted goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import beside, figures, lengths, progress, report, scrape
from benchmarks.arrivals import Poisson
from benchmarks.driver import Extent, drive
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts, PromptSource
from benchmarks.record import Record
from benchmarks.target import EnsembleTarget, Target
from benchmarks.workload import PlannedRequest, Workload
from contract import manifest as manifests
from contract import step_model
from contract.errors import EngineFailed, InvalidArgument
from contract.manifest import EngineManifest
from contract.scheduling import BLOCK_TOKENS, RESUME_UP_TO, RETRY_AFTER, UNDRAFTED_FROM, drafts_beside
from contract.step_model import Point, StepModel

POINTS = "step_model.points.jsonl"
SHORT = 32  # tokens of a prompt that costs little beside what it is there for
WINDOW_S = 0.8  # of decoding in a trial
MOST_CONTEXT = 4096  # tokens of all prompts of a trial: more would take longer to read than to measure
PROBES = 3
PAUSE_S = 0.1
ANSWER = 64  # tokens
LEAST_SEQ_LEN = 64
# An open load, of a part of what the engine can do with so many sequences, and a closed loop of so many; seconds.
IN_SERVICE, PART, IN_SERVICE_S = (8, 32), 0.5, 12.0
LEAST, MOST = 0.5, 2.0  # that they may change the designed steps by
DRAFTED_ALONE = -1  # beside the logarithms of how many streams decode
GAPS = 20  # of as many streams, that tell how long their steps are
FIRST_TOKEN_S = 60.0
TEXTS, TEXT = 48, 128  # requests whose acceptance is measured, and tokens of each
TEXTS_S = 40.0  # after which half of them suffice
DRAFTED = "trident_speculative"  # counters of the engine
PROMPTS = "prefill_s", "prefill_token_s", "prefill_square_s"  # the terms of prompts


@dataclass(frozen=True)
class Trial:
    """sequences: that decode. prompt: tokens of each. prefill: tokens of the prompts read beside them; 0: none.
    draft_tokens: of a step of all sequences; 0: they are decoded plainly."""

    sequences: int
    prompt: int
    prefill: int
    draft_tokens: int = 0


@dataclass(frozen=True)
class Outcome:
    """What one trial measured.

    request_s: a request's time outside the engine's steps, of prompts alone; else None.
    sent: times that tokens were sent, for each step.
    stretches: of requests that were drafted for alone, the acceptance of each (``StepModel.acceptance``).
    """

    trial: Trial
    point: Point
    request_s: float | None = None
    sent: float = 0.0
    stretches: list[list[float]] = field(default_factory=list)


def design(engine: EngineManifest) -> list[Trial]:
    """Return the trials: decoding at doubling numbers of sequences with short and long contexts, prompts of several
    lengths alone and beside streams, and few sequences with drafts where the engine drafts."""
    cache = engine.kv_cache_blocks * BLOCK_TOKENS
    levels = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if n < engine.max_batch_size] + [engine.max_batch_size]
    if engine.draft_tokens:  # fewer are drafted for again
        levels = [n for n in levels if n > RESUME_UP_TO] or levels
    short, half = min(SHORT, engine.max_seq_len // 4), engine.max_seq_len // 2
    trials = [Trial(n, short, 0) for n in levels]
    for n in levels:
        longest = min(half, MOST_CONTEXT // n, cache // (2 * n))
        if longest >= 4 * SHORT:
            trials.append(Trial(n, longest, 0))
    most = min(engine.max_num_tokens, half)
    trials += [Trial(0, 0, most // part) for part in (1, 2, 4, 8, 16) if most // part >= 16]
    for n in (2 * UNDRAFTED_FROM if engine.draft_tokens else UNDRAFTED_FROM, 16, 32):
        # Short ones: the CPU engine reads those of more than 256 tokens in several steps beside streams.
        if n < engine.max_batch_size and n + 2 * SHORT <= most:
            trials += [Trial(n, SHORT, SHORT), Trial(n, SHORT, 2 * SHORT)]
    drafted: list[Trial] = []
    if most := engine.draft_tokens:  # the first sequence has the most, and those beside it a few (drafting.py)
        few = [n for n in (1, 2, UNDRAFTED_FROM) if n <= engine.max_batch_size]
        drafted = [Trial(n, min(ANSWER, half), 0, step_draft_tokens(most, n)) for n in few]
    # These first: the beginnings of answers, of which little is accepted, are all that is drafted for in the others.
    return drafted + trials


def step_draft_tokens(most: int, sequences: int) -> int:
    """Return the draft tokens of a step of so many sequences. most: of one alone."""
    return sum(drafts_beside(most, others) for others in range(sequences))


class NotTogether(EngineFailed):
    """The streams of a trial had no step in common."""


class Experiment:
    """Runs trials on one replica, unless they were measured before.

    key: manifest_sha256 and machine, of a StepModel. path: of the file that keeps the outcomes, a line for each; those
    of other keys are left out. drafted: returns the steps of sequences with drafts so far, and the accepted ones.
    """

    def __init__(
        self, engine: EngineManifest, key: dict[str, str], target: Target, prompts: PromptSource, path: Path
    ) -> None:
        self._engine, self._key, self._target, self._prompts, self._path = engine, key, target, prompts, path
        self.drafted: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        self._rng = random.Random(time.time_ns())  # no prompt may be in the prefix cache from an earlier run
        self._texts = random.Random(1)  # the same in every run: what engines accept differs much between few texts
        self._number = 0
        self.left_out: set[Trial] = set()  # whose streams have to be longer than the engine allows
        self.outcomes = self._read()

    def _read(self) -> list[Outcome]:
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        found: list[Outcome] = []
        for line in lines:
            try:
                table = json.loads(line)
                if {name: table.pop(name) for name in self._key} == self._key:
                    trial, point = Trial(**table.pop("trial")), Point(**table.pop("point"))
                    found.append(Outcome(trial, point, **table))
            except (ValueError, KeyError, TypeError):
                continue  # a blank line, or the last one of a run that was killed
        return found

    async def run(self, trials: Sequence[Trial], rounds: int, until_s: float) -> None:
        """Measure every trial ``rounds`` times, or end at ``until_s`` (time.monotonic).

        Raises TridentError: the replica failed.
        """
        for round_ in range(rounds):
            for number, trial in enumerate(trials, 1):
                if sum(outcome.trial == trial for outcome in self.outcomes) > round_:
                    continue
                if time.monotonic() > until_s:
                    return
                progress.show(f"round {round_ + 1} of {rounds}, trial {number} of {len(trials)}: {trial}")
                measure = self._prefill if trial.prefill else self._draft if trial.draft_tokens else self._decode
                try:
                    outcome = await measure(trial)
                except NotTogether as error:
                    if self._engine.max_seq_len - trial.prompt >= 2 * ANSWER:
                        raise
                    print(f"  left out, as max_seq_len is {self._engine.max_seq_len}: {trial}: {error}")
                    self.left_out.add(trial)
                    continue
                self.outcomes.append(outcome)
                with self._path.open("a") as file:
                    file.write("\n" + json.dumps(self._key | asdict(outcome)))

    async def _decode(self, trial: Trial) -> Outcome:
        """Measure streams as long as answers usually are, from a pause: the first steps after one are the slowest."""
        step_s = self._guess_s(trial)
        first_steps = trial.sequences * trial.prompt // self._engine.max_num_tokens + 1
        room = self._engine.max_seq_len - trial.prompt - 8
        tokens = min(room, min(ANSWER, max(24, round(WINDOW_S / step_s))) + first_steps)
        points: list[tuple[Point, float]] = []
        while len(points) < max(1, min(PROBES, round(WINDOW_S / (tokens * step_s)))):
            await asyncio.sleep(PAUSE_S)
            # Beside so many no request is drafted for, and those that are left of them are not either.
            others = max(0, UNDRAFTED_FROM + 1 - trial.sequences) if self._engine.draft_tokens else 0
            longer = min(room, tokens + SHORT * (others > 0))
            sends = [self._send(trial.prompt, longer) for _ in range(trial.sequences)]
            sends += [self._send(SHORT, SHORT) for _ in range(others)]
            records = await asyncio.gather(*sends)
            try:
                points.append(decoding(records[: trial.sequences], records[trial.sequences :]))
            except NotTogether:  # the first one ended while prompts were still read
                if tokens == room:
                    raise
                tokens = min(room, 2 * tokens)
        point, sent = sorted(points, key=lambda one: one[0].seconds)[len(points) // 2]
        return Outcome(trial, point, sent=sent)

    async def _draft(self, trial: Trial) -> Outcome:
        """Measure steps that draft for the few requests that there are, and, of one, what is accepted.

        Where it rejected the drafts of earlier trials, the engine drafts for no more than one request in
        ``scheduling.RETRY_AFTER`` until it accepts some; a request without drafts tells nothing of them.
        """
        alone, began_s = trial.sequences == 1, time.monotonic()
        measured: list[tuple[Point, float, list[float]]] = []
        drafted: list[tuple[Point, float, list[float]]] = []
        count, tokens = TEXTS if alone else PROBES, min(TEXT if alone else ANSWER, self._engine.max_seq_len // 2)
        while len(drafted) < count and len(measured) < count + RETRY_AFTER:
            if len(drafted) >= TEXTS // 2 and time.monotonic() - began_s > TEXTS_S:
                break
            before = self.drafted()
            records = await asyncio.gather(
                *(self._send(trial.prompt, tokens, rng=self._texts) for _ in range(trial.sequences))
            )
            await asyncio.sleep(2 * PAUSE_S)  # the metrics are told ten times a second
            steps, accepted = (now - then for now, then in zip(self.drafted(), before, strict=True))
            per_step = 1 + accepted / max(1, steps)
            point, sent = decoding(records)
            told = {"seconds": point.seconds * per_step, "draft_tokens": trial.draft_tokens * (steps > 0)}
            text = stretches(records[0].messages, steps, self._engine.draft_tokens)
            measured.append((dataclasses.replace(point, **told), sent * per_step, text))
            drafted += measured[-1:] if steps > 0 else []
        known = drafted or measured
        point, sent, _ = sorted(known, key=lambda one: one[0].seconds)[len(known) // 2]
        return Outcome(trial, point, sent=sent, stretches=[text for *_, text in known] if alone else [])

    def _guess_s(self, trial: Trial) -> float:
        """Return the seconds of a step, by the nearest trial so far."""
        known = [outcome for outcome in self.outcomes if not outcome.trial.prefill]
        near = min(known, key=lambda one: abs(one.trial.sequences - trial.sequences), default=None)
        return near.point.seconds if near else 0.02

    async def _prefill(self, trial: Trial) -> Outcome:
        engine, n = self._engine, trial.sequences
        cache = engine.kv_cache_blocks * BLOCK_TOKENS
        longest = min(engine.max_seq_len, (cache - engine.max_seq_len) // n if n else engine.max_seq_len) - trial.prompt
        streams = [Record(index, time.monotonic()) for index in range(n)]
        tasks = [asyncio.create_task(self._send(trial.prompt, longest - 8, record)) for record in streams]
        points: list[tuple[Point, float]] = []
        requests_s: list[float] = []
        try:
            await self._begun(streams, tasks)
            for _ in range(PROBES):
                if not n:  # an engine that has just worked is faster than one that meets a request
                    await asyncio.sleep(PAUSE_S)
                record = await self._send(trial.prefill, 1)
                context = sum(trial.prompt + stream.tokens for stream in streams)
                if record.timings is None:
                    raise EngineFailed("the server sent no timings; only engines of Trident's own models do")
                begin_s, end_s = record.timings.first_scheduled_ns / 1e9, record.timings.first_token_ns / 1e9
                step_s = end_s - begin_s
                sent = sum(begin_s <= at_s < end_s for stream in streams for at_s, _ in stream.messages) / max(1, n)
                points.append((Point(n, context, record.input_tokens, step_s), sent))
                requests_s.append((record.ttft_from_send_s or 0.0) - step_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        point, sent = sorted(points, key=lambda one: one[0].seconds)[len(points) // 2]
        return Outcome(trial, point, None if n else statistics.median(requests_s), sent)

    async def _begun(self, streams: list[Record], tasks: list[asyncio.Task[Record]]) -> None:
        """Wait until all streams have a token. Raises EngineFailed."""
        until_s = time.monotonic() + FIRST_TOKEN_S
        while not all(stream.messages for stream in streams):  # noqa: ASYNC110 - the records have no event
            if time.monotonic() > until_s:
                raise EngineFailed(f"{len(streams)} streams had no token within {FIRST_TOKEN_S:g} s")
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    async def _send(
        self, prompt: int, tokens: int, record: Record | None = None, rng: random.Random | None = None
    ) -> Record:
        self._number += 1
        text = self._prompts.text(rng or self._rng, prompt)
        record = record or Record(self._number, time.monotonic())
        record.sent_s = time.monotonic()
        await self._target.send(PlannedRequest(self._number, text, tokens), record)
        return record


def decoding(records: list[Record], others: list[Record] | None = None) -> tuple[Point, float]:
    """Return the mean step of streams from the last one's first token to the first one's end, and how many times tokens
    were sent for each step. others: that have to end before it.

    Raises NotTogether.
    """
    begin_s, end_s = max(r.messages[0][0] for r in records), min(r.messages[-1][0] for r in records)
    begin_s = max([begin_s, *(other.ended_s for other in others or ())])
    spans_s, tokens, messages, context = 0.0, 0, 0, 0.0
    for record in records:
        before = sum(count for at_s, count in record.messages if at_s < begin_s)
        inside = [(at_s, count) for at_s, count in record.messages if begin_s <= at_s <= end_s]
        generated = sum(count for _, count in inside[1:])
        if generated:
            spans_s, tokens = spans_s + inside[-1][0] - inside[0][0], tokens + generated
            messages += len(inside) - 1
        context += record.input_tokens + before + generated / 2
    if not tokens:
        raise NotTogether("the streams of a trial did not decode together; the replica may be busy with others")
    return Point(len(records), context, 0, spans_s / tokens), messages / tokens


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
    errors = sorted(error_percent(model, outcome.point) for outcome in outcomes)
    p50, p95 = (errors[round(part * (len(errors) - 1))] for part in (0.5, 0.95))
    return StepModel(**told, error_p50_percent=p50, error_p95_percent=p95)


def acceptance_of(per_step: float, draft_tokens: int) -> float:
    """Return the acceptance with which a step makes so many tokens: the inverse of ``step_model.tokens_per_step``."""
    known = [nth / 1000 for nth in range(1001)]
    return float(np.interp(per_step, [step_model.tokens_per_step(part, draft_tokens) for part in known], known))


def stretches(messages: Sequence[tuple[float, int]], steps: float, draft_tokens: int) -> list[float]:
    """Return the acceptance of a text in each of ``step_model.STRETCHES`` that it reached.

    messages: of a stream alone, when and how many tokens; the first is of no draft, the last may be cut off at its end.
    steps: that drafted for it; where a message holds the tokens of several, each holds as many. A step that goes beyond
    a stretch counts in each by its tokens there, so that the stretches together have all steps.
    """
    counts, position = [[0, 0.0] for _ in step_model.STRETCHES], messages[0][1]
    bounds = list(itertools.pairwise((*step_model.STRETCHES, math.inf)))
    for _, tokens in messages[1:-1] or messages[1:]:
        for count, (begin, end) in zip(counts, bounds, strict=True):
            if (inside := min(end, position + tokens) - max(begin, position)) > 0:
                count[0], count[1] = count[0] + int(inside), count[1] + inside / tokens
        position += tokens
    each = steps / max(1, len(messages) - 1)
    found = [
        round(acceptance_of(tokens / sent / each, draft_tokens), 3) if each else 0.0 for tokens, sent in counts if sent
    ]
    return found or [0.0]


def compared(outcomes: Sequence[Outcome]) -> dict[str, dict[str, object]]:
    """Return what a step takes in each trial, by figure, for ``benchmarks.suite``."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        trial = outcome.trial
        label = f"a step, ms: {trial.sequences} sequences, prompts of {trial.prompt}, {trial.prefill} read beside them"
        label += f", {trial.draft_tokens} drafted" * bool(trial.draft_tokens)
        found.setdefault(label, []).append(1e3 * outcome.point.seconds)
    return figures.compared(figures.LOWER, found)


def in_service(model: StepModel, records: Sequence[Record]) -> StepModel:
    """Return the model with the steps of an open load, in which requests come one by one, some after a pause.

    Its steps that decode take so many times what the designed ones of as many sequences do, and its prompts what they
    take more: streams that begin and end together are the fastest. Where the engine drafts, of few streams only
    messages of several tokens to one alone tell how long a step took: others may be of a plain step.
    """
    spans = [
        (record.timings.first_scheduled_ns / 1e9, record.timings.first_token_ns / 1e9, record)
        for record in records
        if record.ok and record.timings is not None
    ]
    each = statistics.mean(record.input_tokens + record.tokens / 2 for _, _, record in spans) if spans else 0.0
    drafts_up_to = UNDRAFTED_FROM if model.acceptance else 0
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

    def drafts_of(streams: int) -> int:
        return step_draft_tokens(model.draft_tokens, streams) if streams <= drafts_up_to else 0

    for begin_s, first_s, record in spans:
        for (from_s, _), (to_s, tokens) in zip(record.messages, record.messages[1:], strict=False):
            streams = decoding_at(from_s)
            drafted = streams <= drafts_up_to
            if drafted and (streams > 1 or not 1 < tokens <= 1 + model.draft_tokens):
                continue
            if streams == decoding_at(to_s) and not waits_for_first_token(from_s, to_s):
                own_s = (1 if drafted else tokens) * model.engine_s(streams, streams * each, 0, drafts_of(streams))
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
        found, [Point(n, n * each, tokens, took_s, drafts_of(n)) for n, took_s, tokens in steps if n]
    )
    terms |= {name: value * prompts for name, value in model.terms.items() if name in PROMPTS}
    found = dataclasses.replace(model, **terms)
    later = [(n, took_s, found.seconds(n, n * each, tokens, drafts_of(n))) for n, took_s, tokens in steps]
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
            drafts = step_draft_tokens(model.draft_tokens, streams)
            if drafts and streams <= UNDRAFTED_FROM:
                seconds = (drafted or factor(streams)) * model.engine_s(streams, streams * each, 0, drafts)
                points.append(Point(streams, streams * each, 0, seconds, drafts))
    terms, _, _ = step_model.fit(points)
    return {name: value for name, value in terms.items() if name not in (*PROMPTS, "idle_s")}


def _within(factor: float) -> float:
    return min(MOST, max(LEAST, factor))


async def _served(model: StepModel, engine: EngineManifest, target: Target, prompts: PromptSource) -> list[Record]:
    """Send requests as they come in service: to half of what the engine can do with a few sequences, then as many at
    once as make it busy."""
    few, many = (min(streams, engine.max_batch_size) for streams in IN_SERVICE)
    each_s = ANSWER / model.decode_tokens_per_s(few, 2 * ANSWER) + model.prompt_s(ANSWER, engine.max_num_tokens)
    sizes = lengths.parse(f"lognormal:{ANSWER},0.5,{engine.max_seq_len // 2 - 1}", "input")
    open_load = Workload(None, Poisson(PART / each_s), sizes, sizes, seed=1)
    closed_loop = Workload(many, None, sizes, sizes, stagger_s=IN_SERVICE_S / 4, seed=2)
    loads = [await drive(load, target, prompts, Extent(IN_SERVICE_S, 0.5)) for load in (open_load, closed_loop)]
    return [record for load in loads for record in load.records]


def error_percent(model: StepModel, point: Point) -> float:
    return 100 * abs(_seconds(model, point) / point.seconds - 1)


def _seconds(model: StepModel, point: Point) -> float:
    """Return the seconds of a trial's step; prompts alone are sent after a pause."""
    return model.seconds(*point.work) + (0.0 if point.sequences else model.idle_s)


def described(model: StepModel, outcomes: list[Outcome]) -> str:
    """Return the points beside the model, and the model, for people."""
    rows = []
    for point in sorted((outcome.point for outcome in outcomes), key=lambda p: (p.prefill_tokens > 0, p.sequences)):
        found, cells = _seconds(model, point), tuple(map(round, point.work))
        rows.append((*cells, report.ms(point.seconds), report.ms(found), f"{100 * (found / point.seconds - 1):+.0f} %"))
    terms = ", ".join(f"{name} {getattr(model, name):.3g}" for name in step_model.TERMS)
    return (
        report.table(rows, ("sequences", "context", "prefill", "drafts", "ms", "model", "error"))
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
    _check_serves(server, engine.name, digest)
    if engine.draft_tokens and server.metrics_url is None:
        raise InvalidArgument("metrics_url", "must be given: the engine drafts, and its metrics tell what it accepts")
    key = {"manifest_sha256": digest, "machine": step_model.machine_kind()}
    kept, trials = (out or folder) / POINTS, design(engine)

    def drafted() -> tuple[float, float]:
        metrics = scrape.fetch(server.metrics_url or "")
        return metrics.value(f"{DRAFTED}_steps_total"), metrics.value(f"{DRAFTED}_accepted_tokens_total")

    async def measured() -> Experiment:
        target = EnsembleTarget(server.url)
        try:
            experiment = Experiment(engine, key, target, Prompts.for_engine(folder), kept)
            experiment.drafted = drafted
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
    costs = beside.measured(server, Prompts.for_engine(folder), engine.max_seq_len)
    model = fitted(outcomes, key | costs | {"draft_tokens": engine.draft_tokens})
    print(described(model, outcomes))

    async def served() -> list[Record]:
        target = EnsembleTarget(server.url)
        try:
            return await _served(model, engine, target, Prompts.for_engine(folder))
        finally:
            await target.close()

    model = in_service(model, asyncio.run(served()))
    path = model.save(out or folder)
    kept.unlink()
    print(f"  written: {path}")
    return 0


def _check_serves(server: ServerUnderTest, name: str, digest: str) -> None:
    """Raises EngineFailed if the replica says that it serves another engine, or is busy."""
    if server.metrics_url is None:
        return
    metrics = scrape.fetch(server.metrics_url)
    served = [labels.get("manifest_sha256") for labels, _ in metrics.matching("trident_engine_info")]
    if served and digest not in served:
        raise EngineFailed(f"{server.url} serves another engine, or another build, than {name}")
    if busy := metrics.value("nv_trt_llm_request_metrics", request_type="active"):
        raise EngineFailed(f"{server.url} has {busy:g} requests; calibrate a replica without other clients")
