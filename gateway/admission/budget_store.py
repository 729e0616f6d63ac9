"""Where the buckets are: in this process, or in Redis or Valkey for many gateways.

Days and months outlive a restart, in Redis or in the usage database: a reservation is there before its request begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from contract import failpoint
from contract.background import Background
from contract.errors import Unavailable
from gateway.admission.budgets import Bucket, Demand, Reservation, Standing, demands
from gateway.config.tenant import Levels
from gateway.usage.store import UsageStore
from gateway.usage.writer import Writer

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

Clock = Callable[[], float]
# Longer than any request takes, queueing included; the caller passes the real bound.
LEASE_S = 900.0
_PURGE_EVERY = 1024  # reservations between two removals of idle buckets
_SETTLE_ATTEMPTS = 5  # while the gateway stops; else until the lease ends
_LONGEST_PAUSE_S = 2.0
_CONNECTIONS = 32
_AWAY_S = 2.0  # after a call that was not answered, in which no reservation is tried; then one is
_log = logging.getLogger(__name__)


class BudgetStore(Protocol):
    """Reserve, then settle."""

    async def reserve(self, levels: Levels, tokens: int, least: int | None = None, micros: int = 0) -> Reservation:
        """Reserve on every level, or on none. least, micros: as in ``budgets.demands``. Raises InvalidArgument if the
        least could never fit, and Unavailable if the reservation cannot be written."""

    def settle(self, reservation: Reservation, used: int, micros: int = 0) -> None:
        """Charge ``used`` tokens, and what they cost, and return the rest of the reservation: never blocks, and only
        once."""

    async def aclose(self) -> None:
        """Write all settlements."""


class MemoryStore:
    """Buckets of this process. ``clock``: seconds that never go back. wall: Unix time. database: keeps days and months;
    of two gateways with the same one the second raises InvalidArgument."""

    def __init__(
        self, clock: Clock, lease_s: float = LEASE_S, database: UsageStore | None = None, wall: Clock = time.time
    ) -> None:
        self._clock, self._wall = clock, wall
        self._lease_s = lease_s
        self._buckets: dict[str, Bucket] = {}
        self._reserved = 0
        self._writer: Writer[str] | None = None
        self._saved: dict[str, tuple[float, str]] = {}
        if database is not None:
            self._lock = database.lock()
            self._saved = database.budgets()
            self._writer = Writer(self._rows, database.put_budgets)

    async def reserve(self, levels: Levels, tokens: int, least: int | None = None, micros: int = 0) -> Reservation:
        reservation = self.try_reserve(levels, tokens, least, micros)
        if self._writer is not None and any(standing.demand.left_s for standing in reservation.standings):
            try:
                await self._writer.commit()
            except BaseException:
                self.settle(reservation, 0)
                raise
        return reservation

    def try_reserve(self, levels: Levels, tokens: int, least: int | None = None, micros: int = 0) -> Reservation:
        now_s, at_s = self._clock(), self._wall()
        required = demands(levels, tokens, least, micros, at_s)
        self._forget_idle(now_s)
        for demand in required:
            bucket = self._buckets.get(demand.bucket) or self._made(demand, now_s, at_s)
            bucket.refill(demand, now_s)
        granted = all(demand.soft or self._buckets[demand.bucket].balance >= demand.amount for demand in required)
        reservation_id = secrets.token_hex(8)
        if granted:
            for demand in required:
                self._buckets[demand.bucket].take(reservation_id, demand, now_s + self._lease_s)
                self._note(demand)
        standings = tuple(Standing(demand, self._buckets[demand.bucket].balance) for demand in required)
        return Reservation(reservation_id, granted, standings)

    def settle(self, reservation: Reservation, used: int, micros: int = 0) -> None:
        now_s = self._clock()
        for standing in reservation.standings if reservation.granted else ():
            bucket = self._buckets.get(standing.demand.bucket)
            if standing.demand.held and bucket is not None:
                bucket.refill(standing.demand, now_s)
                bucket.settle(reservation.id, standing.demand.of(used, micros))
                self._note(standing.demand)

    async def aclose(self) -> None:
        if self._writer is not None:
            await self._writer.aclose()
            os.close(self._lock)

    def _made(self, demand: Demand, now_s: float, at_s: float) -> Bucket:
        """Return the bucket of a demand, new or as it was written."""
        made = self._buckets[demand.bucket] = Bucket(demand.capacity, demand.capacity, now_s)
        if demand.left_s:
            made.ends_s = now_s + demand.left_s
            spent, leases = self._saved.pop(demand.bucket, (0, "{}"))
            for reservation_id, (amount, until_s) in json.loads(leases).items():
                made.leases[reservation_id] = (amount, until_s - at_s + now_s)
                made.held += amount
            made.balance -= spent + made.held
        return made

    def _note(self, demand: Demand) -> None:
        if self._writer is not None and demand.left_s:
            self._writer.add(demand.bucket)

    def _rows(self, names: Iterable[str]) -> list[tuple[str, float, float, str]]:
        """Return what is written of days and months that were not forgotten since; its clock is the wall's."""
        rows, later_s = [], self._wall() - self._clock()
        for name in self._buckets.keys() & set(names):
            bucket = self._buckets[name]
            leases = {one: (amount, until_s + later_s) for one, (amount, until_s) in bucket.leases.items()}
            spent = bucket.capacity - bucket.balance - bucket.held
            rows.append((name, bucket.ends_s + later_s, spent, json.dumps(leases)))
        return rows

    def _forget_idle(self, now_s: float) -> None:
        self._reserved += 1
        if self._reserved % _PURGE_EVERY == 0:
            for name in [name for name, bucket in self._buckets.items() if bucket.is_idle(now_s)]:
                del self._buckets[name]


# The bucket of budgets.py in Lua. KEYS: for each bucket a hash (balance, held, at) and a sorted set of its leases
# ("id:amount" by expiry). ARGV: now ("" for the server's own clock, which all gateways share), lease in seconds, id,
# 1 to settle, then rate, capacity, amount, held (1 or 0), what was used, seconds left of a day or month, and soft (1 or
# 0) of each bucket.
_SCRIPT = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local lease, id, settles = tonumber(ARGV[2]), ARGV[3], ARGV[4] == '1'
local function text(number) return string.format('%.17g', number) end
local buckets, granted = {}, 1
for i = 1, #KEYS / 2 do
  local b = {hash = KEYS[2 * i - 1], leases = KEYS[2 * i]}
  local a = 7 * i - 3
  b.rate, b.capacity, b.amount = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3])
  b.holds, b.used = ARGV[a + 4] == '1', tonumber(ARGV[a + 5])
  b.left, b.soft = tonumber(ARGV[a + 6]), ARGV[a + 7] == '1'
  local stored = redis.call('HMGET', b.hash, 'balance', 'held', 'at', 'capacity')
  b.balance = tonumber(stored[1]) or b.capacity
  if b.left > 0 then b.balance = b.balance + b.capacity - (tonumber(stored[4]) or b.capacity) end
  b.held = tonumber(stored[2]) or 0
  b.at = tonumber(stored[3]) or now
  local function refill(till)
    b.balance = math.min(b.capacity - b.held, b.balance + b.rate * math.max(0, till - b.at))
    b.at = math.max(b.at, till)
  end
  local over = redis.call('ZRANGEBYSCORE', b.leases, '-inf', text(now), 'WITHSCORES')
  for j = 1, #over, 2 do
    refill(tonumber(over[j + 1]))
    b.held = b.held - tonumber(string.match(over[j], ':(.*)$'))
    redis.call('ZREM', b.leases, over[j])
  end
  refill(now)
  if not settles and not b.soft and b.balance < b.amount then granted = 0 end
  buckets[i] = b
end
local answer = {granted}
for i, b in ipairs(buckets) do
  local member = id .. ':' .. text(b.amount)
  if settles then
    if b.holds and redis.call('ZREM', b.leases, member) == 1 then
      b.held = b.held - b.amount
      b.balance = math.min(b.capacity - b.held, b.balance + b.amount - b.used)
    end
  elseif granted == 1 then
    b.balance = b.balance - b.amount
    if b.holds then
      b.held = b.held + b.amount
      redis.call('ZADD', b.leases, text(now + lease), member)
    end
  end
  redis.call('HSET', b.hash, 'balance', text(b.balance), 'held', text(b.held), 'at', text(b.at),
    'capacity', text(b.capacity))
  -- A missing bucket counts as full: it may expire when it would be full and no lease is left, or its day is over.
  local life = b.left > 0 and b.left + lease or math.max(lease, (b.capacity - b.balance) / b.rate)
  life = math.ceil(life) + 60
  redis.call('EXPIRE', b.hash, life)
  redis.call('EXPIRE', b.leases, life)
  answer[i + 1] = text(b.balance)
end
return answer
"""


def connect(url: str, timeout_s: float = 2.0) -> Redis:
    """Return a client that repeats no call: ``redis://HOST:PORT/0``, ``rediss://…`` or ``unix:///PATH``. Callers beyond
    _CONNECTIONS wait for one instead of opening their own."""
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.maint_notifications import MaintNotificationsConfig

    limits = {"timeout": 2.5 * timeout_s, "socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    # With these notifications, of Redis Enterprise, the pool gives out connections that the server has closed.
    none = {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}
    return Redis.from_pool(BlockingConnectionPool.from_url(url, max_connections=_CONNECTIONS, **limits, **none))


class RedisStore:
    """Buckets that many gateways share: one script call, which Redis runs as a whole. A settlement that cannot be
    written is tried again until its lease expires: then all of it counts as used. clock: by default the server's."""

    def __init__(
        self, redis: Redis, clock: Clock | None = None, lease_s: float = LEASE_S, wall: Clock = time.time
    ) -> None:
        self._run = redis.register_script(_SCRIPT)
        self._clock, self._wall = clock, wall
        self._lease_s = lease_s
        self._writing = Background()
        self._stopping = asyncio.Event()
        self._away_until_s = 0.0  # 0: the latest call was answered
        self._unsettled: set[str] = set()  # two settlements of one reservation might overtake each other on the way

    async def reserve(self, levels: Levels, tokens: int, least: int | None = None, micros: int = 0) -> Reservation:
        """Reserve as BudgetStore does; raises Unavailable if the store cannot be reached."""
        from redis.exceptions import RedisError
        from redis.exceptions import TimeoutError as NotAnswered

        required = demands(levels, tokens, least, micros, self._wall())
        reservation_id = secrets.token_hex(8)
        if not required:
            return Reservation(reservation_id, True)
        if self._away_until_s:
            if time.monotonic() < self._away_until_s:
                raise Unavailable("the budget store does not answer", 1.0)
            self._away_until_s = time.monotonic() + _AWAY_S  # the others do not wait for this one
        pending = Reservation(reservation_id, True, tuple(Standing(demand, 0.0) for demand in required))
        call = asyncio.ensure_future(self._call(pending, None))
        try:
            # Shielded: on cancellation it is unknown whether the reservation was made.
            granted, *balances = await asyncio.shield(call)
        except asyncio.CancelledError:
            self._writing.start(self._undo(call, pending))
            raise
        except RedisError as exc:
            _log.warning("the budget store does not answer: %s", exc)  # callers need not know where it is
            if isinstance(exc, NotAnswered):
                self._away_until_s = time.monotonic() + _AWAY_S
            if _may_run(exc):
                self._writing.start(self._undo(call, pending))
            raise Unavailable("the budget store does not answer", 1.0) from exc
        standings = tuple(Standing(demand, float(left)) for demand, left in zip(required, balances, strict=True))
        if granted == 1 and any(demand.held for demand in required):
            self._unsettled.add(reservation_id)
        return Reservation(reservation_id, granted == 1, standings)

    def settle(self, reservation: Reservation, used: int, micros: int = 0) -> None:
        if reservation.id in self._unsettled:
            self._unsettled.remove(reservation.id)
            self._writing.start(self._settle(reservation, used, micros))

    async def settle_for_other(self, reservation: Reservation, used: int, micros: int) -> None:
        """Settle the reservation of a gateway that is gone; return when it is written, or Redis is away."""
        await asyncio.wait((self._writing.start(self._settle(reservation, used, micros)),), timeout=_AWAY_S)

    async def aclose(self) -> None:
        self._stopping.set()
        await self._writing.done()

    async def _undo(self, call: asyncio.Future, pending: Reservation) -> None:
        await asyncio.wait((call,))  # settling a reservation that was not made does nothing
        await self._settle(pending, 0)
        if call.cancelled() or call.exception() is not None:  # the reservation may have come after the settlement
            await self._pause(_LONGEST_PAUSE_S)
            await self._settle(pending, 0)

    async def _settle(self, reservation: Reservation, used: int, micros: int = 0) -> None:
        from redis.exceptions import RedisError

        until_s, attempt = time.monotonic() + self._lease_s, 0
        while time.monotonic() < until_s and (attempt < _SETTLE_ATTEMPTS or not self._stopping.is_set()):
            try:
                await self._call(reservation, (used, micros))
                return
            except RedisError as exc:
                attempt += 1
                _log.warning("a settlement could not be written, attempt %d: %s", attempt, exc)
                await self._pause(min(0.1 * 2 ** min(attempt, 8), _LONGEST_PAUSE_S))

    async def _pause(self, seconds: float) -> None:
        """Wait so long, or a tenth of it where the gateway stops."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
            await asyncio.sleep(seconds / 10)

    async def _call(self, reservation: Reservation, used: tuple[int, int] | None) -> list:
        required = [standing.demand for standing in reservation.standings]
        keys = [key for demand in required for key in self._keys(demand.bucket, demand.level)]
        now = "" if self._clock is None else repr(self._clock())
        arguments: list = [now, self._lease_s, reservation.id, int(used is not None)]
        for demand in required:
            arguments += [repr(demand.rate_per_s), demand.capacity, demand.amount, int(demand.held)]
            arguments += [demand.of(*(used or (0, 0))), demand.left_s, int(demand.soft)]
        if failpoint.value("redis.away") is not None:
            from redis.exceptions import ConnectionError

            raise ConnectionError("failpoint redis.away")
        answer = await self._run(keys=keys, args=arguments)
        self._away_until_s = 0.0
        return answer

    def _keys(self, bucket: str, level: str) -> tuple[str, str]:
        # The organisation in braces: a cluster then keeps all levels of one on one node, where one script sees them.
        organisation = level.partition(" ")[0].partition("/")[0]
        name = f"trident:{{{organisation}}}:{bucket}"
        return name, f"{name}:leases"


def _may_run(error: RedisError) -> bool:
    """Return whether a call that failed so may have been executed, or may be later: it was sent, and not answered."""
    from redis.exceptions import ConnectionError as NotConnected
    from redis.exceptions import TimeoutError as NotAnswered

    broke = error.__context__ is None or isinstance(error.__context__, (ConnectionResetError, BrokenPipeError))
    return isinstance(error, NotAnswered) or (type(error) is NotConnected and broke)
