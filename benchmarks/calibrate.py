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
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import beside, lengths, progress, report, scrape
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
from contract.step_model import Point, StepModel

POINTS = "step_model.points.jsonl"
SHORT = 32  # tokens of a prompt that costs little beside what it is there for
WINDOW_S = 0.8  # of decoding in a trial
MOST_CONTEXT = 4096  # tokens of all prompts of a trial: more would take longer to read than to measure
PROBES = 3
PAUSE_S = 0.1
ANSWER = 64  # tokens
IN_SERVICE_S, PART = 12.0, 0.4  # of an open load, and of what the engine can do
LEAST, MOST = 0.9, 1.4  # that it may change the designed steps by
FIRST_TOKEN_S = 60.0
PROMPTS = "prefill_s", "prefill_token_s", "prefill_square_s"  # the terms of prompts


@dataclass(frozen=True)
class Trial:
    """sequences: that decode. prompt: tokens of each. prefill: tokens of the prompts read beside them; 0: none."""

    sequences: int
    prompt: int
    prefill: int


@dataclass(frozen=True)
class Outcome:
    """What one trial measured. request_s: a request's time outside the engine's steps, of prompts alone; else None."""

    trial: Trial
    point: Point
    request_s: float | None = None


def design(engine: EngineManifest) -> list[Trial]:
    """Return the trials: decoding at doubling numbers of sequences with short and long contexts, prompts of several
    lengths alone and beside streams."""
    cache = engine.kv_cache_tokens or engine.max_batch_size * engine.max_seq_len
    levels = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if n < engine.max_batch_size] + [engine.max_batch_size]
    trials = [Trial(n, SHORT, 0) for n in levels]
    for n in levels:
        longest = min(engine.max_seq_len // 2, MOST_CONTEXT // n, cache // (2 * n))
        if longest >= 4 * SHORT:
            trials.append(Trial(n, longest, 0))
    most = min(engine.max_num_tokens, engine.max_seq_len // 2)
    trials += [Trial(0, 0, most // part) for part in (1, 2, 4, 8, 16) if most // part >= 16]
    for n in (4, 16, 32):
        # Short ones: the CPU engine reads those of more than 256 tokens in several steps beside streams.
        if n < engine.max_batch_size and n + 2 * SHORT <= most:
            trials += [Trial(n, SHORT, SHORT), Trial(n, SHORT, 2 * SHORT)]
    return trials


class Experiment:
    """Runs trials on one replica, unless they were measured before.

    key: manifest_sha256 and machine, of a StepModel. path: of the file that keeps the outcomes, a line for each; those
    of other keys are left out.
    """

    def __init__(
        self, engine: EngineManifest, key: dict[str, str], target: Target, prompts: PromptSource, path: Path
    ) -> None:
        self._engine, self._key, self._target, self._prompts, self._path = engine, key, target, prompts, path
        self._rng = random.Random(time.time_ns())  # no prompt may be in the prefix cache from an earlier run
        self._number = 0
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
                outcome = await (self._prefill(trial) if trial.prefill else self._decode(trial))
                self.outcomes.append(outcome)
                with self._path.open("a") as file:
                    file.write("\n" + json.dumps(self._key | asdict(outcome)))

    async def _decode(self, trial: Trial) -> Outcome:
        """Measure streams as long as answers usually are, from a pause: the first steps after one are the slowest."""
        step_s = self._guess_s(trial)
        first_steps = trial.sequences * trial.prompt // self._engine.max_num_tokens + 1
        room = self._engine.max_seq_len - trial.prompt - 8
        tokens = min(room, min(ANSWER, max(24, round(WINDOW_S / step_s))) + first_steps)
        points = []
        for _ in range(max(1, min(PROBES, round(WINDOW_S / (tokens * step_s))))):
            await asyncio.sleep(PAUSE_S)
            points.append(
                decoding(await asyncio.gather(*(self._send(trial.prompt, tokens) for _ in range(trial.sequences))))
            )
        return Outcome(trial, sorted(points, key=lambda point: point.seconds)[len(points) // 2])

    def _guess_s(self, trial: Trial) -> float:
        """Return the seconds of a step, by the nearest trial so far."""
        known = [outcome for outcome in self.outcomes if not outcome.trial.prefill]
        near = min(known, key=lambda one: abs(one.trial.sequences - trial.sequences), default=None)
        return near.point.seconds if near else 0.02

    async def _prefill(self, trial: Trial) -> Outcome:
        engine, n = self._engine, trial.sequences
        cache = engine.kv_cache_tokens or engine.max_batch_size * engine.max_seq_len
        longest = min(engine.max_seq_len, (cache - engine.max_seq_len) // n if n else engine.max_seq_len) - trial.prompt
        streams = [Record(index, time.monotonic()) for index in range(n)]
        tasks = [asyncio.create_task(self._send(trial.prompt, longest - 8, record)) for record in streams]
        points: list[Point] = []
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
                step_s = (record.timings.first_token_ns - record.timings.first_scheduled_ns) / 1e9
                points.append(Point(n, context, record.input_tokens, step_s))
                requests_s.append((record.ttft_from_send_s or 0.0) - step_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        middle = sorted(points, key=lambda point: point.seconds)[len(points) // 2]
        return Outcome(trial, middle, None if n else statistics.median(requests_s))

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

    async def _send(self, prompt: int, tokens: int, record: Record | None = None) -> Record:
        self._number += 1
        text = self._prompts.text(self._rng, prompt)
        record = record or Record(self._number, time.monotonic())
        record.sent_s = time.monotonic()
        await self._target.send(PlannedRequest(self._number, text, tokens), record)
        return record


def decoding(records: list[Record]) -> Point:
    """Return the mean step of streams from the last one's first token to the first one's end.

    Raises EngineFailed: they had no time together.
    """
    begin_s, end_s = max(r.messages[0][0] for r in records), min(r.messages[-1][0] for r in records)
    spans_s, tokens, context = 0.0, 0, 0.0
    for record in records:
        before = sum(count for at_s, count in record.messages if at_s < begin_s)
        inside = [(at_s, count) for at_s, count in record.messages if begin_s <= at_s <= end_s]
        generated = sum(count for _, count in inside[1:])
        if generated:
            spans_s, tokens = spans_s + inside[-1][0] - inside[0][0], tokens + generated
        context += record.input_tokens + before + generated / 2
    if not tokens:
        raise EngineFailed("the streams of a trial did not decode together; the replica may be busy with others")
    return Point(len(records), context, 0, spans_s / tokens)


def fitted(outcomes: list[Outcome], key: dict[str, str]) -> StepModel:
    """Return the model of the trials' medians, with its errors over all outcomes. Raises InvalidArgument."""
    by_trial: dict[Trial, list[Point]] = {}
    for outcome in outcomes:
        by_trial.setdefault(outcome.trial, []).append(outcome.point)
    middle = [sorted(points, key=lambda point: point.seconds)[(len(points) - 1) // 2] for points in by_trial.values()]
    terms, _, _ = step_model.fit(middle)
    requests_s = [outcome.request_s for outcome in outcomes if outcome.request_s is not None]
    told: dict[str, Any] = {
        **key,
        **terms,
        "source": step_model.MEASURED,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "request_s": max(0.0, statistics.median(requests_s)) if requests_s else 0.0,
        "points": len(outcomes),
    }
    model = StepModel(**told)
    errors = sorted(error_percent(model, outcome.point) for outcome in outcomes)
    p50, p95 = (errors[round(part * (len(errors) - 1))] for part in (0.5, 0.95))
    return StepModel(**told, error_p50_percent=p50, error_p95_percent=p95)


def compared(outcomes: Sequence[Outcome]) -> dict[str, dict[str, object]]:
    """Return what a step takes in each trial, by figure, for ``benchmarks.suite``."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        trial = outcome.trial
        label = f"a step, ms: {trial.sequences} sequences, prompts of {trial.prompt}, {trial.prefill} read beside them"
        found.setdefault(label, {"better": "lower", "values": []})["values"].append(1e3 * outcome.point.seconds)
    return found


def in_service(model: StepModel, records: Sequence[Record]) -> StepModel:
    """Return the model with the steps of an open load, in which requests come one by one, some after a pause.

    Its steps that decode, and its steps with prompts, take so many times what the designed ones do: two factors.
    """
    spans = [
        (record.timings.first_scheduled_ns / 1e9, record.timings.first_token_ns / 1e9, record)
        for record in records
        if record.ok and record.timings is not None
    ]
    each = statistics.mean(record.input_tokens + record.tokens / 2 for _, _, record in spans) if spans else 0.0
    measured, modelled, alone_s = [0.0, 0.0], [0.0, 0.0], []  # seconds of decoding, of prompts

    def decoding_at(at_s: float) -> int:
        return sum(first_s <= at_s < record.ended_s for _, first_s, record in spans)

    def reading(from_s: float, to_s: float) -> int:
        return sum(begin_s < to_s and first_s > from_s for begin_s, first_s, _ in spans)

    for begin_s, first_s, record in spans:
        for (from_s, _), (to_s, tokens) in zip(record.messages, record.messages[1:], strict=False):
            streams = decoding_at(from_s)
            if streams == decoding_at(to_s) and not reading(from_s, to_s):
                measured[0] += (to_s - from_s) / streams
                modelled[0] += tokens * model.seconds(streams, streams * each, 0) / streams
        if reading(begin_s, first_s) == 1:
            streams = decoding_at(begin_s)
            plain_s = model.seconds(streams, streams * each, 0)
            measured[1] += first_s - begin_s - plain_s
            modelled[1] += model.seconds(streams, streams * each, record.input_tokens) - plain_s
            if not streams:
                alone_s.append((record.ttft_from_send_s or 0.0) - (first_s - begin_s))
    factors = [
        min(MOST, max(LEAST, one / other)) if other else 1.0 for one, other in zip(measured, modelled, strict=True)
    ]
    terms: dict[str, Any] = {name: value * factors[name in PROMPTS] for name, value in model.terms.items()}
    terms["request_s"] = statistics.median(alone_s) if len(alone_s) >= PROBES else model.request_s
    print(f"  in service, {len(spans)} requests: streams x {factors[0]:.2f}, prompts x {factors[1]:.2f}")
    return dataclasses.replace(model, **terms)


async def _open_load(model: StepModel, engine: EngineManifest, target: Target, prompts: PromptSource) -> list[Record]:
    """Send requests as they come in service."""
    busy = min(8, engine.max_batch_size)
    each_s = ANSWER / model.decode_tokens_per_s(busy, 2 * ANSWER) + model.prompt_s(ANSWER, engine.max_num_tokens)
    sizes = lengths.parse(f"lognormal:{ANSWER},0.5,{engine.max_seq_len // 2 - 1}", "input")
    load = Workload(None, Poisson(PART / each_s), sizes, sizes, seed=1)
    return (await drive(load, target, prompts, Extent(IN_SERVICE_S, 0.5))).records


def error_percent(model: StepModel, point: Point) -> float:
    return 100 * abs(model.seconds(point.sequences, point.context_tokens, point.prefill_tokens) / point.seconds - 1)


def described(model: StepModel, outcomes: list[Outcome]) -> str:
    """Return the points beside the model, and the model, for people."""
    rows = []
    for point in sorted((outcome.point for outcome in outcomes), key=lambda p: (p.prefill_tokens > 0, p.sequences)):
        found = model.seconds(point.sequences, point.context_tokens, point.prefill_tokens)
        cells = round(point.sequences), round(point.context_tokens), round(point.prefill_tokens)
        rows.append((*cells, report.ms(point.seconds), report.ms(found), f"{100 * (found / point.seconds - 1):+.0f} %"))
    terms = ", ".join(f"{name} {getattr(model, name):.3g}" for name in step_model.TERMS)
    return (
        report.table(rows, ("sequences", "context", "prefill", "ms", "model", "error"))
        + f"\n  {model.points} steps on {model.machine}: error p50 {model.error_p50_percent:.1f} %, "
        + f"p95 {model.error_p95_percent:.1f} %; "
        + f"{report.ms(model.request_s)} ms a request outside the steps\n  {terms}\n  "
        + ", ".join(f"{name} {getattr(model, name):.3g}" for name in step_model.BESIDE)
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
    digest = manifests.sha256_file(folder / manifests.FILE_NAME)
    _check_serves(server, engine.name, digest)
    key = {"manifest_sha256": digest, "machine": step_model.machine_kind()}
    kept, trials = (out or folder) / POINTS, design(engine)

    async def measured() -> list[Outcome]:
        target = EnsembleTarget(server.url)
        try:
            experiment = Experiment(engine, key, target, Prompts.for_engine(folder), kept)
            await experiment.run(trials, rounds, time.monotonic() + seconds)
            return experiment.outcomes
        finally:
            await target.close()

    outcomes = asyncio.run(measured())
    if out is not None:
        report.write_json({"compared": compared(outcomes)}, out, "calibrate")
    if left := len(set(trials) - {outcome.trial for outcome in outcomes}):
        print(f"{seconds:g} s are over, {left} of {len(trials)} trials are left: the same command goes on with them")
        return 3
    others: dict[str, Any] = beside.measured(server, Prompts.for_engine(folder))
    model = dataclasses.replace(fitted(outcomes, key), **others)
    print(described(model, outcomes))

    async def served() -> list[Record]:
        target = EnsembleTarget(server.url)
        try:
            return await _open_load(model, engine, target, Prompts.for_engine(folder))
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
