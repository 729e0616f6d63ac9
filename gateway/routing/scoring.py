"""Which replica gets a request: Filter → Score → Pick. Pure functions of a snapshot.

Filters remove replicas; one that would remove the last is skipped. Scores are in [0, 1], higher is better, and are
added up by weight. The best is picked; ties are drawn in proportion to capacity, and all load is relative to it. A
policy of ``clients.replica_set.picks`` can replace the scores.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from clients.replica_set import picks
from clients.replica_set.picks import Pick, ReplicaLoad, RoutingRequest, occupancy
from contract.errors import Unavailable

LIGHT = 0.25  # of the slots: so few requests are worth a computed prompt
NEARLY_FULL = 0.95  # of the KV cache: what comes on top would wait for blocks


@dataclass(frozen=True)
class Candidate:
    """A replica as routing sees it. age_s: seconds since it became healthy."""

    load: ReplicaLoad
    open_breaker: bool = False
    age_s: float = math.inf


@dataclass
class Explanation:
    """Why a replica was chosen, for a log line or a span.

    passed_over: the filter that removed a replica, by replica. scores: of the replicas left, before weights.
    """

    policy: str = ""
    pool: str = ""
    chosen: str = ""
    passed_over: dict[str, str] = field(default_factory=dict)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    loads: dict[str, str] = field(default_factory=dict)

    def attributes(self) -> dict[str, str | list[str]]:
        """Return span attributes: lists of ``REPLICA: text``, as spans hold no tables."""
        scores = {
            name: " ".join(f"{key}={value:g}" for key, value in each.items()) for name, each in self.scores.items()
        }
        found: dict[str, str | list[str]] = {"trident.route.policy": self.policy}
        for key, table in (("loads", self.loads), ("scores", scores), ("passed_over", self.passed_over)):
            if table:
                found[f"trident.route.{key}"] = [f"{name}: {text}" for name, text in table.items()]
        return found


@dataclass(frozen=True)
class Router:
    """The routing policy. pick: replaces the scores. slow_start_s: see ``slow_start``."""

    pick: Pick | None = None
    slow_start_s: float = 30.0

    def choose(
        self,
        candidates: Sequence[Candidate],
        request: RoutingRequest,
        rng: random.Random,
        explanation: Explanation | None = None,
    ) -> ReplicaLoad:
        """Return the load of the chosen replica; fill in ``explanation``. Raises Unavailable if none is ready."""
        if not candidates:
            raise Unavailable("no replica is known", 1.0)
        left = [candidate for candidate in candidates if candidate.load.healthy and not candidate.open_breaker]
        if not left:
            raise Unavailable(f"no replica is ready: {len(candidates)} are unhealthy or have an open breaker", 1.0)
        if explanation is not None:
            _note(explanation, "not ready", candidates, left)
        for name, keep in FILTERS.items() if len(left) > 1 else ():
            before, left = left, keep(left, request, self.slow_start_s, rng) or left
            if explanation is not None:
                _note(explanation, name, before, left)
        loads = [candidate.load for candidate in left]
        chosen = self._best(loads, request, rng, explanation) if len(loads) > 1 else loads[0]
        if explanation is not None:
            explanation.policy = "scored" if self.pick is None else self.pick.__name__
            explanation.chosen = chosen.name
            explanation.loads = {candidate.load.name: _described(candidate.load) for candidate in candidates}
        return chosen

    def _best(
        self, loads: list[ReplicaLoad], request: RoutingRequest, rng: random.Random, explanation: Explanation | None
    ) -> ReplicaLoad:
        if self.pick is not None:
            return self.pick(loads, request, rng)
        totals = [0.0] * len(loads)
        for name, (weight, score_of) in SCORES.items():
            for index, score in enumerate(score_of(loads, request)):
                totals[index] += weight * score
                if explanation is not None:
                    explanation.scores.setdefault(loads[index].name, {})[name] = round(score, 4)
        best = max(totals)
        slots = picks.slot_capacities(loads)
        equal = {place: slots[place] for place, total in enumerate(totals) if total >= best - 1e-9}
        return loads[picks.draw(equal, rng)]


def _note(explanation: Explanation, name: str, before: Sequence[Candidate], left: Sequence[Candidate]) -> None:
    kept = {candidate.load.name for candidate in left}
    explanation.passed_over |= {candidate.load.name: name for candidate in before if candidate.load.name not in kept}


def _described(load: ReplicaLoad) -> str:
    slots = load.max_running or "?"
    return f"{occupancy(load)}/{slots} requests, {load.pending_tokens} tokens, KV {load.kv_usage:.2f}"


def slow_start(
    candidates: list[Candidate], request: RoutingRequest, slow_start_s: float, rng: random.Random
) -> list[Candidate]:
    """Keep a replica younger than ``slow_start_s`` with probability age / slow_start_s, at least 0.1."""
    if slow_start_s <= 0 or all(candidate.age_s < slow_start_s for candidate in candidates):
        return candidates
    return [
        candidate
        for candidate in candidates
        if candidate.age_s >= slow_start_s or rng.random() < max(0.1, candidate.age_s / slow_start_s)
    ]


# By name, applied in this order.
Filter = Callable[[list[Candidate], RoutingRequest, float, random.Random], list[Candidate]]
FILTERS: dict[str, Filter] = {
    "untried": lambda found, request, *_: [one for one in found if one.load.name not in request.tried],
    "slow_start": slow_start,
    "kv_cache_room": lambda found, *_: [one for one in found if one.load.kv_usage < NEARLY_FULL],
    "no_queue": lambda found, *_: [one for one in found if one.load.waiting == 0],
    "free_slot": lambda found, *_: [one for one in found if picks.has_room(one.load)],
}


def least_outstanding(loads: Sequence[ReplicaLoad], request: RoutingRequest) -> list[float]:
    """Score low occupancy of the slots; replicas whose turn it is score best."""
    relative = [occupancy(load) / slots for load, slots in zip(loads, picks.slot_capacities(loads), strict=True)]
    return _lowest_is_best(relative, picks.least_occupied(loads))


def least_pending_tokens(loads: Sequence[ReplicaLoad], request: RoutingRequest) -> list[float]:
    """Score little pending work, in tokens per the replica's token rate."""
    capacities = picks.token_capacities(loads)
    relative = [load.pending_tokens / own for load, own in zip(loads, capacities, strict=True)]
    return _lowest_is_best(relative, picks.least_pending(loads))


def kv_cache_free(loads: Sequence[ReplicaLoad], request: RoutingRequest) -> list[float]:
    """Score the free part of the KV cache."""
    return [1.0 - min(1.0, load.kv_usage) for load in loads]


def affinity(loads: Sequence[ReplicaLoad], request: RoutingRequest) -> list[float]:
    """Score the replica of the session, or those that have most of the prompt cached; while none has any of it, the
    replica of the prefix. One above its bounded share of the load scores 0, unless few of its slots are taken.

    From half of the prompt on a cached prompt counts as much as a session, and may outvote the loads; less counts less.
    """
    if not request.session and any(request.cached.get(load.name) for load in loads):
        below = picks.below_share(loads) | {load.name for load in loads if occupancy(load) < LIGHT * load.max_running}
        cached = [request.cached.get(load.name, 0.0) if load.name in below else 0.0 for load in loads]
        most = max(cached)
        return [min(1.0, 2 * most) if most and part >= 0.95 * most else 0.0 for part in cached]
    key = request.session or request.prefix
    if not key:
        return [0.0] * len(loads)
    home = picks.home(key, loads)
    return [1.0 if load is home else 0.0 for load in loads]


Score = Callable[[Sequence[ReplicaLoad], RoutingRequest], list[float]]
# By name, with their weights. Affinity may outvote the loads: its bound already keeps a popular key from overloading
# its replica.
SCORES: dict[str, tuple[float, Score]] = {
    "affinity": (2.5, affinity),
    "least_outstanding": (1.0, least_outstanding),
    "least_pending_tokens": (1.0, least_pending_tokens),
    "kv_cache_free": (0.25, kv_cache_free),
}


def choose_pool(
    weights: Mapping[str, float], pinned: str, available: Mapping[str, bool], rng: random.Random, session: str = ""
) -> str:
    """Return the pool of a request: the pinned one, or one drawn by weight among those with a ready replica; sessions
    by weighted rendezvous hashing, so that each stays in its pool and a change of weights moves few. Raises Unavailable
    if the pinned pool is not configured; no other pool replaces it."""
    if pinned:
        if pinned not in weights:
            raise Unavailable(f"the pool {pinned} is not configured", 1.0)
        return pinned
    drawn = {pool: weight for pool, weight in weights.items() if weight > 0}
    ready = {pool: weight for pool, weight in drawn.items() if available.get(pool)} or drawn
    if not ready:
        raise Unavailable("no pool has a generating model", 1.0)
    if session:
        return max(ready, key=lambda pool: picks.rank(pool, session, ready[pool]))
    return rng.choices(list(ready), list(ready.values()))[0]


def _lowest_is_best(values: Sequence[float], turn: Collection[int]) -> list[float]:
    """Map values to scores, the lowest to the best. turn: indices that count as the lowest."""
    most, lowest = max(values), min(values)
    return [1.0 - (lowest if place in turn else value) / most if most else 1.0 for place, value in enumerate(values)]
