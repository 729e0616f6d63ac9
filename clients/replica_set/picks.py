"""Pick the replica for a request. Pure functions of a snapshot: ``pick(loads, request, rng) -> ReplicaLoad``.

All of them choose among the healthy replicas, or among all if none is healthy: then the probes are as likely to
be wrong as every replica to be dead. Load is relative to capacity: requests to ``max_running``, tokens to the measured
``tokens_per_s``, so that replicas get work in proportion. A replica of unknown capacity counts as the mean of the
others. Ties are broken by chance, in proportion to capacity.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from contract.errors import Unavailable


@dataclass(frozen=True)
class ReplicaLoad:
    """A snapshot of one replica.

    running, waiting: requests, as of the last metrics scrape.
    max_running: slots, 0 if unknown.
    kv_usage: fraction of KV blocks in use, 0 to 1.
    pending_tokens: work this caller has reserved and not released, in tokens of decoding.
    outstanding: this caller's live requests there, always current.
    tokens_per_s: decode rate with all slots taken, measured on earlier requests; 0 if unknown.
    """

    name: str
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    kv_usage: float = 0.0
    pending_tokens: int = 0
    healthy: bool = True
    outstanding: int = 0
    tokens_per_s: float = 0.0


@dataclass(frozen=True)
class RoutingRequest:
    """What routing knows of a request.

    turn: the client's running number of requests.
    session, prefix: a conversation's id and the beginning of the prompt, shared with other requests; "" if not.
    tried: replicas that have failed it already.
    cached: the part of the prompt in each replica's prefix cache, 0 to 1, by name; empty if unknown.
    """

    turn: int = 0
    session: str = ""
    prefix: str = ""
    tried: frozenset[str] = frozenset()
    cached: Mapping[str, float] = field(default_factory=dict)


AFFINITY_BOUND = 1.25  # times its share of the load: above it a key's requests go to the next replica

Pick = Callable[[Sequence[ReplicaLoad], RoutingRequest, random.Random], ReplicaLoad]


def round_robin(loads: Sequence[ReplicaLoad], request: RoutingRequest, rng: random.Random) -> ReplicaLoad:
    """Pick each in turn, by name, as often as it has slots, whatever its load."""
    candidates = sorted(eligible(loads), key=lambda load: load.name)
    counts = [max(1, round(slots)) for slots in slot_capacities(candidates)]
    divisor = math.gcd(*counts)
    ends = list(itertools.accumulate(count // divisor for count in counts))
    # A golden-ratio step visits every position of the cycle once and spreads a replica's turns evenly over it.
    step = 1 if ends[-1] == len(ends) else _coprime_near(ends[-1] * 0.618, ends[-1])
    return candidates[bisect.bisect_right(ends, request.turn * step % ends[-1])]


def least_outstanding(loads: Sequence[ReplicaLoad], request: RoutingRequest, rng: random.Random) -> ReplicaLoad:
    """Pick the replica with the fewest requests in progress for its slots."""
    candidates = eligible(loads)
    return candidates[draw(least_occupied(candidates), rng)]


def power_of_two_choices(loads: Sequence[ReplicaLoad], request: RoutingRequest, rng: random.Random) -> ReplicaLoad:
    """Pick the less busy of two drawn by capacity. With many clients that see stale loads, this avoids herding."""
    candidates = eligible(loads)
    if len(candidates) <= 2:
        return least_outstanding(candidates, request, rng)
    pair = _two_of(candidates, rng)
    return pair[rng.choice(list(least_occupied(pair)))]  # capacity had its part in who was drawn


def token_aware(loads: Sequence[ReplicaLoad], request: RoutingRequest, rng: random.Random) -> ReplicaLoad:
    """Pick the replica that finishes its reserved work first, in tokens of decoding, uncomputed prompts included."""
    candidates = eligible(loads)
    return candidates[draw(least_pending(candidates), rng)]


def session_affinity(loads: Sequence[ReplicaLoad], request: RoutingRequest, rng: random.Random) -> ReplicaLoad:
    """Keep requests of one ``request.session`` together; without one, pick as ``power_of_two_choices``."""
    return _affinity(request.session, loads, request, rng)


def prefix_affinity(loads: Sequence[ReplicaLoad], request: RoutingRequest, rng: random.Random) -> ReplicaLoad:
    """Keep requests with one ``request.prefix`` together, so that the prefix is computed and cached once."""
    return _affinity(request.prefix, loads, request, rng)


def _affinity(key: str, loads: Sequence[ReplicaLoad], request: RoutingRequest, rng: random.Random) -> ReplicaLoad:
    """Pick by rendezvous hashing with bounded load.

    Every replica has a rank for every key; the key's requests go to the highest, and when one leaves, only its own keys
    move. A replica that already has AFFINITY_BOUND times its share of the load, which is in proportion to its slots, is
    passed over for the next rank, so that a popular key spreads instead of drowning one replica.
    """
    return home(key, eligible(loads)) if key else power_of_two_choices(loads, request, rng)


def home(key: str, loads: Sequence[ReplicaLoad], bound: float = AFFINITY_BOUND) -> ReplicaLoad:
    """The highest ranked replica for ``key`` with less than ``bound`` times its share of all requests."""
    below, ranked = below_share(loads, bound), rendezvous(key, loads)
    return next((load for load in ranked if load.name in below), ranked[0])


def below_share(loads: Sequence[ReplicaLoad], bound: float = AFFINITY_BOUND) -> set[str]:
    """Return the names of the replicas with less than ``bound`` times their share of all requests."""
    slots = slot_capacities(loads)
    per_slot = bound * (sum(map(occupancy, loads)) + 1) / sum(slots)
    return {load.name for load, own in zip(loads, slots, strict=True) if occupancy(load) < math.ceil(per_slot * own)}


def rendezvous(key: str, loads: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """``loads`` by the rank that ``key`` gives each, highest first; the same on every machine. A replica is first for
    as many keys as it has slots."""
    slots = slot_capacities(loads)
    ranks = [rank(load.name, key, own) for load, own in zip(loads, slots, strict=True)]
    return [loads[index] for index in sorted(range(len(loads)), key=ranks.__getitem__, reverse=True)]


def rank(name: str, key: str, weight: float) -> float:
    """Return the rank of ``name`` for ``key`` in weighted rendezvous hashing, the same on every machine."""
    digest = hashlib.blake2b(f"{name}\0{key}".encode(errors="surrogatepass"), digest_size=8).digest()
    return -weight / math.log((int.from_bytes(digest, "big") + 0.5) / 2**64)


def eligible(loads: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """The healthy ones, or all if none is. Raises Unavailable if there is none at all."""
    if not loads:
        raise Unavailable("no replica is known")
    return [load for load in loads if load.healthy] or list(loads)


def occupancy(load: ReplicaLoad) -> int:
    """Return the requests in progress: our own, or all in its metrics if these are more."""
    return max(load.outstanding, load.running + load.waiting)


def slot_capacities(loads: Sequence[ReplicaLoad]) -> list[float]:
    """``max_running`` of each; where it is unknown the mean of the known ones, 1 if none is."""
    known = [load.max_running for load in loads if load.max_running > 0]
    mean = sum(known) / len(known) if known else 1.0
    return [float(load.max_running) if load.max_running > 0 else mean for load in loads]


def token_capacities(loads: Sequence[ReplicaLoad]) -> list[float]:
    """``tokens_per_s`` of each, or their slots as long as any was not measured."""
    if all(load.tokens_per_s > 0 for load in loads):
        return [load.tokens_per_s for load in loads]
    return slot_capacities(loads)


def has_room(load: ReplicaLoad) -> bool:
    """Return whether a slot is free, or the number of slots is unknown."""
    return load.max_running <= 0 or occupancy(load) < load.max_running


def least_occupied(loads: Sequence[ReplicaLoad]) -> dict[int, float]:
    """Indices of the replicas whose turn it is by requests in progress, with the weights to draw among them."""
    return _next_in_proportion([occupancy(load) for load in loads], slot_capacities(loads), 1.0)


def least_pending(loads: Sequence[ReplicaLoad]) -> dict[int, float]:
    """Indices of the replicas whose turn it is by pending tokens, with the weights to draw among them."""
    work, requests = [load.pending_tokens for load in loads], sum(load.outstanding for load in loads)
    return _next_in_proportion(work, token_capacities(loads), sum(work) / max(1, requests))


def _next_in_proportion(work: Sequence[float], capacities: Sequence[float], size: float) -> dict[int, float]:
    """Indices that may take the next request of ``size`` so that work stays in proportion to capacity, with weights.

    The ceiling is the least relative load that any replica would have with the request. What each has left below it is
    its weight: nothing for the busier of equal replicas; of a small and a large one that are both idle, the small one
    gets the request as seldom as it is small, so that light load, too, is in proportion. Of replicas of about one size
    only the least loaded stays.
    """
    relative = [amount / capacity for amount, capacity in zip(work, capacities, strict=True)]
    lowest, ceiling = min(relative), min((one + size) / own for one, own in zip(work, capacities, strict=True))
    left = {index: ceiling * capacities[index] - amount for index, amount in enumerate(work)}
    left = {index: units for index, units in left.items() if units > 1e-9 * size}
    if not left:  # nothing is reserved anywhere
        left = {index: capacities[index] for index, load in enumerate(relative) if load == lowest}
    return {
        index: units
        for index, units in left.items()
        if not any(relative[other] < relative[index] and capacities[other] >= 0.9 * capacities[index] for other in left)
    }


def draw(weights: Mapping[int, float], rng: random.Random) -> int:
    """A key, by chance in proportion to its weight."""
    keys = list(weights)
    if min(weights.values()) == max(weights.values()):
        return rng.choice(keys)
    return rng.choices(keys, list(weights.values()))[0]


def _two_of(loads: Sequence[ReplicaLoad], rng: random.Random) -> list[ReplicaLoad]:
    """Two replicas of one capacity, or two draws by capacity, which may be the same: a large one among many small ones
    would else be in every pair and still get no more than each pair's one request."""
    slots = slot_capacities(loads)
    if min(slots) == max(slots):
        return rng.sample(loads, 2)
    first, second = rng.choices(loads, slots, k=2)
    return [first] if first is second else [first, second]


def _coprime_near(target: float, total: int) -> int:
    return next(step for step in range(max(1, round(target)), total) if math.gcd(step, total) == 1)


BY_NAME: dict[str, Pick] = {
    "round_robin": round_robin,
    "least_outstanding": least_outstanding,
    "power_of_two_choices": power_of_two_choices,
    "token_aware": token_aware,
    "session_affinity": session_affinity,
    "prefix_affinity": prefix_affinity,
}
