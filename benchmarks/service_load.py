"""What an engine's steps take in service, where requests come one by one: a load, and what it changes of a step model.

The streams of a calibration's trials begin and end together; such streams are the fastest.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import lengths, report
from benchmarks.arrivals import Poisson
from benchmarks.driver import Extent, drive
from benchmarks.prompts import PromptSource
from benchmarks.record import Record
from benchmarks.step_trials import ANSWER, PROBES
from benchmarks.target import Target
from benchmarks.workload import Workload
from contract import step_model
from contract.manifest import EngineManifest
from contract.scheduling import UNDRAFTED_FROM
from contract.step_model import Point, StepModel

# An open load, of a part of what the engine can do with so many sequences, and a closed loop of so many. Each of a slow
# engine lasts longer: with a third of the requests, steps differed by up to a third between two loads.
IN_SERVICE, PART = (8, 32), 0.5
OPEN_REQUESTS, LEAST_S, MOST_S = 120, 12.0, 40.0
# Loads of steps in service, at most; they are sent until two in turn agree: how fast a shared machine is changes.
SERVICE_ROUNDS, AGREED = 4, 0.15
LEAST, MOST = 0.5, 2.0  # that they may change the designed steps by
GAPS = 20  # of as many streams, that tell how long their steps are
PROMPTS = "prefill_s", "prefill_token_s", "prefill_square_s"  # the terms of prompts


async def served(
    model: StepModel, engine: EngineManifest, target: Target, prompts: PromptSource, serving_s: Callable[[], float]
) -> tuple[list[Record], float]:
    """Send requests as they come in service: to half of what the engine can do with a few sequences, then as many at
    once as make it busy. Return them, and the CPU seconds of a response of the first.

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


class _Load:
    """The requests of a load that were answered. context_tokens: of each in the mean, over its answer."""

    def __init__(self, records: Sequence[Record]) -> None:
        answered = [(one, one.timings) for one in records if one.ok and one.messages and one.timings is not None]
        self.records = [record for record, _ in answered]
        # From when a step first had a request to its first token, by the clock of the replica's machine.
        self._steps_s = [(of.first_scheduled_ns / 1e9, of.first_token_ns / 1e9) for _, of in answered]
        means = [record.input_tokens + record.tokens / 2 for record in self.records]
        self.context_tokens = statistics.mean(means) if means else 0.0

    def decoding_at(self, at_s: float) -> int:
        """Return how many streams decoded then, by this machine's clock."""
        return sum(one.messages[0][0] <= at_s < one.ended_s for one in self.records)

    def gaps(self) -> Iterator[tuple[int, float, int]]:
        """Yield the streams, seconds and tokens of each gap between messages in which as many streams decoded and no
        request waited for its first token: the model counts by itself what that takes of the cores."""
        for record in self.records:
            for (from_s, _), (to_s, tokens) in zip(record.messages, record.messages[1:], strict=False):
                streams = self.decoding_at(from_s)
                due = any(one.sent_s < to_s and one.messages[0][0] > from_s for one in self.records)
                if streams == self.decoding_at(to_s) and not due:
                    yield streams, to_s - from_s, tokens

    def prompts(self) -> Iterator[tuple[int, float, Record]]:
        """Yield of each prompt that was read beside no other how many streams decoded, the seconds, and the request."""
        for (from_s, to_s), record in zip(self._steps_s, self.records, strict=True):
            if sum(other_s < to_s and first_s > from_s for other_s, first_s in self._steps_s) == 1:
                took_s = to_s - from_s
                yield self.decoding_at(record.messages[0][0] - took_s), took_s, record


def in_service(model: StepModel, records: Sequence[Record]) -> StepModel:
    """Return the model with the steps of an open load: those that decode by a factor of the designed ones of as many
    sequences, and its prompts by what they take more."""
    load = _Load(records)
    each, drafted_up_to = load.context_tokens, model.drafted_up_to
    plain, drafted_alone = _decoding_factors(model, load)

    def drafted_of(streams: int) -> int:
        return streams if streams <= drafted_up_to else 0

    terms: dict[str, Any] = {}
    if plain or drafted_alone:
        plain = plain or {0: drafted_alone or 1.0}
        terms = _refitted(model, each, plain, drafted_alone)
    found = dataclasses.replace(model, **terms)
    read = list(load.prompts())
    beside = [Point(n, n * each, record.input_tokens, took_s, drafted_of(n)) for n, took_s, record in read if n]
    prompts = _prompts_factor(found, beside)
    terms |= {name: value * prompts for name, value in model.terms.items() if name in PROMPTS}
    found = dataclasses.replace(model, **terms)
    later = [(n, took_s, found.seconds(n, n * each, of.input_tokens, drafted_of(n))) for n, took_s, of in read]
    # Percentiles, since a step beside something else that the machine does tells nothing.
    alone_s = [(record.ttft_from_send_s or 0.0) - took_s for n, took_s, record in read if not n]
    if len(alone_s) >= PROBES:
        terms["request_s"] = statistics.median(alone_s)
        terms["idle_s"] = max(0.0, statistics.median(took_s - whole_s for n, took_s, whole_s in later if not n))
    logs = [math.log(took_s / (whole_s + (not n) * terms.get("idle_s", model.idle_s))) for n, took_s, whole_s in later]
    if len(logs) >= PROBES:
        low, high = np.percentile(logs, [16, 84])
        terms["spread"] = float(high - low) / 2
    found = dataclasses.replace(model, **terms)
    told = ", ".join(f"{2**level} x {plain[level]:.2f}" for level in sorted(plain)) or "as designed"
    told += f", with drafts x {drafted_alone:.2f}" if drafted_alone else ""
    print(
        f"  in service, {len(load.records)} requests: streams {told}; prompts x {prompts:.2f}, "
        f"{report.ms(found.idle_s)} ms after a pause, spread {found.spread:.2f}"
    )
    return found


def _decoding_factors(model: StepModel, load: _Load) -> tuple[dict[int, float], float | None]:
    """Return how many times what the model says steps take: plain ones by the logarithm to base 2 of how many streams
    decode, and those with drafts of one stream, None where too few were seen.

    Of streams that the engine may draft for, only messages of several tokens to one alone are surely of a draft.
    """
    undrafted_from = UNDRAFTED_FROM if model.drafted_up_to else 0
    # Seconds, and what the model says.
    plain, drafted = dict[int, list[tuple[float, float]]](), list[tuple[float, float]]()
    for streams, seconds, tokens in load.gaps():
        own_s = seconds - model.sent_s(streams)
        if streams > undrafted_from:
            step_s = model.engine_s(streams, streams * load.context_tokens, 0)
            plain.setdefault(round(math.log2(streams)), []).append((own_s, tokens * step_s))
        elif streams == 1 and 1 < tokens <= 1 + model.draft_tokens:
            drafted.append((own_s, model.engine_s(1, load.context_tokens, 0, 1)))
    factors = {level: _ratio(gaps) for level, gaps in plain.items() if len(gaps) >= GAPS}
    return factors, _ratio(drafted) if len(drafted) >= GAPS else None


def settled(
    model: StepModel, served: Callable[[], tuple[list[Record], float]], reference_s: Callable[..., float]
) -> StepModel:
    """Return the model with the steps in service of two loads that agree, of the last two where none do.

    served: sends a load and returns its requests and the CPU seconds of a response.
    reference_s: measures the reference trials, in so many rounds if given, before each load and after the last.
    """
    rounds: list[tuple[StepModel, list[Record], float]] = []
    # More rounds at first: the server of a resumed calibration may not have met these lengths.
    references, differ = [reference_s()], math.inf
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
    return min(MOST, max(LEAST, sum(took_s for took_s, _ in kept) / sum(model_s for _, model_s in kept)))


def _prompts_factor(model: StepModel, steps: Sequence[Point]) -> float:
    """Return the factor of the model's prompt terms at which it agrees with the measured steps, from LEAST to MOST; 1
    where no number of streams has ``PROBES`` steps.

    It agrees when the median errors (logarithms), one for each number of streams in powers of two, have a mean of 0:
    a closed loop makes many more steps than few streams do and would decide alone. steps: with a prompt beside streams.
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


def _refitted(model: StepModel, context: float, plain: Mapping[int, float], drafted: float | None) -> dict[str, float]:
    """Return the terms of decoding with which steps of so many sequences take so many times what they did.

    context: tokens of each. plain: factors by the logarithm to base 2 of how many sequences; between them they are
        interpolated. drafted: the factor of steps with drafts; None: that of plain ones.
    """
    levels, points = sorted(plain), list[Point]()

    def factor(streams: int) -> float:
        return float(np.interp(math.log2(streams), levels, [plain[level] for level in levels]))

    for streams in (1, 2, 4, 8, 16, 32, 64):
        for each in (context / 2, 2 * context):
            seconds = factor(streams) * model.engine_s(streams, streams * each, 0)
            points.append(Point(streams, streams * each, 0, seconds))
            if model.draft_tokens and streams <= UNDRAFTED_FROM:
                seconds = (drafted or factor(streams)) * model.engine_s(streams, streams * each, 0, streams)
                points.append(Point(streams, streams * each, 0, seconds, streams))
    terms, _, _ = step_model.fit(points)
    return {name: value for name, value in terms.items() if name not in (*PROMPTS, "idle_s")}
