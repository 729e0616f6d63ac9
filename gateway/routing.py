"""Which replica gets a request: Filter → Score → Pick. Pure functions of a snapshot; clock and chance are passed in.

Filters take replicas away; one that would take the last away is passed over unless it is ``strict``. Scores are in
[0, 1], higher is better, and are added up by weight. The pick is the best, ties by chance; any policy of
``clients.picks`` can take the place of scores.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from clients import picks
from clients.picks import Ask, Pick, occupancy
from contract.errors import Unavailable
from contract.load import ReplicaLoad

NEARLY_FULL = 0.95  # of the KV cache: what comes on top would wait for blocks
AFFINITY_BOUND = 1.25  # times the mean load: a conversation's replica above it is passed over


@dataclass(frozen=True)
class Candidate:
    """A replica as routing sees it. open_breaker: recent requests failed there. age_s: since it came (back)."""

    load: ReplicaLoad
    open_breaker: bool = False
    age_s: float = math.inf


@dataclass(frozen=True)
class Question:
    """What routing knows of a request. tried: replicas that have failed it already."""

    ask: Ask = field(default_factory=Ask)
    tried: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Router:
    """weights: of the scores by name. pick: a policy in their place, or None. slow_start_s: see ``warm``."""

    weights: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_WEIGHTS))
    pick: Pick | None = None
    slow_start_s: float = 30.0

    def choose(self, candidates: Sequence[Candidate], question: Question, rng: random.Random) -> ReplicaLoad:
        """Raises Unavailable if no replica may be asked."""
        if not candidates:
            raise Unavailable("no replica is known", 1.0)
        left = [one for one in candidates if one.load.healthy and not one.open_breaker]
        if not left:
            raise Unavailable(f"none of {len(candidates)} replicas is fit to serve", 1.0)
        if len(left) == 1:
            return left[0].load
        left = _unless_empty(left, lambda one: one.load.name not in question.tried)
        left = warm(left, self.slow_start_s, rng)
        left = _unless_empty(left, lambda one: one.load.kv_usage < NEARLY_FULL and one.load.waiting == 0)
        loads = [one.load for one in left]
        if self.pick is not None:
            return self.pick(loads, question.ask, rng)
        totals = [0.0] * len(loads)
        for name, weight in self.weights.items():
            for index, score in enumerate(SCORES[name](loads, question.ask)):
                totals[index] += weight * score
        best = max(totals)
        return rng.choice([load for load, total in zip(loads, totals, strict=True) if total >= best - 1e-9])


def warm(candidates: list[Candidate], slow_start_s: float, rng: random.Random) -> list[Candidate]:
    """Slow start: a replica of age a takes part in so many choices out of ``slow_start_s`` / a, a tenth at least.

    Where all are young there is nobody to spare them, and all take part.
    """
    if slow_start_s <= 0 or all(one.age_s < slow_start_s for one in candidates):
        return candidates
    return _unless_empty(
        candidates, lambda one: one.age_s >= slow_start_s or rng.random() < max(0.1, one.age_s / slow_start_s)
    )


def least_outstanding(loads: Sequence[ReplicaLoad], ask: Ask) -> list[float]:
    """1 for an idle replica, falling with the requests there, 0 for the busiest of several."""
    return _lowest_is_best([occupancy(load) for load in loads])


def least_pending_tokens(loads: Sequence[ReplicaLoad], ask: Ask) -> list[float]:
    """The same for the work that is booked, in tokens of decoding."""
    return _lowest_is_best([load.pending_tokens for load in loads])


def kv_cache_room(loads: Sequence[ReplicaLoad], ask: Ask) -> list[float]:
    """The free part of the KV cache."""
    return [1.0 - min(1.0, load.kv_usage) for load in loads]


def affinity(loads: Sequence[ReplicaLoad], ask: Ask) -> list[float]:
    """1 for the replica that has the request's session, or its prefix, unless it has more than its share to do."""
    key = ask.session or ask.prefix
    if not key:
        return [0.0] * len(loads)
    limit = math.ceil(AFFINITY_BOUND * (sum(map(occupancy, loads)) + 1) / len(loads))
    ranked = picks.rendezvous(key, loads)
    home = next((load for load in ranked if occupancy(load) < limit), ranked[0])
    return [1.0 if load is home else 0.0 for load in loads]


Score = Callable[[Sequence[ReplicaLoad], Ask], list[float]]
SCORES: dict[str, Score] = {
    "affinity": affinity,
    "least_outstanding": least_outstanding,
    "least_pending_tokens": least_pending_tokens,
    "kv_cache_room": kv_cache_room,
}
# Affinity alone may outvote the loads: its bound already keeps a popular key from drowning its replica.
DEFAULT_WEIGHTS = {"affinity": 2.5, "least_outstanding": 1.0, "least_pending_tokens": 1.0, "kv_cache_room": 0.25}


def choose_pool(
    weights: Mapping[str, float], pinned: str, available: Mapping[str, bool], rng: random.Random, session: str = ""
) -> str:
    """The pool of a request: the tenant's own, or one drawn by weight among those with a fit replica.

    A session is drawn once: by weighted rendezvous hashing, so that both arms of a comparison keep theirs, and only as
    many move as must when a weight or a pool changes. Raises Unavailable where the tenant's pool is down: nobody else's
    replicas are taken for it.
    """
    if pinned:
        if pinned not in weights:
            raise Unavailable(f"the pool {pinned} is not configured", 1.0)
        return pinned
    drawn = {pool: weight for pool, weight in weights.items() if weight > 0}
    fit = {pool: weight for pool, weight in drawn.items() if available.get(pool)} or drawn
    if session:
        return max(fit, key=lambda pool: -fit[pool] / math.log(_fraction(f"{pool}\0{session}")))
    return rng.choices(list(fit), list(fit.values()))[0]


def _fraction(text: str) -> float:
    """A number in (0, 1) that the text gives, the same on every machine."""
    return (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") + 0.5) / 2**64


def _lowest_is_best(values: Sequence[float]) -> list[float]:
    most = max(values)
    return [1.0 - value / most if most else 1.0 for value in values]


def _unless_empty(candidates: list[Candidate], keep: Callable[[Candidate], bool]) -> list[Candidate]:
    return [one for one in candidates if keep(one)] or candidates
