"""The release gate: whether a candidate is as good as its baseline, from the results of both on the same cases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from contract.errors import InvalidArgument
from contract.gate_result import FAIL, PASS, UNDECIDED
from contract.paired_scores import Paired, compare, holm
from evals import results
from evals.results import Case, Results

_Loss = Annotated[float, Field(ge=0, lt=1)]
_Ratio = Annotated[float, Field(gt=1, le=100)]
_RATIO_REACH = math.log(2)  # a case that takes twice as much, and one that takes half, join those of a ratio


class Rules(BaseModel):
    """What the candidate may lose; None: not judged.

    alpha: probability of a wrong fail, and of a wrong pass. power: with which the cases needed decide.
    quality: of the mean score over all cases. task: of one task's, which fails the candidate where more is shown.
    tasks: of these tasks, which must be shown to be kept. refusals, failures: more of them. judge: of the judge's
        verdicts, where there are any. length, latency, cost: times as much, in the geometric mean of the cases.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    alpha: Annotated[float, Field(gt=0, le=0.2)] = 0.05
    power: Annotated[float, Field(ge=0.5, lt=1)] = 0.8
    quality: _Loss | None = 0.05
    task: _Loss | None = 0.15
    tasks: Mapping[str, _Loss] = {}
    refusals: _Loss | None = 0.05
    failures: _Loss | None = 0.05
    judge: _Loss | None = 0.1
    length: _Ratio | None = 1.5
    latency: _Ratio | None = 2.0
    cost: _Ratio | None = 1.5


@dataclass(frozen=True)
class Metric:
    """The differences of the pairs in one metric (positive: the candidate is better), and the loss allowed.

    required: must be shown to be kept. reach: of one case, as ``paired_scores.compare`` has it.
    """

    name: str
    differences: np.ndarray
    margin: float
    required: bool = True
    reach: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """needed: further cases for a decision; None where it is decided, or no number of cases would do."""

    verdict: str
    reasons: tuple[str, ...]
    needed: int | None
    metrics: Mapping[str, Mapping[str, Any]]


def gate(baseline: Results, candidate: Results, rules: Rules, judged: Sequence[float] | None = None) -> Verdict:
    """Return the verdict on the candidate. judged: 1, 0, -1 for each case that a judge found better, equal or worse.

    Raises InvalidArgument where the two did not run the same tasks, or a task of the rules was not run.
    """
    pairs = results.pairs(baseline, candidate)
    for name in rules.tasks:
        if not pairs.get(name):
            raise InvalidArgument(f"tasks.{name}", f"must be among {', '.join(pairs)}, with cases on both sides")
    metrics = list(_metrics(pairs, rules))
    if judged is not None and rules.judge is not None:
        metrics.append(Metric("judge", np.array(judged, np.float64), rules.judge))
    return decide(metrics, rules.alpha, rules.power)


def decide(metrics: Sequence[Metric], alpha: float, power: float) -> Verdict:
    """Return the verdict on some metrics.

    It fails if one of them is shown to have lost more than its margin, by Holm's test over all of them, so that a good
    candidate fails with probability alpha at most. It passes if every required one is shown, each with alpha, to have
    lost less; a bad one passes with probability alpha at most, because all of them have to agree.
    """
    found = {one.name: compare(one.differences, one.margin, one.reach, alpha=alpha, power=power) for one in metrics}
    lost = holm({one.name: _probability(one, found[one.name]) for one in metrics}, alpha)
    states = {one.name: FAIL if one.name in lost else PASS if found[one.name].kept else UNDECIDED for one in metrics}
    open_ones = [one.name for one in metrics if one.required and states[one.name] == UNDECIDED]
    verdict = FAIL if lost else UNDECIDED if open_ones or not metrics else PASS
    needs = [found[name].needed for name in open_ones] if verdict == UNDECIDED else []
    known = [need for need in needs if need is not None]
    rows = {
        one.name: {
            **asdict(found[one.name]),
            "margin": one.margin,
            "required": one.required,
            "verdict": states[one.name],
        }
        for one in metrics
    }
    reasons = [_reason(one, found[one.name], states[one.name]) for one in metrics if one.name in (lost or open_ones)]
    return Verdict(verdict, tuple(reasons), max(known) if known and len(known) == len(needs) else None, rows)


def _metrics(pairs: Mapping[str, Sequence[tuple[Case, Case]]], rules: Rules) -> Iterator[Metric]:
    every = [pair for cases in pairs.values() for pair in cases]
    if rules.quality is not None:
        yield Metric("quality", _differences(every, "score"), rules.quality)
    for name, cases in pairs.items():
        margin = rules.tasks.get(name, rules.task)
        if cases and margin is not None:
            yield Metric(f"task {name}", _differences(cases, "score"), margin, name in rules.tasks)
    if rules.refusals is not None and (refused := -_differences(every, "refused")).size:
        yield Metric("refusals", refused, rules.refusals)
    if rules.failures is not None:
        yield Metric("failures", np.array([bool(a.error) - float(bool(b.error)) for a, b in every]), rules.failures)
    for name, field, least in (("length", "tokens", 1), ("latency", "latency_s", 1e-3), ("cost", "cost", 1e-12)):
        ratio = getattr(rules, name)
        logs = -_differences(every, field, partial(_log, least))
        if ratio is not None and logs.size:
            yield Metric(name, logs, math.log(ratio), True, _RATIO_REACH)


def _differences(pairs: Sequence[tuple[Case, Case]], field: str, scale: Any = float) -> np.ndarray:
    """Return candidate minus baseline of the cases where both have the field: f64[n]."""
    both = [(getattr(one, field), getattr(two, field)) for one, two in pairs]
    return np.array([scale(two) - scale(one) for one, two in both if one is not None and two is not None], np.float64)


def _log(least: float, value: float) -> float:
    return math.log(max(least, value))


def _probability(metric: Metric, found: Paired) -> float:
    """Return the probability of such a loss by chance; of scores 0 and 1, the exact test must agree."""
    exact = np.isin(metric.differences, (-1.0, 0.0, 1.0)).all()
    return max(found.loss_p, found.sign_p) if exact else found.loss_p


def _reason(metric: Metric, found: Paired, state: str) -> str:
    """Return one sentence on a metric that did not pass."""
    if metric.reach == _RATIO_REACH:
        shown, allowed = f"{math.exp(-found.mean):.3g} times as much", f"at most {math.exp(metric.margin):.3g} times"
        bounds = f"{math.exp(-found.high):.3g} to {math.exp(-found.low):.3g}"
    else:
        shown, allowed = f"{found.mean:+.4f}", f"at most -{metric.margin:g}"
        bounds = f"{found.low:+.4f} to {found.high:+.4f}"
    counts = f"{found.worse} of {found.cases} cases worse, {found.better} better"
    more = ""
    if state == UNDECIDED:
        more = (
            "; no number of cases decides so small a difference from that"
            if found.needed is None
            else f"; about {found.needed} more cases decide"
        )
    return f"{metric.name}: {shown} ({bounds}; {allowed} allowed; {counts}){more}"
