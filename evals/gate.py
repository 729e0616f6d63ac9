"""The release gate: whether a candidate is as good as its baseline, from the results of both on the same cases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from contract.errors import InvalidArgument
from contract.gate_result import FAIL, PASS, UNDECIDED
from contract.paired_scores import Paired, compare, holm
from evals import results
from evals.results import Case, Results, Strict

NOT_SHOWN = "no loss shown"  # of a metric that can only fail
_Loss = Annotated[float, Field(ge=0, lt=1)]
_Ratio = Annotated[float, Field(gt=1, le=100)]
# By metric of ratios: the field of a case, and its least value. Its reach: a case that takes twice as much, or half.
_RATIOS = {"length": ("tokens", 1.0), "latency": ("latency_s", 1e-3), "cost": ("cost", 1e-12)}
_RATIO_REACH = math.log(2)


class Rules(Strict):
    """What the candidate may lose.

    alpha: probability of a wrong fail, and of a wrong pass. power: with which the cases needed decide.
    quality: of the mean score over all cases. task: of one task's, which fails the candidate where more is shown.
    tasks: of these tasks, which must be shown to be kept. refusals, failures: more of them. judge: of the judge's
        verdicts, where there are any. length, latency, cost: times as much, in the geometric mean of the cases.
    """

    alpha: Annotated[float, Field(gt=0, le=0.2)] = 0.05
    power: Annotated[float, Field(ge=0.5, lt=1)] = 0.8
    quality: _Loss = 0.05
    task: _Loss = 0.15
    tasks: Mapping[str, _Loss] = {}
    refusals: _Loss = 0.05
    failures: _Loss = 0.05
    judge: _Loss = 0.1
    length: _Ratio = 1.5
    latency: _Ratio = 2.0
    cost: _Ratio = 1.5


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
    Raises InvalidArgument where the two did not run the same tasks, or a task of the rules was not run."""
    pairs = results.pairs(baseline, candidate)
    for name in rules.tasks:
        if not pairs.get(name):
            raise InvalidArgument(f"tasks.{name}", f"must be among {', '.join(pairs)}, with cases on both sides")
    metrics = list(_metrics(pairs, rules))
    if judged is not None:
        metrics.append(Metric("judge", np.array(judged, np.float64), rules.judge))
    return decide(metrics, rules.alpha, rules.power)


def decide(metrics: Sequence[Metric], alpha: float, power: float) -> Verdict:
    """Return the verdict on some metrics.

    It fails if one of them is shown to have lost more than its margin, by Holm's test over all: a good candidate fails
    with probability alpha at most. It passes if every required one is shown, each with alpha, to have lost less.
    """
    found = {one.name: compare(one.differences, one.margin, one.reach, alpha=alpha, power=power) for one in metrics}
    lost = holm({one.name: _probability(one, found[one.name]) for one in metrics}, alpha)
    rows, states = {}, {}
    for one in metrics:
        kept = PASS if found[one.name].kept else UNDECIDED if one.required else NOT_SHOWN
        states[one.name] = FAIL if one.name in lost else kept
        needed = found[one.name].needed if states[one.name] == UNDECIDED else None
        rows[one.name] = asdict(found[one.name]) | {"margin": one.margin, "verdict": states[one.name], "needed": needed}
    verdict = FAIL if lost else UNDECIDED if UNDECIDED in states.values() else PASS
    deciding = [one for one in metrics if states[one.name] == verdict != PASS]
    needs = [found[one.name].needed or math.inf for one in deciding]
    most = int(max(needs)) if verdict == UNDECIDED and max(needs) < math.inf else None
    return Verdict(verdict, tuple(_reason(one, found[one.name], verdict) for one in deciding), most, rows)


def _metrics(pairs: Mapping[str, Sequence[tuple[Case, Case]]], rules: Rules) -> Iterator[Metric]:
    every = [pair for cases in pairs.values() for pair in cases]
    yield Metric("quality", -np.subtract(*_both(every, "score")), rules.quality)
    for name, cases in pairs.items():
        if cases:
            margin = rules.tasks.get(name, rules.task)
            yield Metric(f"task {name}", -np.subtract(*_both(cases, "score")), margin, name in rules.tasks)
    yield Metric("failures", np.array([bool(a.error) - float(bool(b.error)) for a, b in every]), rules.failures)
    refused = _both(every, "refused")
    if refused.size:
        yield Metric("refusals", np.subtract(*refused), rules.refusals)
    for name, (field, least) in _RATIOS.items():
        both = _both(every, field)
        if both.size:
            logs = np.subtract(*np.log(np.maximum(both, least)))
            yield Metric(name, logs, math.log(getattr(rules, name)), True, _RATIO_REACH)


def _both(pairs: Sequence[tuple[Case, Case]], field: str) -> np.ndarray:
    """Return a field of baseline and candidate, of the cases where both have it: f64[2, n]."""
    values = [(getattr(one, field), getattr(two, field)) for one, two in pairs]
    return np.array([both for both in values if None not in both], np.float64).reshape(-1, 2).T


def _probability(metric: Metric, found: Paired) -> float:
    """Return the probability of such a loss by chance; of scores 0 and 1, the exact test must agree."""
    exact = np.isin(metric.differences, (-1.0, 0.0, 1.0)).all()
    return max(found.loss_p, found.sign_p) if exact else found.loss_p


def _reason(metric: Metric, found: Paired, state: str) -> str:
    """Return one sentence on a metric that did not pass."""
    if metric.name in _RATIOS:
        of, low, high, allowed = (math.exp(-value) for value in (found.mean, found.high, found.low, -metric.margin))
        shown = f"{of:.3g} times as much ({low:.3g} to {high:.3g}; at most {allowed:.3g} times allowed"
    else:
        shown = f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f}; at most -{metric.margin:g} allowed"
    more = "no number of cases decides" if found.needed is None else f"about {found.needed} more cases decide"
    counts = f"{found.worse} of {found.cases} cases worse, {found.better} better"
    return f"{metric.name}: {shown}; {counts})" + f"; {more}" * (state == UNDECIDED)
