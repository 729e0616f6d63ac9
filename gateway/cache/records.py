"""Idempotent streams in Redis, where another gateway finds them: to replay, to follow, or to go on with.

The gateway that generates a stream writes every delta, under a lease, before its client gets it. When the lease ends,
one gateway that has a reader for it takes the stream over and continues behind the recorded ids (docs/decisions/0032).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from contract.background import Background
from contract.errors import Unavailable
from contract.generation import GenerationRequest, Usage
from gateway.admission.budgets import Reservation
from gateway.admission.prompt_tokens import prompt_of
from gateway.admission.shared_state import Away, SharedState
from gateway.cache.coalescing import MAX_BYTES, RESUME_HEADER
from gateway.cache.response_cache import Answer, is_complete
from gateway.choices import ChoiceDelta, ChoiceDeltas, total
from gateway.continuation import Continuation, needs_seed

LEASE_S = 5.0
RENEW_S = 1.0
POLL_S = 0.05  # how often a stream of another gateway is read
RUNNING_S = 3600.0  # how long a stream is kept that is not complete
AWAY_S = 30.0  # how long a reader waits for Redis
_ITEM: TypeAdapter[ChoiceDelta] = TypeAdapter(ChoiceDelta)
_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# KEYS of all: the record (request, owner, ends: of its lease, head, complete, charged and settled: see Record) and its
# items.
# ARGV: request, owner, lease in ms, life in ms.
_CLAIM = f"""{_NOW}
local found = redis.call('HMGET', KEYS[1], 'request', 'ends', 'complete')
local state = 'lost'
if not found[1] then
  redis.call('DEL', KEYS[2])
  state = 'new'
elseif found[1] ~= ARGV[1] then return 'different'
elseif found[3] or tonumber(found[2]) > now then return 'kept' end
redis.call('HSET', KEYS[1], 'request', ARGV[1], 'owner', ARGV[2], 'ends', now + ARGV[3])
for i = 1, 2 do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
return state
"""
# ARGV: owner, lease in ms, life in ms, number of the first item, how many field arguments, fields, items.
_WRITE = f"""{_NOW}
local owner = redis.call('HGET', KEYS[1], 'owner')
if not owner then return 2 end
if owner ~= ARGV[1] then return 0 end
local written = redis.call('LLEN', KEYS[2]) - ARGV[4]
if written < 0 then return 2 end
redis.call('HSET', KEYS[1], 'ends', now + ARGV[2])
local fields = tonumber(ARGV[5])
for i = 6, 5 + fields, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
for i = 6 + fields + written, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
for i = 1, 2 do redis.call('PEXPIRE', KEYS[i], ARGV[3]) end
return 1
"""
# ARGV: number of the first item.
_READ = f"""{_NOW}
local found = redis.call('HMGET', KEYS[1], 'head', 'complete', 'ends', 'charged', 'settled')
if not found[3] then return {{}} end
local lives = tonumber(found[3]) > now and 1 or 0
local items = redis.call('LRANGE', KEYS[2], ARGV[1], ARGV[1] + 999)
local charged, settled = tonumber(found[4] or 0), tonumber(found[5] or 0)
return {{found[1] or '', found[2] and 1 or 0, lives, charged, settled, unpack(items)}}
"""
_DELETE = "if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2]) end"


class SharedAnswers:
    """Complete responses of all gateways with this ``ttl_s``, each until it is so old. A key names its tenant."""

    def __init__(self, state: SharedState, ttl_s: float) -> None:
        self._state, self._life_ms = state, int(ttl_s * 1000)

    async def get(self, key: str, max_age_s: float) -> Answer | None:
        """Return the deltas as the engine sent them; None if there are none, or Redis is away."""
        with contextlib.suppress(Away):
            reading = self._state.redis.pipeline(transaction=False)
            reading.get(self._name(key))
            reading.pttl(self._name(key))
            text, left_ms = await self._state.call(reading.execute)
            if text is not None and self._life_ms - left_ms <= 1000 * max_age_s:
                return tuple(decode(line).delta for line in text.splitlines())
        return None

    async def put(self, key: str, answer: Answer) -> None:
        """Store a complete response of at most MAX_BYTES."""
        text = "\n".join(encode(ChoiceDelta(0, delta)) for delta in answer)
        if is_complete(answer) and len(text) <= MAX_BYTES:
            with contextlib.suppress(Away):
                await self._state.call(lambda: self._state.redis.set(self._name(key), text, px=self._life_ms))

    def _name(self, key: str) -> str:
        # The age of an answer follows from the life it was stored with.
        return f"trident:answer:{self._life_ms}:{key}"


def encode(item: ChoiceDelta) -> str:
    # Python's own JSON has infinite log probabilities and lone surrogates, which pydantic's has not.
    return json.dumps(_ITEM.dump_python(item, exclude_defaults=True))


def decode(text: bytes) -> ChoiceDelta:
    return _ITEM.validate_python(json.loads(text))


@dataclass(frozen=True)
class Head:
    """What a response is sent with, beside its deltas. engine: that generates it."""

    headers: Mapping[str, str]
    request_id: str
    created_s: int
    engine: str
    reservation: Reservation | None = None


HEAD = TypeAdapter(Head)  # for its JSON


@dataclass(eq=False)
class Record:
    """One stream in Redis. owned: it is written here. lost: another gateway has taken it over. items: read so far.

    charged: the choices that ended in so many items were charged when it was taken over from a gateway that died.
    settled: so many items are charged, with their prompts, by gateways that released it.
    head: as it was written here, with the reservation that this gateway settles; None if it was not.
    """

    records: Records
    keys: list[str]
    request: str
    owned: bool = False
    lost: bool = False
    items: list[ChoiceDelta] = field(default_factory=list)
    charged: int = 0
    settled: int = 0
    head: Head | None = None
    _owner: str = field(default_factory=lambda: secrets.token_hex(8))
    _pending: list[str] = field(default_factory=list)
    _fields: list[str] = field(default_factory=list)
    _count: int = 0  # items there are in Redis
    _size: int = 0
    _written_s: float = 0.0
    _ended_s: float = 0.0  # complete or released, which may not be written yet; 0: it is generated
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def claim(self) -> str:
        """Return what there is: ``new`` and ``lost`` are this gateway's now, ``kept`` is complete or another's,
        ``different`` has the same key. Raises Away."""
        lease = (int(LEASE_S * 1000), int(RUNNING_S * 1000))
        state = (await self.records.run(_CLAIM, self.keys, self.request, self._owner, *lease)).decode()
        self.owned = state in ("new", "lost")
        if self.owned:
            self.records.own(self)
        return str(state)

    async def read(self) -> tuple[Head | None, bool, bool] | None:
        """Add new items; return the head, whether the stream is complete, whether its gateway lives; None if it is
        gone. Raises Away."""
        while found := await self.records.run(_READ, self.keys, len(self.items)):
            head, complete, lives, self.charged, self.settled, *items = found
            self.items += map(decode, items)
            self._count = len(self.items)
            if len(items) < 1000:
                return HEAD.validate_json(head) if head else None, bool(complete), bool(lives)
        return None

    async def write(self, *fields: str) -> None:
        """Write the fields, by name and value, and all that is not written yet; later if Redis is away."""
        self._fields += fields
        async with self._writing:
            if not self.owned:
                return
            batch, named = len(self._pending), list(self._fields)
            lease_s = 0 if self._ended_s else LEASE_S
            life_s = self.records.ttl_s if "complete" in named else RUNNING_S
            terms = (self._owner, int(lease_s * 1000), int(life_s * 1000), self._count, len(named))
            self._written_s = time.monotonic()
            try:
                kept = await self.records.run(_WRITE, self.keys, *terms, *named, *self._pending)
            except Away:
                return
            del self._pending[:batch], self._fields[: len(named)]
            self._count += batch
            self.lost = not kept  # 2: a Redis that lost its data; the stream goes on here and is read here only
            if kept != 1 or self._ended_s:
                self.disown()

    async def generate(self, deltas: ChoiceDeltas) -> AsyncGenerator[ChoiceDelta, None]:
        """Pass on the deltas, each after it is written, and then the end."""
        try:
            async for item in deltas:
                if self.owned:
                    text = encode(item)
                    self._pending.append(text)
                    self._size += len(text)
                    await self.write()
                    if self._size > MAX_BYTES:  # it cannot be replayed as a whole, as in the memory of one gateway
                        await self.delete()
                if self.lost:
                    raise Unavailable(f"another gateway goes on with this stream; resume it with {RESUME_HEADER}", 1.0)
                yield item
            self._ended_s = time.monotonic()
            await self.write("complete", "1")
        except (asyncio.CancelledError, GeneratorExit):
            await self.release()
            raise
        except BaseException:
            await (self.release() if self.records.draining() else self.delete())
            raise
        finally:
            await deltas.aclose()

    async def write_head(self, head: Head) -> None:
        """Write the head of what is generated here."""
        self.head = head
        await self.write("head", HEAD.dump_json(head).decode())

    async def release(self) -> None:
        """Let another gateway go on at once. This one settles its reservation, and so all items."""
        self._ended_s = time.monotonic()
        fields: tuple[str, ...] = ()
        if self.head is not None:
            head = HEAD.dump_json(dataclasses.replace(self.head, reservation=None)).decode()
            fields = "head", head, "settled", str(self._count + len(self._pending))
        await self.write(*fields)

    async def delete(self) -> None:
        """Forget the stream, so that the next request with its key is a new one."""
        if self.owned:
            self.disown()
            with contextlib.suppress(Away):
                await self.records.run(_DELETE, self.keys, self._owner)

    def leave(self) -> None:
        """Renew it no more, unless only its end or release is not written yet."""
        if not self._ended_s:
            self.disown()

    def disown(self) -> None:
        self.owned = False
        self.records.owned.discard(self)

    async def renew(self, now_s: float) -> None:
        if self._ended_s and now_s - self._ended_s > self.records.ttl_s:
            self.disown()
        elif now_s - self._written_s >= RENEW_S:
            await self.write()


class Records:
    """The records of one gateway. ttl_s: of complete ones. draining: whether this gateway is about to end."""

    def __init__(self, state: SharedState, ttl_s: float, draining: Callable[[], bool]) -> None:
        self._state, self.ttl_s, self.draining = state, ttl_s, draining
        self.owned: set[Record] = set()
        self._renewing = Background()

    def record(self, tenant: str, key: str, request: str) -> Record:
        """Return the record of a tenant's key, which names neither. request: digest of what is requested."""
        name = hashlib.sha256(json.dumps([tenant, key]).encode()).hexdigest()
        return Record(self, [f"trident:stream:{{{name}}}", f"trident:stream:{{{name}}}:items"], request)

    async def run(self, script: str, keys: Sequence[str], *arguments: Any) -> Any:
        registered = self._state.redis.register_script(script)
        return await self._state.call(lambda: registered(keys=keys, args=arguments))

    def own(self, record: Record) -> None:
        self.owned.add(record)
        if not len(self._renewing):
            self._renewing.start(self._renew())

    async def aclose(self) -> None:
        await self._renewing.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S / 2)
            await asyncio.gather(*(record.renew(time.monotonic()) for record in tuple(self.owned)))


def unfinished(
    items: Sequence[ChoiceDelta], requests: Sequence[GenerationRequest], continuations: int
) -> dict[int, GenerationRequest] | None:
    """Return the requests that go on behind ``items``, by choice; None if one cannot go on exactly."""
    states = [Continuation(continuations) for _ in requests]
    ended = set()
    for choice, delta in items:
        states[choice].observe(delta)
        if delta.finish_reason is not None:
            ended.add(choice)
    left = {number: request for number, request in enumerate(requests) if number not in ended}
    if not all(states[number].allows(request) for number, request in left.items()):
        return None
    return {number: states[number].request(request) for number, request in left.items()}


def unpaid(
    record: Record, requests: Sequence[GenerationRequest], left: Iterable[int]
) -> tuple[Usage | None, tuple[int | None, ...]]:
    """Return what the choices that ended are still to be charged, and for each choice that is ``left`` how many tokens
    of its output are paid for, along with its prompt; None if neither is."""
    prompts, left = [id(prompt_of(request)) for request in requests], tuple(left)
    paid, begun = [0 for _ in requests], set()
    for choice, delta in record.items[: record.settled]:
        paid[choice] += len(delta.token_ids) - delta.prompt_ids
        if delta.token_ids or delta.finish_reason:
            begun.add(prompts[choice])
    elsewhere, owed = begun.union(prompts[choice] for choice in left), dict[int, Usage]()
    for choice, delta in record.items[max(record.charged, record.settled) :]:
        if (used := delta.usage) is not None:
            used = Usage(0, used.output_tokens) if prompts[choice] in elsewhere else used
            owed[choice] = dataclasses.replace(used, output_tokens=used.output_tokens - paid[choice])
    due = total(list(owed.values()), [prompts[choice] for choice in owed])
    return due, tuple(paid[choice] if prompts[choice] in begun else None for choice in left)


def seeded(request: GenerationRequest, record: Record, choice: int) -> GenerationRequest:
    """Return a sampled request with a seed that every gateway knows, where going on may need one."""
    if not needs_seed(request):
        return request
    seed = int.from_bytes(hashlib.sha256(f"{record.keys[0]} {record.request} {choice}".encode()).digest()[:8], "big")
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=seed))


async def renumbered(deltas: ChoiceDeltas, choices: Sequence[int]) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield the deltas of some choices of a response under their numbers in it."""
    async with contextlib.aclosing(deltas):
        async for choice, delta in deltas:
            yield ChoiceDelta(choices[choice], delta)
