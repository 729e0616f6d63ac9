"""Which replica gets a request: Filter → Score → Pick. Pure functions of a snapshot; clock and chance are passed in.

Filters take replicas away; one that would take the last away is passed over unless it is ``strict``. Scores are in
[0, 1], higher is better, and are added up by weight. The pick is the best, ties by chance in proportion to capacity;
any policy of ``clients.replica_set.picks`` can take the place of scores. Load is relative to capacity everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from clients.replica_set import picks
from clients.replica_set.picks import Pick, RoutingRequest, occupancy
from contract.errors import Unavailable
from contract.load import ReplicaLoad

NEARLY_FULL = 0.95  # of the KV cache: what comes on top would wait for blocks


@dataclass(frozen=True)
class Candidate:
    """A replica as routing sees it. open_breaker: recent requests failed there. age_s: since it came (back)."""

    load: ReplicaLoad
    open_breaker: bool = False
    age_s: float = math.inf


@dataclass
class Explanation:
    """Why a replica was chosen, for a log line or a span.

    passed_over: by replica the filter that took it away. scores: of those left, before weights; empty under a policy of
    ``clients.replica_set.picks``. loads: of all, as text.
    """

    policy: str = ""
    pool: str = ""
    chosen: str = ""
    passed_over: dict[str, str] = field(default_factory=dict)
    scores: dict[str, dict[str, float]] = field(default_factory=dict)
    loads: dict[str, str] = field(default_factory=dict)

    def attributes(self) -> dict[str, str | list[str]]:
        """Span attributes: lists of ``REPLICA: text``, as spans hold no tables."""
        named = {
            "loads": self.loads,
            "scores": {
                name: " ".join(f"{key}={value:g}" for key, value in one.items()) for name, one in self.scores.items()
            },
            "passed_over": self.passed_over,
        }
        listed = {
            f"trident.route.{key}": [f"{name}: {text}" for name, text in table.items()] for key, table in named.items()
        }
        return {"trident.route.policy": self.policy} | {key: texts for key, texts in listed.items() if texts}


@dataclass(frozen=True)
class Router:
    """weights: of the scores by name. pick: a policy in their place, or None. slow_start_s: see ``warm``."""

    weights: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_WEIGHTS))
    pick: Pick | None = None
    slow_start_s: float = 30.0

    def choose(
        self,
        candidates: Sequence[Candidate],
        request: RoutingRequest,
        rng: random.Random,
        explanation: Explanation | None = None,
    ) -> ReplicaLoad:
        """Fills in ``explanation`` if there is one. Raises Unavailable if no replica may be asked."""
        if not candidates:
            raise Unavailable("no replica is known", 1.0)
        left = [one for one in candidates if one.load.healthy and not one.open_breaker]
        if not left:
            raise Unavailable(f"none of {len(candidates)} replicas is fit to serve", 1.0)
        filters: tuple[tuple[str, Callable[[list[Candidate]], list[Candidate]]], ...] = (
            ("tried", lambda those: _unless_empty(those, lambda one: one.load.name not in request.tried)),
            ("slow start", lambda those: warm(those, self.slow_start_s, rng)),
            ("kv cache full", lambda those: _unless_empty(those, lambda one: one.load.kv_usage < NEARLY_FULL)),
            ("requests waiting", lambda those: _unless_empty(those, lambda one: one.load.waiting == 0)),
            ("no free slot", lambda those: _unless_empty(those, lambda one: picks.has_room(one.load))),
        )
        if explanation is not None:
            _note(explanation, "not healthy", candidates, left)
        for name, keep in filters if len(left) > 1 else ():
            before, left = left, keep(left)
            if explanation is not None:
                _note(explanation, name, before, left)
        loads = [one.load for one in left]
        chosen = self._best(loads, request, rng, explanation) if len(loads) > 1 else loads[0]
        if explanation is not None:
            explanation.policy = "scored" if self.pick is None else self.pick.__name__
            explanation.chosen = chosen.name
            explanation.loads = {one.load.name: _described(one.load) for one in candidates}
        return chosen

    def _best(
        self, loads: list[ReplicaLoad], request: RoutingRequest, rng: random.Random, explanation: Explanation | None
    ) -> ReplicaLoad:
        if self.pick is not None:
            return self.pick(loads, request, rng)
        totals = [0.0] * len(loads)
        for name, weight in self.weights.items():
            scores = SCORES[name](loads, request)
            for index, score in enumerate(scores):
                totals[index] += weight * score
                if explanation is not None:
                    explanation.scores.setdefault(loads[index].name, {})[name] = round(score, 4)
        best = max(totals)
        slots = picks.slot_capacities(loads)
        equal = {place: slots[place] for place, total in enumerate(totals) if total >= best - 1e-9}
        return loads[picks.draw(equal, rng)]


def _note(explanation: Explanation, name: str, before: Sequence[Candidate], left: Sequence[Candidate]) -> None:
    kept = {one.load.name for one in left}
    explanation.passed_over |= {one.load.name: name for one in before if one.load.name not in kept}


def _described(load: ReplicaLoad) -> str:
    slots = load.max_running or "?"
    return f"{occupancy(load)}/{slots} requests, {load.pending_tokens} tokens, KV {load.kv_usage:.2f}"


def warm(candidates: list[Candidate], slow_start_s: float, rng: random.Random) -> list[Candidate]:
    """Slow start: a replica of age a takes part in so many choices out of ``slow_start_s`` / a, a tenth at least.

    Where all are young there is nobody to spare them, and all take part.
    """
    if slow_start_s <= 0 or all(one.age_s < slow_start_s for one in candidates):
        return candidates
    return _unless_empty(
        candidates, lambda one: one.age_s >= slow_start_s or rng.random() < max(0.1, one.age_s / slow_start_s)
    )


def least_outstanding(loads: Sequence[ReplicaLoad], request: RoutingRequest) -> list[float]:
    """Falling with the requests there for its slots; the best of all where it is a replica's turn."""
    relative = [occupancy(load) / slots for load, slots in zip(loads, picks.slot_capacities(loads), strict=True)]
    return _lowest_is_best(relative, picks.least_occupied(loads))


def least_pending_tokens(loads: Sequence[ReplicaLoad], request: RoutingRequest) -> list[float]:
    """The same for the work that is booked, in tokens of decoding, for the pace of the replica."""
    capacities = picks.token_capacities(loads)
    relative = [load.pending_tokens / own for load, own in zip(loads, capacities, strict=True)]
    return _lowest_is_best(relative, picks.least_pending(loads))


def kv_cache_room(loads: Sequence[ReplicaLoad], request: RoutingRequest) -> list[float]:
    """The free part of the KV cache."""
    return [1.0 - min(1.0, load.kv_usage) for load in loads]


def affinity(loads: Sequence[ReplicaLoad], request: RoutingRequest) -> list[float]:
    """1 for the replica that has the request's session, or its prefix, unless it has more than its share to do."""
    key = request.session or request.prefix
    if not key:
        return [0.0] * len(loads)
    home = picks.home(key, loads)
    return [1.0 if load is home else 0.0 for load in loads]


Score = Callable[[Sequence[ReplicaLoad], RoutingRequest], list[float]]
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
        return max(fit, key=lambda pool: picks.rank(pool, session, fit[pool]))
    return rng.choices(list(fit), list(fit.values()))[0]


def _lowest_is_best(values: Sequence[float], turn: Collection[int]) -> list[float]:
    """Those whose ``turn`` it is are all as good as the lowest."""
    most, lowest = max(values), min(values)
    return [1.0 - (lowest if place in turn else value) / most if most else 1.0 for place, value in enumerate(values)]


def _unless_empty(candidates: list[Candidate], keep: Callable[[Candidate], bool]) -> list[Candidate]:
    return [one for one in candidates if keep(one)] or candidates
