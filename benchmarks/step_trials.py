"""Trials that measure how long single steps of an engine take on a running replica, with clients and Triton around it.

Each trial is one design point. Decoding: so many streams at once, from the time when all have their first token until
the first ends. Prefill: prompts of one token's answer, one after the other, beside so many streams; the engine's own
timings say how long the step with the prompt took.
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
from pathlib import Path

import numpy as np

from benchmarks import progress, scrape
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import PromptSource
from benchmarks.record import Record
from benchmarks.target import Target
from benchmarks.workload import PlannedRequest
from contract import step_model
from contract.errors import EngineFailed
from contract.manifest import EngineManifest
from contract.scheduling import BLOCK_TOKENS, RESUME_TOKENS, RESUME_UP_TO, RETRY_AFTER, TIMED_TOGETHER, UNDRAFTED_FROM
from contract.step_model import Point

SHORT = 32  # tokens of a prompt that costs little beside what it is there for
WINDOW_S = 0.8  # of decoding in a trial
MOST_CONTEXT = 4096  # tokens of all prompts of a trial: more would take longer to read than to measure
PROBES = 3
PAUSE_S = 0.1
ANSWER = 64  # tokens
FIRST_TOKEN_S = 60.0
ENDING_S = 10.0  # in which requests that were sent before may end
TEXTS, TEXT = 48, 128  # requests whose acceptance is measured, and tokens of each
TEXTS_S = 80.0  # after which half of them suffice; the slowest texts, which make the p95 of latencies, are few


@dataclass(frozen=True)
class Trial:
    """sequences: that decode. prompt: tokens of each. prefill: tokens of the prompts read beside them; 0: none.
    drafted: whether they are drafted for."""

    sequences: int
    prompt: int
    prefill: int
    drafted: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one trial measured. request_s: a request's time outside the engine's steps, of prompts alone; else None.

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
    short, half = min(SHORT, engine.max_seq_len // 4), engine.max_seq_len // 2
    trials = [Trial(n, short, 0) for n in levels]
    for n in levels:
        longest = min(half, MOST_CONTEXT // n, cache // (2 * n))
        # Of few, those with a long text would be drafted for once the others beside which they began have ended.
        if longest >= 4 * SHORT and not (engine.draft_tokens and n <= RESUME_UP_TO):
            trials.append(Trial(n, longest, 0))
    most = min(engine.max_num_tokens, half)
    trials += [Trial(0, 0, most // part) for part in (1, 2, 4, 8, 16) if most // part >= 16]
    fewest = 4 + UNDRAFTED_FROM * bool(engine.draft_tokens)  # more than are drafted for, where any are
    for n in (fewest, 16, 32):
        # Short ones: the CPU engine reads those of more than 256 tokens in several steps beside streams.
        if n < engine.max_batch_size and n + 2 * SHORT <= most:
            trials += [Trial(n, SHORT, SHORT), Trial(n, SHORT, 2 * SHORT)]
    few = sorted({min(n, engine.max_batch_size) for n in TIMED_TOGETHER}) if engine.draft_tokens else []
    drafted = [Trial(n, min(ANSWER, half), 0, drafted=True) for n in few]
    # These first: the beginnings of answers, of which little is accepted, are all that is drafted for in the others.
    return drafted + trials


def reference(engine: EngineManifest) -> list[Trial]:
    """Return the few trials that tell how fast the machine is: plain decoding of the fewest, the middle and the most
    sequences, and a prompt alone of the middle length."""
    trials = [trial for trial in design(engine) if not trial.drafted]
    alone = [trial for trial in trials if not trial.sequences]
    decoding_ = {trial.sequences: trial for trial in reversed(trials) if trial.sequences and not trial.prefill}
    levels, middle = sorted(decoding_), len(alone) // 2
    chosen = sorted({levels[0], levels[len(levels) // 2], levels[-1]})
    return [decoding_[n] for n in chosen] + alone[middle : middle + 1]


def by_trial(outcomes: Sequence[Outcome]) -> dict[Trial, list[Outcome]]:
    found: dict[Trial, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.trial, []).append(outcome)
    return found


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
        """Measure every trial ``rounds`` times, or end at ``until_s`` (time.monotonic). Raises TridentError."""
        for round_, (number, trial) in itertools.product(range(rounds), enumerate(trials, 1)):
            if sum(outcome.trial == trial for outcome in self.outcomes) > round_:
                continue
            if time.monotonic() > until_s:
                return
            progress.show(f"round {round_ + 1} of {rounds}, trial {number} of {len(trials)}: {trial}")
            measure = self._prefill if trial.prefill else self._draft if trial.drafted else self._decode
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
        if self._engine.draft_tokens and trial.sequences <= UNDRAFTED_FROM:
            tokens = min(tokens, RESUME_TOKENS - 8)  # which of them is ahead varies by some
        points: list[tuple[Point, float]] = []
        while len(points) < max(1, min(PROBES, round(WINDOW_S / (tokens * step_s)))):
            await asyncio.sleep(PAUSE_S)
            # Beside so many no request is drafted for, and those that are left of them are not for so many tokens.
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

        After rejections the engine drafts for none until texts repeat themselves, or for ``scheduling.RETRY_AFTER``
        requests, and never for as many as its processor loses by; a request without drafts tells nothing of them.
        """
        alone, began_s = trial.sequences == 1, time.monotonic()
        measured, drafted = (list[tuple[Point, float, list[float]]]() for _ in range(2))
        count, tokens = TEXTS if alone else PROBES, min(TEXT if alone else ANSWER, self._engine.max_seq_len // 2)
        while len(drafted) < count and len(measured) < count + RETRY_AFTER // trial.sequences:
            if len(drafted) >= TEXTS // 2 and time.monotonic() - began_s > TEXTS_S:
                break
            before = self.drafted()
            sends = [self._send(trial.prompt, tokens, rng=self._texts) for _ in range(trial.sequences)]
            records = await asyncio.gather(*sends)
            await asyncio.sleep(2 * PAUSE_S)  # the metrics are told ten times a second
            steps, accepted = (now - then for now, then in zip(self.drafted(), before, strict=True))
            per_step = 1 + accepted / max(1, steps)
            point, sent = decoding(records)
            told = {"seconds": point.seconds * per_step, "drafted": trial.sequences * (steps > 0)}
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
        points, requests_s = list[tuple[Point, float]](), list[float]()
        try:
            await self._begun(streams, tasks)
            for _ in range(PROBES):
                if not n:  # an engine that has just worked is faster than one that meets a request
                    await asyncio.sleep(PAUSE_S)
                record = await self._send(trial.prefill, 1)
                context = sum(trial.prompt + stream.tokens for stream in streams)
                if record.timings is None:
                    raise EngineFailed("the server sent no timings; only engines of Trident's own models do")
                step_s = (record.timings.first_token_ns - record.timings.first_scheduled_ns) / 1e9
                end_s = record.messages[0][0]  # by this machine's clock: the replica's may be another
                sent = sum(end_s - step_s <= at_s < end_s for one in streams for at_s, _ in one.messages) / max(1, n)
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


def decoding(records: Sequence[Record], others: Sequence[Record] = ()) -> tuple[Point, float]:
    """Return the mean step of streams from the last one's first token to the first one's end, and how many times tokens
    were sent for each step. others: that have to end before it. Raises NotTogether.
    """
    end_s = min(record.messages[-1][0] for record in records)
    begin_s = max([*(record.messages[0][0] for record in records), *(other.ended_s for other in others)])
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


def acceptance_of(per_step: float, draft_tokens: int) -> float:
    """Return the acceptance with which a step makes so many tokens: the inverse of ``step_model.tokens_per_step``."""
    known = [nth / 1000 for nth in range(1001)]
    return float(np.interp(per_step, [step_model.tokens_per_step(part, draft_tokens) for part in known], known))


def stretches(messages: Sequence[tuple[float, int]], steps: float, draft_tokens: int) -> list[float]:
    """Return the acceptance of a text in each of ``step_model.STRETCHES`` that it reached.

    messages: of a stream alone, when and how many tokens; the first is of no draft, the last may be cut off at its end.
    steps: that drafted for it; where a message holds the tokens of several, each holds as many. A step that goes beyond
    a stretch counts in each by its tokens there.
    """
    counts, position = [[0, 0.0] for _ in step_model.STRETCHES], messages[0][1]
    bounds = list(itertools.pairwise((*step_model.STRETCHES, math.inf)))
    for _, tokens in messages[1:-1] or messages[1:]:
        for count, (begin, end) in zip(counts, bounds, strict=True):
            if (inside := min(end, position + tokens) - max(begin, position)) > 0:
                count[0], count[1] = count[0] + int(inside), count[1] + inside / tokens
        position += tokens
    each = steps / max(1, len(messages) - 1)
    reached = [tokens / sent for tokens, sent in counts if sent]
    return [round(acceptance_of(made / each, draft_tokens), 3) if each else 0.0 for made in reached] or [0.0]


def check_serves(server: ServerUnderTest, name: str, digest: str) -> None:
    """Raises EngineFailed if the replica says that it serves another engine, or is busy for ``ENDING_S``."""
    if server.metrics_url is None:
        return
    until_s = time.monotonic() + ENDING_S
    while True:
        metrics = scrape.fetch(server.metrics_url)
        served = [labels.get("manifest_sha256") for labels, _ in metrics.matching("trident_engine_info")]
        if served and digest not in served:
            raise EngineFailed(f"{server.url} serves another engine, or another build, than {name}")
        if not (busy := metrics.value("nv_trt_llm_request_metrics", request_type="active")):
            return
        if time.monotonic() > until_s:
            raise EngineFailed(
                f"{server.url} has {busy:g} requests; steps are measured on a replica without other clients"
            )
        time.sleep(0.25)
