"""A worker's side of ``hub``: caps, budgets and slots that the workers of one gateway share, and what they tell each
other. Messages are pickled and go over a socket pair that no one else has."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import secrets
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

from contract.errors import DeadlineExceeded, Overloaded, TridentError, Unavailable
from gateway.admission.budgets import Reservation, demands
from gateway.admission.concurrency import Slot
from gateway.admission.pool_slots import Claim, PoolSlots
from gateway.admission.sharing import UNKNOWN, Capacity
from gateway.config.policy import AdmissionRules
from gateway.config.tenant import Levels

REPORT_S = 1.0
STOPPING = "the gateway is stopping"
_LENGTH = struct.Struct("<I")


class Frames(asyncio.Protocol):
    """One end of a connection. received: gets the parts of each message. lost: called once, when the other end is
    gone."""

    def __init__(self, received: Callable[..., None], lost: Callable[[], None]) -> None:
        self._received, self._lost = received, lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    async def connect(self, end: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            message = pickle.loads(memoryview(self._buffer)[_LENGTH.size : end])  # noqa: S301 - from our own process
            del self._buffer[:end]
            self._received(*message)

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, *message: Any) -> None:
        """Send a message; nothing once the other end is gone."""
        if self._transport is not None and self.open:
            data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class HubLink:
    """A worker's connection, made before its Service; ``start`` it on the loop that serves.

    number: of the worker. end: of a socket pair whose other end the hub has. folder: of the gateway's sockets.
    reported: see Replicas.reported. lost: called when the parent is gone.
    """

    def __init__(self, number: int, end: socket.socket, folder: Path) -> None:
        self.number, self._end, self.folder = number, end, folder
        self.reported: Callable[[], Mapping[str, tuple[Capacity, float]]] = dict
        self.lost: Callable[[], None] = lambda: None
        self.frames = Frames(self._received, self._lost)
        self.fullness: dict[str, float] = {}
        self.claims: dict[int, _SharedClaim] = {}
        self.topics: dict[str, Callable[..., object]] = {}
        self._slots: dict[str, SharedSlots] = {}
        self._calls: dict[int, asyncio.Future] = {}
        self.numbers = itertools.count()
        self._sent: dict[str, Capacity] = {}
        self._sent_s = 0.0

    async def start(self) -> None:
        await self.frames.connect(self._end)

    def close(self) -> None:
        self.lost = lambda: None
        self.frames.close()

    def slots(self, *parts: Any, **named: Any) -> SharedSlots:
        """Return the slots of a pool; see PoolSlots."""
        made = SharedSlots(self, *parts, **named)
        return self._slots.setdefault(made.name, made)

    def check(self, now_s: float) -> None:
        """Report the pools: changed slots at once, requests every second."""
        due = now_s - self._sent_s >= REPORT_S
        for pool, (alone, requests) in self.reported().items():
            sent = self._sent.get(pool)
            if due or sent is None or (sent.slots, sent.hold_s) != (alone.slots, alone.hold_s):
                self._sent[pool] = alone
                self.frames.send("report", pool, alone, requests)
        self._sent_s = now_s if due else self._sent_s

    def change(self, rules: AdmissionRules, pools: tuple[str, ...]) -> None:
        """Tell the hub new rules, which hold for all workers, and the pools there are."""
        self.frames.send("rules", rules, pools)

    def publish(self, topic: str, *message: Any) -> None:
        """Call ``topics[topic]`` in all other workers."""
        self.frames.send("publish", topic, *message)

    async def call(self, undo: Callable[[int, Any], None], kind: str, *parts: Any) -> tuple[int, Any]:
        """Return the number of the call and the hub's answer. undo: called with both where the caller was cancelled.
        Raises: Unavailable if the parent is gone."""
        if not self.frames.open:
            raise Unavailable(STOPPING, 1.0)
        number = next(self.numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self.frames.send(kind, number, *parts)
        try:
            return number, await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(lambda done: None if done.exception() else undo(number, done.result()))
            raise

    def _received(self, kind: str, *parts: Any) -> None:
        getattr(self, f"on_{kind}")(*parts)

    def _lost(self) -> None:
        for answer in self._calls.values():
            answer.set_exception(Unavailable(STOPPING, 1.0))
        self._calls.clear()
        self.lost()

    def on_reply(self, number: int, answer: Any) -> None:
        self._calls.pop(number).set_result(answer)

    def on_given(self, number: int) -> None:
        if number in self.claims:
            self.claims[number]._given(False)

    def on_failed(self, number: int, error: Overloaded | DeadlineExceeded) -> None:
        if number in self.claims:
            claim = self.claims[number]
            claim.fail(claim.pool._refused(error))

    def on_published(self, topic: str, *message: Any) -> None:
        if topic in self.topics:  # else this worker still starts
            with contextlib.suppress(TridentError):  # told to the worker that published it
                self.topics[topic](*message)

    def on_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for name, pool in state.items():
            self.fullness[name] = pool["fullness"]
            if name in self._slots:
                self._slots[name].mirror(pool)


class SharedCaps:
    """The caps of all workers; see Concurrency. The hub has its rules from ``HubLink.change``."""

    def __init__(self, link: HubLink) -> None:
        self._link = link
        self.in_flight = 0

    def change(self, class_limits: Mapping[int, int], pools: Collection[str]) -> None:
        pass

    def fullness(self, pool: str) -> float:
        return self._link.fullness.get(pool, 0.0)

    async def acquire(self, levels: Levels, priority: int, requests: int = 1, pool: str = "") -> Slot:
        link = self._link
        capped = tuple(level for level in levels if level.limits.max_in_flight is not None)

        def undo(number: int, answer: Any) -> None:
            link.frames.send("release", number)

        number, error = await link.call(undo, "acquire", capped, priority, requests, pool)
        if error is not None:
            raise error
        self.in_flight += requests

        def give_back() -> None:
            self.in_flight -= requests
            link.frames.send("release", number)

        return Slot(give_back)


class SharedBudgets:
    """The budgets of all workers; see BudgetStore."""

    def __init__(self, link: HubLink) -> None:
        self._link = link

    async def reserve(self, levels: Levels, tokens: int, least: int | None = None, micros: int = 0) -> Reservation:
        if not demands(levels, tokens, least, micros):
            return Reservation(secrets.token_hex(8), True)

        def undo(number: int, answer: Any) -> None:
            if not isinstance(answer, TridentError):
                self.settle(answer, 0)

        _, answer = await self._link.call(undo, "reserve", levels, tokens, least, micros)
        if isinstance(answer, TridentError):
            raise answer
        return answer

    def settle(self, reservation: Reservation, used: int, micros: int = 0) -> None:
        if reservation.standings:
            self._link.frames.send("settle", reservation, used, micros)

    async def aclose(self) -> None:
        return None


class SharedSlots(PoolSlots):
    """The slots of one pool, as of the hub's latest message; claims are the hub's."""

    capacity: Capacity = UNKNOWN
    drain_tokens_per_s: float = 0.0

    def __init__(self, link: HubLink, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self.link = link

    def mirror(self, state: Mapping[str, Any]) -> None:
        self.queue.mirror(state["queue"])
        vars(self).update({name: value for name, value in state.items() if name != "queue"})

    def dispatch(self) -> None:
        """Nothing: the hub does."""

    def claim(self, entry: Any, lasts_until_s: float) -> Claim:
        claim, link = _SharedClaim(self, entry, lasts_until_s), self.link
        claim.number = next(link.numbers)
        link.claims[claim.number] = claim
        link.frames.send("claim", claim.number, self.name, entry, lasts_until_s)
        return claim


class _SharedClaim(Claim):
    """A claim of the hub's."""

    number: int
    pool: SharedSlots

    def release(self, number: int) -> None:
        if self._held.pop(number, None) is not None:
            self.pool.link.frames.send("free", self.number, number)

    def close(self, used_tokens: float) -> None:
        if not self._closed:
            self._closed = True
            self.pool.link.claims.pop(self.number, None)
            self.pool.link.frames.send("close", self.number, used_tokens)
