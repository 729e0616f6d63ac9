"""Which replica gets a request. Pure functions of a snapshot: ``pick(loads, ask, rng) -> ReplicaLoad``.

All of them choose among the healthy replicas, or among all if none is healthy: then the probes are as likely to
be wrong as every replica to be dead. Ties are broken by chance, so that equal replicas get equal shares.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contract.errors import InvalidArgument, Unavailable
from contract.load import ReplicaLoad


@dataclass(frozen=True)
class Ask:
    """What a pick knows about the request.

    turn: the caller's running number of requests. session, prefix: what the request shares with earlier ones,
    empty if nothing: a conversation's id, and the beginning of the prompt.
    """

    turn: int = 0
    session: str = ""
    prefix: str = ""


Pick = Callable[[Sequence[ReplicaLoad], Ask, random.Random], ReplicaLoad]


def round_robin(loads: Sequence[ReplicaLoad], ask: Ask, rng: random.Random) -> ReplicaLoad:
    """Each in turn, by name. Blind to load: the baseline."""
    candidates = sorted(eligible(loads), key=lambda load: load.name)
    return candidates[ask.turn % len(candidates)]


def least_outstanding(loads: Sequence[ReplicaLoad], ask: Ask, rng: random.Random) -> ReplicaLoad:
    """The one with the fewest requests under way."""
    return _lowest(eligible(loads), occupancy, rng)


def power_of_two_choices(loads: Sequence[ReplicaLoad], ask: Ask, rng: random.Random) -> ReplicaLoad:
    """The less busy of two drawn at random. With many callers that see old loads, this avoids the herd."""
    candidates = eligible(loads)
    if len(candidates) > 2:
        candidates = rng.sample(candidates, 2)
    return _lowest(candidates, occupancy, rng)


def token_aware(loads: Sequence[ReplicaLoad], ask: Ask, rng: random.Random) -> ReplicaLoad:
    """The one with the least work booked, in tokens of decoding, prompts that wait to be computed included."""
    return _lowest(eligible(loads), lambda load: load.pending_tokens, rng)


def session_affinity(bound: float = 1.25, otherwise: Pick = power_of_two_choices) -> Pick:
    """Requests of one ``ask.session`` stay together; those without one go where ``otherwise`` says."""
    return _affinity(lambda ask: ask.session, bound, otherwise)


def prefix_affinity(bound: float = 1.25, otherwise: Pick = power_of_two_choices) -> Pick:
    """Requests with one ``ask.prefix`` stay together, so that the prefix is computed and cached once."""
    return _affinity(lambda ask: ask.prefix, bound, otherwise)


def _affinity(key_of: Callable[[Ask], str], bound: float, otherwise: Pick) -> Pick:
    """Rendezvous hashing with bounded load.

    Every replica has a rank for every key; the key's requests go to the highest, and when one leaves, only its
    own keys move. A replica that already has ``bound`` times the mean load is passed over for the next rank, so
    that a popular key spreads instead of drowning one replica.
    """
    if not bound > 1.0:
        raise InvalidArgument("bound", f"got {bound}; allowed is more than 1, as a multiple of the mean load")

    def pick(loads: Sequence[ReplicaLoad], ask: Ask, rng: random.Random) -> ReplicaLoad:
        key = key_of(ask)
        if not key:
            return otherwise(loads, ask, rng)
        candidates = eligible(loads)
        limit = math.ceil(bound * (sum(map(occupancy, candidates)) + 1) / len(candidates))
        ranked = rendezvous(key, candidates)
        return next((load for load in ranked if occupancy(load) < limit), ranked[0])

    return pick


def rendezvous(key: str, loads: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """``loads`` by the rank that ``key`` gives each, highest first; the same on every machine."""

    def rank(load: ReplicaLoad) -> bytes:
        return hashlib.blake2b(f"{load.name}\0{key}".encode(), digest_size=8).digest()

    return sorted(loads, key=rank, reverse=True)


def eligible(loads: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """The healthy ones, or all if none is. Raises Unavailable if there is none at all."""
    if not loads:
        raise Unavailable("no replica is known")
    return [load for load in loads if load.healthy] or list(loads)


def occupancy(load: ReplicaLoad) -> int:
    """Requests under way: ours, or all that its metrics show if that is more."""
    return max(load.outstanding, load.running + load.waiting)


def _lowest(loads: Sequence[ReplicaLoad], score: Callable[[ReplicaLoad], float], rng: random.Random) -> ReplicaLoad:
    scores = [score(load) for load in loads]
    least = min(scores)
    return rng.choice([load for load, one in zip(loads, scores, strict=True) if one == least])


BY_NAME: dict[str, Pick] = {
    "round_robin": round_robin,
    "least_outstanding": least_outstanding,
    "power_of_two_choices": power_of_two_choices,
    "token_aware": token_aware,
    "session_affinity": session_affinity(),
    "prefix_affinity": prefix_affinity(),
}
