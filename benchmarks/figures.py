"""Compute the figures of a run from its records: latencies, rates, goodput.

TTFT and latency count from the intended instant of sending. An inter-token latency is a response's gap divided by its
tokens, one value per token; a message gap is the time between two responses, one value per response.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.record import Record

LOWER, HIGHER = "lower", "higher"  # which is better
WORST = {LOWER: math.inf, HIGHER: 0.0}
LEAST_NOISE = 0.05  # runs of one round have no range


@dataclass(frozen=True)
class Spread:
    """A distribution, in seconds unless its name has another unit. All nan without values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Slo:
    """Targets at the 95th percentile, in seconds."""

    ttft_s: float = 0.5
    latency_s: float = 5.0


@dataclass(frozen=True)
class Figures:
    """The figures of the requests intended within the window.

    cancelled: by the client on purpose.
    ttft_s, latency_s: from the intended instant; latency_s of ok requests only.
    itl_s, gap_s: inter-token latency, gap between messages.
    goodput_per_s: requests per second that met both SLO targets; good_fraction: of those not cancelled.
    slo_met: whether the run met the SLO at P95, failures counted as misses. errors: failures by type.
    """

    requests: int
    ok: int
    failed: int
    cancelled: int
    window_s: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_s: Spread
    itl_s: Spread
    gap_s: Spread
    latency_s: Spread
    tokens_per_message: float
    goodput_per_s: float
    good_fraction: float
    slo: Slo
    slo_met: bool
    errors: dict[str, int] = field(default_factory=dict)


def spread(values: Sequence[float] | np.ndarray) -> Spread:
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        return Spread(0, *[math.nan] * 6)
    p50, p90, p95, p99 = map(float, np.percentile(array, (50, 90, 95, 99)))
    return Spread(array.size, float(array.mean()), p50, p90, p95, p99, float(array.max()))


def of_gaps(gaps: Sequence[tuple[float, int]]) -> Spread:
    """Return the inter-token latencies of (seconds since the message before, tokens of the message)."""
    return spread(np.repeat([gap / count for gap, count in gaps], [count for _, count in gaps]) if gaps else [])


def compute(records: Sequence[Record], window: tuple[float, float], slo: Slo = Slo()) -> Figures:  # noqa: B008
    """Compute the figures of the requests intended within ``window`` (first and last instant). Rates count what any
    request got within it."""
    begin_s, end_s = window
    window_s = max(end_s - begin_s, 1e-9)
    mine = [record for record in records if begin_s <= record.intended_s <= end_s]
    ok = [record for record in mine if record.ok]
    awaited = [record for record in mine if not record.cancelled]
    good = [r for r in ok if r.ttft_s is not None and r.ttft_s < slo.ttft_s and r.latency_s < slo.latency_s]
    ended_ok = [record for record in records if record.ok and begin_s <= record.ended_s <= end_s]
    tokens = sum(n for record in records for at_s, n in record.messages if begin_s <= at_s <= end_s)
    prompt_tokens = sum(r.input_tokens for r in records if r.first_s is not None and begin_s <= r.first_s <= end_s)
    messages = sum(len(record.messages) for record in mine)
    return Figures(
        requests=len(mine),
        ok=len(ok),
        failed=sum(bool(record.error) for record in mine),
        cancelled=len(mine) - len(awaited),
        window_s=window_s,
        requests_per_s=len(ended_ok) / window_s,
        input_tokens_per_s=prompt_tokens / window_s,
        output_tokens_per_s=tokens / window_s,
        ttft_s=spread([record.ttft_s for record in mine if record.ttft_s is not None]),
        itl_s=of_gaps([gap for record in mine for gap in record.gaps]),
        gap_s=spread([gap for record in mine for gap, _ in record.gaps]),
        latency_s=spread([record.latency_s for record in ok]),
        tokens_per_message=sum(record.tokens for record in mine) / messages if messages else float("nan"),
        goodput_per_s=len(good) / window_s,
        good_fraction=len(good) / len(awaited) if awaited else float("nan"),
        slo=slo,
        slo_met=_met_at_p95(awaited, slo),
        errors=dict(Counter(record.error_type for record in mine if record.error)),
    )


def window_of(
    records: Sequence[Record], started_s: float, warmup_s: float, duration_s: float | None
) -> tuple[float, float]:
    """Return (end of the warm-up, end of the load); without a duration the load ends with the last answer."""
    begin_s = started_s + warmup_s
    if duration_s is not None:
        return begin_s, begin_s + duration_s
    return begin_s, max((record.ended_s for record in records), default=begin_s)


def _met_at_p95(awaited: Sequence[Record], slo: Slo) -> bool:
    if not awaited:
        return False
    ttfts = [record.ttft_s if record.ok and record.ttft_s is not None else np.inf for record in awaited]
    latencies = [record.latency_s if record.ok else np.inf for record in awaited]
    # "higher": with a failure above the 95th percentile, interpolation would yield infinity or nan.
    reached = [np.percentile(values, 95, method="higher") for values in (ttfts, latencies)]
    return bool(reached[0] < slo.ttft_s and reached[1] < slo.latency_s)


def compared(better: str, found: Mapping[str, Iterable[float]]) -> dict[str, dict[str, Any]]:
    """Return figures as ``benchmarks.suite`` compares them. better: LOWER or HIGHER; found: values of the rounds by
    ``GROUP: LABEL``."""
    return {name: {"better": better, "values": list(values)} for name, values in found.items()}


def rounds_of(figure: Mapping[str, Any]) -> list[float]:
    """Return the values of one of ``compared``, the worst there is for rounds without a finite one."""
    worst = WORST[figure["better"]]
    return [worst if value is None or not math.isfinite(value) else value for value in figure["values"]]


def noise(values: Sequence[float]) -> float:
    """Return by how much rounds of one figure differ: the largest over the smallest, less 1; at least LEAST_NOISE."""
    low, high = min(values), max(values)
    return max(LEAST_NOISE, high / low - 1 if low > 0 else math.inf if high > 0 else 0.0)
