"""What gateways share in a Redis or Valkey that may be away at any moment: caps, and replicas to be careful with.

Every gateway has a lease there and writes what it holds as absolute numbers, so that the next call repairs a lost one.
A gateway that dies loses its lease and with it what it held. While Redis is away each gateway keeps to its share of a
cap: the cap divided by the gateways there were.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from contract import failpoint
from contract.background import Background
from contract.errors import Overloaded, Unavailable
from gateway.admission.budget_store import connect
from gateway.admission.concurrency import Caps, Slot, caps, holder
from gateway.config.tenant import Levels

_LOG = logging.getLogger(__name__)
TIMEOUT_S = 0.25  # of a call; a request that waited longer for its turn makes none
PAUSE_S = 1.0  # after a call that failed, during which none is made
LEASE_S = 5.0
BEAT_S = 1.0
_PREFIX = "trident:{caps}:"  # the part in braces keeps all of them on one node of a cluster

# KEYS: the gateways by the end of their leases, replicas by when a breaker opened, then for each cap the requests by
# gateway. ARGV: gateway, lease in ms, the time after which openings are returned, how many replicas have opened here,
# their URLs, then for each cap the requests that this gateway would have, has, and may have with others ("" for any).
_SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local own, lease, opened = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[4])
redis.call('ZADD', KEYS[1], now + lease, own)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
for i = 1, opened do redis.call('ZADD', KEYS[2], now, ARGV[4 + i]) end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - 60000)
local full, others = 0, 0
for i = 3, #KEYS do
  local wanted, most = tonumber(ARGV[5 + opened + 3 * (i - 3)]), tonumber(ARGV[7 + opened + 3 * (i - 3)])
  local sum, held = 0, redis.call('HGETALL', KEYS[i])
  for j = 1, #held, 2 do
    local lives = redis.call('ZSCORE', KEYS[1], held[j])
    if not lives then redis.call('HDEL', KEYS[i], held[j]) elseif held[j] ~= own then sum = sum + held[j + 1] end
  end
  if most and sum + wanted > most and full == 0 then full, others = i - 2, sum end
end
for i = 3, #KEYS do
  local count = tonumber(ARGV[(full == 0 and 5 or 6) + opened + 3 * (i - 3)])
  if count > 0 then redis.call('HSET', KEYS[i], own, count) else redis.call('HDEL', KEYS[i], own) end
  redis.call('PEXPIRE', KEYS[i], 10 * lease)
end
for i = 1, 2 do redis.call('PEXPIRE', KEYS[i], 600000) end
return {full, others, redis.call('ZCARD', KEYS[1]), now, redis.call('ZRANGEBYSCORE', KEYS[2], ARGV[3], '+inf')}
"""


class Away(Unavailable):
    """Redis does not answer, or did not a moment ago."""

    def __init__(self) -> None:
        super().__init__("the state that the gateways share cannot be read now", 1.0)


class SharedState:
    """A connection to Redis for one process. ``start`` and ``close`` it on the loop that uses it.

    gateways: processes that had a lease at the last call. suspect: called with the URL of a replica whose breaker
    another gateway opened.
    """

    def __init__(self, url: str) -> None:
        self.redis = connect(url, TIMEOUT_S)
        self.gateway, self.gateways = secrets.token_hex(8), 1
        self.suspect: Callable[[str], None] = lambda url: None
        self._script = self.redis.register_script(_SCRIPT)
        self._held: Counter[str] = Counter()  # by cap
        self._opened: set[str] = set()  # not yet written
        self._known_ms = "0"  # openings up to this moment are known
        self._writing = asyncio.Lock()  # absolute numbers must arrive in the order they were made
        self._released: set[str] = set()  # caps of which less is held than is written
        self._away_until_s, self._closing = 0.0, False
        self._told_away = False  # in the log, since the last call that succeeded
        self._beating = Background()
        self._wake = asyncio.Event()

    def start(self) -> None:
        self._beating.start(self._beat())

    async def close(self) -> None:
        self._closing = True
        await self._beating.cancel()
        await self.redis.aclose()

    @property
    def away(self) -> bool:
        return time.monotonic() < self._away_until_s

    async def call(self, made: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of a call of Redis. Raises Away, after TIMEOUT_S or at once."""
        from redis.exceptions import RedisError

        if self.away:
            raise Away
        cancellations = _cancellations()
        try:
            if failpoint.value("redis.away") is not None:
                raise ConnectionError("failpoint redis.away")
            result = await made()
            if self._told_away:
                self._told_away = False
                _LOG.warning("the shared state answers again")
            if _cancellations() > cancellations:  # redis-py's wait_for may swallow one: before Python 3.12
                raise asyncio.CancelledError
            return result
        except (RedisError, OSError) as exc:
            if not self._told_away:
                self._told_away = True
                _LOG.warning("the shared state does not answer, each gateway goes on by itself: %s", exc or "timeout")
            self._away_until_s = time.monotonic() + PAUSE_S
            raise Away from exc

    def opened(self, url: str) -> None:
        """Tell the other gateways that the breaker of a replica has opened here."""
        self._opened.add(url)
        self._wake.set()

    async def take(self, caps: Mapping[str, int], requests: int) -> None:
        """Count ``requests`` under all caps, each with its limit, or under none. Raises Overloaded."""
        began_s = time.monotonic()
        async with self._writing:
            try:
                if time.monotonic() - began_s > TIMEOUT_S:
                    raise Away
                # Requests may end before the answer comes.
                held, limits = {name: self._held[name] for name in caps}, tuple(caps.values())
                full, others = await self._write({name: (requests, most) for name, most in caps.items()})
            except Away:
                held, limits = self._held, tuple(max(1, most // self.gateways) for most in caps.values())
                over = (held[name] + requests > share for name, share in zip(caps, limits, strict=True))
                full, others = next((number for number, is_over in enumerate(over, 1) if is_over), 0), 0
                self._released.update(caps)
            except BaseException:  # it is unknown whether it was written
                self._released.update(caps)
                raise
            if full:
                name, most = list(caps)[full - 1], limits[full - 1]
                raise Overloaded(f"{holder(name)} has {others + held[name]} requests under way and may have {most}")
            self._held.update(dict.fromkeys(caps, requests))

    def give_back(self, names: Collection[str], requests: int) -> None:
        """Take requests off the caps, in Redis soon."""
        self._held.subtract(dict.fromkeys(names, requests))
        self._released.update(names)
        self._wake.set()

    async def _beat(self) -> None:
        """Write what was released and opened at once, and renew the lease and all of it every BEAT_S."""
        renewed_s = 0.0
        while not self._closing:  # before Python 3.12 wait_for may swallow a cancellation
            due = time.monotonic() - renewed_s >= BEAT_S
            async with self._writing:
                self._wake.clear()
                names, self._released = self._released.union(self._held if due else ()), set()
                try:
                    await self._write({name: (0, None) for name in names})
                except Away:
                    self._released |= names
            self._held = +self._held
            renewed_s = time.monotonic() if due else renewed_s
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), BEAT_S)
            if self.away:
                await asyncio.sleep(BEAT_S)

    async def _write(self, caps: Mapping[str, tuple[int, int | None]]) -> tuple[int, int]:
        """Write the requests of some caps, and so many more where all of them allow it. caps: by name, how many more,
        and the limit. Return the number of the first full cap, from 1 on, and what others hold of it; 0 if none is."""
        opened, held = tuple(self._opened), self._held
        arguments: list[Any] = [self.gateway, int(LEASE_S * 1000), self._known_ms, len(opened), *opened]
        for name, (more, most) in caps.items():
            arguments += [held[name] + more, held[name], "" if most is None else most]
        keys = [f"{_PREFIX}gateways", f"{_PREFIX}opened", *(f"{_PREFIX}{name}" for name in caps)]
        full, others, self.gateways, now_ms, found = await self.call(lambda: self._script(keys=keys, args=arguments))
        self._opened.difference_update(opened)
        self._known_ms = str(now_ms)
        for url in {url.decode() for url in found}.difference(opened):
            self.suspect(url)
        return full, others


def _cancellations() -> int:
    """Return how often the current task was cancelled; 0 with Python 3.10, which does not tell."""
    task = asyncio.current_task()
    return task.cancelling() if sys.version_info >= (3, 11) and task is not None else 0


class GatewayCaps:
    """Caps of levels and classes over all gateways. own: those of this one; its hard limit is its own."""

    def __init__(self, own: Caps, state: SharedState) -> None:
        self._own, self._state = own, state
        self.fullness = own.fullness
        self._class_limits: Mapping[int, int] = {}

    @property
    def in_flight(self) -> int:
        return self._own.in_flight

    def change(self, class_limits: Mapping[int, int], pools: Collection[str]) -> None:
        self._class_limits = class_limits
        self._own.change(class_limits, pools)

    async def acquire(self, levels: Levels, priority: int, requests: int = 1, pool: str = "") -> Slot:
        slot = await self._own.acquire(levels, priority, requests, pool)
        found = caps(levels, priority, pool, self._class_limits)
        limited = {name: limit for name, limit in found.items() if limit is not None}
        if not limited:
            return slot
        try:
            await self._state.take(limited, requests)
        except BaseException:
            slot.release()
            raise

        def give_back() -> None:
            slot.release()
            self._state.give_back(limited, requests)

        return Slot(give_back)
