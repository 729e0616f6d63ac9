"""What the routes of one gateway must keep: breakers, conversations and prefixes, failover."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

from clients.replica_set import picks
from clients.replica_set.picks import ReplicaLoad
from contract.errors import DeadlineExceeded, EngineFailed, TridentError, Unavailable
from contract.generation import GenerationRequest
from gateway.config.settings import SCORED, Settings
from gateway.generation import Generation
from gateway.routing import prefix_cache
from gateway.routing.circuit_breaker import LONGEST_OPEN, BreakerState
from gateway.routing.circuit_breaker import Breaker as CircuitBreaker
from gateway.routing.replicas import RoutedReplica
from gateway.routing.scoring import LIGHT, NEARLY_FULL
from gateway.service import Service

_MOST_OF_IT = 0.6  # of a prompt in common with others: a part that small has no effect on the loads' vote
_SHORTEST = 256  # tokens in common, which no block's end cuts to less than routing looks for


class Breaker:
    """What a replica's breaker must do, by the calls that the replica fails."""

    def __init__(self, settings: Settings, broken: Callable[[str], None]) -> None:
        self._broken = broken
        self._failures, self._open_s = settings.breaker_failures, settings.breaker_open_s
        self._in_a_row, self._opened_s = 0, -self._open_s
        self._trial: object | None = None  # the first call after the pause, until it has a token or ends
        # Of what the gateway itself says: calls in a row that did not end well, for whatever reason; when it opened.
        self._bad, self._pause_s, self._told_s = 0, 0.0, -math.inf

    def sent(self, call: object, now_s: float) -> None:
        """Take note of a call."""
        if self._opened_s < now_s < self._opened_s + self._open_s:
            self._broken("a request was sent to a replica whose breaker must be open")
        elif self._trial is not None:
            self._broken("a request was sent to a replica beside the trial of its breaker")
        elif self._in_a_row >= self._failures and self._told_s >= self._opened_s:
            self._trial = call

    def began(self, call: object) -> None:
        """Take note of a message. That of the trial closes the breaker, and the next failure opens it."""
        if call is self._trial:
            self._trial, self._in_a_row = None, self._failures - 1

    def succeeded(self, sent_s: float) -> None:
        # What was under way when the breaker opened tells nothing.
        if self._in_a_row < self._failures or sent_s >= self._opened_s + self._open_s:
            self._trial, self._in_a_row, self._opened_s = None, 0, -self._open_s
        if sent_s >= self._told_s:
            self._bad, self._pause_s = 0, 0.0

    def left(self, call: object) -> None:
        """Take note of a call that the gateway ended: its caller left, or the replica was silent."""
        self._bad += 1
        self._trial = None if call is self._trial else self._trial

    def failed(self, call: object, sent_s: float, now_s: float) -> None:
        self.left(call)
        if sent_s < self._opened_s + self._open_s:
            return  # it was under way when the breaker opened
        self._in_a_row += 1
        if self._in_a_row >= self._failures:
            self._opened_s = now_s

    def opened(self, now_s: float) -> None:
        """Take note that the gateway's breaker has opened."""
        if self._bad < self._failures:
            self._broken("a breaker opened before so many failures in a row")
        self._pause_s = min(2 * self._pause_s, LONGEST_OPEN * self._open_s) or self._open_s
        self._told_s = now_s

    def check(self, own: CircuitBreaker, now_s: float) -> None:
        """Check the gateway's breaker, ``own``, at any time."""
        if own.state is BreakerState.OPEN and not own.allows(now_s) and now_s > self._told_s + self._pause_s + 1:
            self._broken("a breaker stayed open after its pause")


class Routes:
    """Sees every request of people that one gateway sends. pool: returns its replicas of a pool, by URL."""

    def __init__(
        self, settings: Settings, pool: Callable[[str], Mapping[str, RoutedReplica]], broken: Callable[[str], None]
    ) -> None:
        self.settings, self._pool, self.broken = settings, pool, broken
        self._homes: dict[tuple[str, tuple[str, ...]], str] = {}
        self._sent: defaultdict[str, set[str]] = defaultdict(set)  # URLs by what prompts have in common

    def check(self, url: str, pool: str, request: GenerationRequest) -> None:
        """Check where a request of a person is sent first: with its conversation, or where its beginning is cached."""
        routing, now_s, prompt = self.settings.routing, time.monotonic(), cast(Any, request.text_input)
        prefix, shared = prompt.prefix
        if prompt.session and routing in (SCORED, "session_affinity"):
            self._check_session(url, self._ready(pool, now_s), prompt.session, now_s)
        elif prefix and not prompt.session and routing == SCORED:
            if url not in self._sent[prefix] and shared >= _SHORTEST and shared / prompt.tokens >= _MOST_OF_IT:
                self._check_prefix(url, self._ready(pool, now_s), request, now_s)
            self._sent[prefix].add(url)

    def _ready(self, pool: str, now_s: float) -> list[RoutedReplica]:
        return [replica for replica in self._pool(pool).values() if replica.ready(now_s)]

    def _check_session(self, url: str, ready: list[RoutedReplica], session: str, now_s: float) -> None:
        names = tuple([replica.url for replica in ready])
        if (home := self._homes.get((session, names))) is None:
            home = max(names, key=lambda name: picks.rank(name, session, 1.0), default=url)
            self._homes[session, names] = home
        if home != url and (loads := self._settled(ready, now_s)) and home in picks.below_share(loads):
            self.broken("a request of a conversation was sent to another replica than those before")

    def _check_prefix(self, url: str, ready: list[RoutedReplica], request: GenerationRequest, now_s: float) -> None:
        blocks = prefix_cache.blocks(request)
        # Its own has them from now on, and had not before.
        cached = {one.url for one in ready if one.url != url and one.prefixes.fraction(blocks) >= 0.5}
        if cached and (loads := self._settled(ready, now_s)):
            light = {load.name for load in loads if picks.occupancy(load) < LIGHT * load.max_running}
            if cached & (light | picks.below_share(loads)):
                self.broken("a request was sent elsewhere than where its beginning is cached")

    def _settled(self, ready: list[RoutedReplica], now_s: float) -> list[ReplicaLoad]:
        """Return the replicas' loads; none if anything but load and affinity tells the replicas apart."""
        found = [replica.candidate(now_s) for replica in ready]
        loads, young = [one.load for one in found], any(one.age_s <= self.settings.slow_start_s for one in found)
        full = any(one.waiting or one.kv_usage >= NEARLY_FULL or not picks.has_room(one) for one in loads)
        return [] if young or full else loads


def could_move(gateway: Service, generation: Generation, error: TridentError) -> bool:
    """Whether a request that failed at its only attempt should have gone to another replica, which had room."""
    settings, route, now_s = gateway.settings, generation._route, time.monotonic()
    if route is None or not route.replica or generation._attempts != 1 or not settings.continuations:
        return False
    if isinstance(error, DeadlineExceeded):
        silent_s = now_s - max(generation._opened_s, route.progress_s)
        if generation.tokens or not settings.hang_retries:
            return False
        if silent_s < min(settings.first_token_timeout_s, settings.idle_timeout_s) + 1:
            return False
    elif not isinstance(error, Unavailable | EngineFailed) or gateway.replicas._budget.tokens < 1:
        return False
    if generation.request in generation._runtime.suspects:
        return False
    others = [replica for replica in gateway.replicas.ready_in(route.pool) if replica.url != route.replica]
    return any(replica.channel.has_room for replica in others)  # type: ignore[attr-defined]
