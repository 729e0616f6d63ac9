"""What to do when something happens to the server: a pure function over what happened before.

Nothing here reads a clock, a process or a socket; ``now_s`` is any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

# A server that fails to start so often in a row will not start.
FAILED_STARTS = 3
# One that dies sooner than this after it was ready died quickly; so many quick deaths in a row are enough.
QUICK_S = 10.0
QUICK_DEATHS = 20
# Canaries that fail in a row without an excuse.
STRIKES = 3
LONGEST_BACKOFF_S = 5.0


class State(str, Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True)
class Record:
    """What the supervisor remembers. restarts and revivals count since its start, the rest in a row."""

    state: State = State.STARTING
    since_s: float = 0.0
    reason: str = ""
    restarts: int = 0
    revivals: int = 0
    failed_starts: int = 0
    quick_deaths: int = 0
    strikes: int = 0


@dataclass(frozen=True)
class BecameReady:
    """A canary came through a server that was starting, restarting or being revived."""


@dataclass(frozen=True)
class StartFailed:
    """The server ended, or showed no token in time, before it was ready.

    crashed: by a signal. tritonserver 2.51 aborts when a starved machine keeps a stub from its locks for seconds, so
    that is worth another try; what it refuses to load once it will refuse again.
    """

    reason: str
    crashed: bool = False


@dataclass(frozen=True)
class ServerExited:
    """tritonserver ended although nobody asked it to."""

    code: int


@dataclass(frozen=True)
class StubDied:
    """A stub process of ``model`` ended. ``streams``: streams in flight cannot go on without it."""

    model: str
    streams: bool


@dataclass(frozen=True)
class StubHung:
    """A stub process of ``model`` exists but does nothing any more. ``streams``: as for StubDied."""

    model: str
    streams: bool
    reason: str


@dataclass(frozen=True)
class EngineHung:
    """The engine process made no step although it had work, and its stub killed it and ended its streams."""

    reason: str


@dataclass(frozen=True)
class ServerHung:
    """tritonserver exists but does not answer any more."""

    reason: str


@dataclass(frozen=True)
class RevivalFailed:
    model: str
    reason: str


@dataclass(frozen=True)
class CanaryPassed:
    """Or was refused by, or slow in, a full server that answers others."""


@dataclass(frozen=True)
class CanaryFailed:
    reason: str


@dataclass(frozen=True)
class StopAsked:
    """By a signal, or because the command that was served has ended."""

    reason: str


Event = (
    BecameReady
    | StartFailed
    | ServerExited
    | StubDied
    | StubHung
    | EngineHung
    | ServerHung
    | RevivalFailed
    | CanaryPassed
    | CanaryFailed
    | StopAsked
)


@dataclass(frozen=True)
class Nothing:
    pass


@dataclass(frozen=True)
class Restart:
    """Kill whatever is left of the server, start a new one after ``delay_s``.

    farewell: what streams still in flight are told in band before; "" if nobody is left who could tell them.
    """

    delay_s: float
    farewell: str = ""


@dataclass(frozen=True)
class Revive:
    """Unload and load ``model``; the rest of the server goes on."""

    model: str


@dataclass(frozen=True)
class GiveUp:
    pass


@dataclass(frozen=True)
class Drain:
    pass


Action = Nothing | Restart | Revive | GiveUp | Drain


def decide(record: Record, event: Event, now_s: float) -> tuple[Record, Action]:
    """The record after ``event``, and what to do about it. ``record.reason`` says it in one sentence."""
    if record.state in (State.DRAINING, State.FAILED):
        return record, Nothing()
    if isinstance(event, BecameReady):
        return replace(record, state=State.READY, since_s=now_s, reason="", failed_starts=0, strikes=0), Nothing()
    if isinstance(event, StopAsked):
        return replace(record, state=State.DRAINING, since_s=now_s, reason=event.reason), Drain()
    if isinstance(event, CanaryPassed):
        return replace(record, strikes=0), Nothing()
    if isinstance(event, CanaryFailed):
        return _strike(record, event, now_s)
    if isinstance(event, StubDied):
        return _bury_stub(record, event, now_s)
    if isinstance(event, StubHung):
        return _replace_stub(record, event, now_s)
    if isinstance(event, EngineHung):
        record, action = _restart(record, f"{event.reason}; restarting the server", now_s)
        return record, replace(action, farewell=event.reason) if isinstance(action, Restart) else action
    if isinstance(event, ServerHung):
        return _restart(record, f"tritonserver hangs ({event.reason}); restarting it", now_s)
    if isinstance(event, StartFailed):
        return _retry_start(record, event, now_s)
    if isinstance(event, RevivalFailed):
        return _restart(record, f"the {event.model} did not come back ({event.reason}); restarting the server", now_s)
    return _restart(record, f"tritonserver ended with {ending(event.code)}; restarting it", now_s)


def ending(code: int) -> str:
    """``code`` as a shell has it: 137 → "signal 9", 1 → "code 1"."""
    return f"signal {code - 128}" if code > 128 else f"code {code}"


def backoff_s(failures: int) -> float:
    """Pause before the next start after ``failures`` in a row: none after the first, then 0.5, 1, 2, 4, 5, 5 …"""
    return 0.0 if failures <= 1 else min(LONGEST_BACKOFF_S, 0.25 * 2 ** (failures - 1))


def _strike(record: Record, event: CanaryFailed, now_s: float) -> tuple[Record, Action]:
    if record.state is not State.READY:
        return record, Nothing()  # a repair is under way, which asks a canary of its own
    record = replace(record, strikes=record.strikes + 1)
    if record.strikes < STRIKES:
        return record, Nothing()
    return _restart(record, f"{STRIKES} canary requests in a row failed ({event.reason}); restarting the server", now_s)


def _bury_stub(record: Record, event: StubDied, now_s: float) -> tuple[Record, Action]:
    if event.streams:
        reason = f"the {event.model}'s process died; its streams cannot end in this server, so it is restarted"
        return _restart(record, reason, now_s)
    if record.state is not State.READY:
        return _restart(record, f"the {event.model}'s process died again; restarting the server", now_s)
    reason = f"the {event.model}'s process died; loading the {event.model} anew, streams in flight go on"
    return replace(record, state=State.RESTARTING, since_s=now_s, reason=reason, revivals=record.revivals + 1), Revive(
        event.model
    )


def _replace_stub(record: Record, event: StubHung, now_s: float) -> tuple[Record, Action]:
    if event.streams or record.state is not State.READY:
        return _restart(record, f"the {event.model}'s process hangs ({event.reason}); restarting the server", now_s)
    reason = f"the {event.model}'s process hangs ({event.reason}); loading the {event.model} anew, streams go on"
    return replace(record, state=State.RESTARTING, since_s=now_s, reason=reason, revivals=record.revivals + 1), Revive(
        event.model
    )


def _retry_start(record: Record, event: StartFailed, now_s: float) -> tuple[Record, Action]:
    failed_starts = record.failed_starts + 1
    hopeless = record.state is State.STARTING and not event.crashed
    if hopeless or failed_starts >= FAILED_STARTS:
        tries = "" if failed_starts == 1 else f" {failed_starts} times in a row"
        reason = f"the server did not start{tries}: {event.reason}"
        return replace(record, state=State.FAILED, since_s=now_s, reason=reason, failed_starts=failed_starts), GiveUp()
    state = State.STARTING if record.state is State.STARTING else State.RESTARTING
    reason = f"the server did not start, trying again: {event.reason}"
    record = replace(record, state=state, reason=reason, failed_starts=failed_starts, restarts=record.restarts + 1)
    return record, Restart(backoff_s(failed_starts + 1))


def _restart(record: Record, reason: str, now_s: float) -> tuple[Record, Action]:
    quick = record.state is not State.READY or now_s - record.since_s < QUICK_S
    quick_deaths = record.quick_deaths + 1 if quick else 1
    record = replace(record, since_s=now_s, quick_deaths=quick_deaths, strikes=0)
    if quick_deaths >= QUICK_DEATHS:
        reason = f"the server died {quick_deaths} times within {QUICK_S:g} s of being ready; last: {reason}"
        return replace(record, state=State.FAILED, reason=reason), GiveUp()
    record = replace(record, state=State.RESTARTING, reason=reason, restarts=record.restarts + 1)
    return record, Restart(backoff_s(quick_deaths))
