"""Statistics of the scores of two sides on the same cases: bootstrap, exact sign test, Holm, cases that are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 4000
MOST_NEEDED = 1_000_000


@dataclass(frozen=True)
class Paired:
    """What the differences (candidate minus baseline, positive: better) of n cases show.

    mean: of the n differences. low, high: of its bootstrap interval, each exceeded with probability alpha.
    better, worse: cases with a difference. sign_p: exact one-sided probability of so many worse ones by chance; of
        scores 0 and 1 this is McNemar's exact test.
    loss_p: probability of so large a loss if the true one were the margin.
    kept: the loss is shown to be below the margin. needed: further cases until one of the two is shown with the power
        asked for, if the mean stays; None for more than MOST_NEEDED.
    """

    cases: int
    mean: float
    low: float
    high: float
    better: int
    worse: int
    sign_p: float
    loss_p: float
    kept: bool
    needed: int | None


def compare(
    differences: np.ndarray, margin: float, reach: float = 1.0, *, alpha: float = 0.05, power: float = 0.8
) -> Paired:
    """Return what f64[n] differences show about a loss of ``margin`` (at least 0).

    reach: the largest difference that one case can have. One case that gained so much and one that lost so much are
        added before resampling (Bonett and Price 2012), and the bounds moved outwards by one case, so that a few equal
        cases do not pass for certainty.
    """
    count = len(differences)
    means, one = resampled_means(np.concatenate([differences, [reach, -reach]])), reach / (count + 2)
    low, high = float(np.quantile(means, alpha)) - one, float(np.quantile(means, 1 - alpha)) + one
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    mean, variance = (float(differences.mean()), float(differences.var())) if count else (0.0, 0.0)
    z, gap = NormalDist().inv_cdf(1 - alpha) + NormalDist().inv_cdf(power), abs(mean + margin)
    # The smallest N with reach / N + z * sqrt(variance of all cases, the added ones too / N) <= gap: a quadratic in N.
    added = z * z * 2 * max(0.0, reach**2 - variance) - reach**2
    linear = 2 * gap * reach + z * z * variance
    root = math.sqrt(max(0.0, linear**2 + 4 * gap**2 * added))
    needed = (linear + root) / (2 * gap**2) - 2 - count if gap > 1e-9 else math.inf
    return Paired(
        *(count, mean, low, high, better, worse),
        sign_p=sign_test(better, worse),
        loss_p=float(1 + (means + one >= -margin).sum()) / (len(means) + 1),
        kept=low > -margin,
        needed=max(1, math.ceil(needed)) if needed <= MOST_NEEDED else None,
    )


def resampled_means(values: np.ndarray) -> np.ndarray:
    """Return the means of f64[n] values drawn n times with replacement, always the same draws: f64[RESAMPLES]."""
    unique, counts = np.unique(values, return_counts=True)
    drawn = np.random.default_rng(0).multinomial(len(values), counts / len(values), size=RESAMPLES)
    return drawn @ unique / len(values)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the bootstrap interval, with 95 % confidence, of the mean of f64[n] values."""
    low, high = np.quantile(resampled_means(values), [0.025, 0.975])
    return float(low), float(high)


def wilson(hits: int, cases: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's interval of a proportion; 0 to 1 without cases."""
    if not cases:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, more = hits / cases, z * z / cases
    half = z * math.sqrt(share * (1 - share) / cases + more / (4 * cases))
    low, high = (share + more / 2 - half) / (1 + more), (share + more / 2 + half) / (1 + more)
    return (low if hits else 0.0), (high if hits < cases else 1.0)


def sign_test(better: int, worse: int) -> float:
    """Return the exact probability of at least ``worse`` losses among all differences if both were equally likely."""
    count = better + worse
    picked = np.arange(1, count + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((count - picked + 1) / picked))]) - count * math.log(2)
    return min(1.0, float(np.exp(logs[worse:]).sum()))


def holm(probabilities: Mapping[str, float], alpha: float) -> set[str]:
    """Return the names that Holm's step-down test rejects: one of them is wrong with probability alpha at most."""
    rejected: set[str] = set()
    for name, probability in sorted(probabilities.items(), key=lambda item: item[1]):
        if probability > alpha / (len(probabilities) - len(rejected)):
            break
        rejected.add(name)
    return rejected
