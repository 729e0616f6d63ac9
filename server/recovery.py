"""What the supervisor does when something happens to its server: a pure function of the event and of what came before.

Nothing here reads a clock, a process or a socket; ``now_s`` is any monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

# Failed starts in a row after which the supervisor gives up.
MAX_FAILED_STARTS = 3
# A failure sooner than this after readiness is an early one; that many early ones in a row end the supervisor.
EARLY_S = 10.0
MAX_EARLY_FAILURES = 20
# Failed liveness probes in a row that restart the server.
MAX_FAILED_PROBES = 3
MAX_BACKOFF_S = 5.0


class State(str, Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"


@dataclass(frozen=True)
class Record:
    """State and history of the server.

    since_s: when ``state`` was entered, by the caller's clock.
    reason: why ``state`` was entered, one sentence or "".
    restarts, reloads: server restarts and model reloads since the supervisor started.
    failed_starts, early_failures, failed_probes: in a row.
    """

    state: State = State.STARTING
    since_s: float = 0.0
    reason: str = ""
    restarts: int = 0
    reloads: int = 0
    failed_starts: int = 0
    early_failures: int = 0
    failed_probes: int = 0


@dataclass(frozen=True)
class BecameReady:
    """A liveness probe passed on a server that was starting, restarting or reloading a model."""


@dataclass(frozen=True)
class StartFailed:
    """The server exited, or generated no token in time, before it was ready.

    crashed: it exited by a signal. tritonserver 2.51 aborts when an overloaded machine delays a stub's locks by
        seconds, so a crash is retried; a model that fails to load would fail again.
    """

    reason: str
    crashed: bool = False


@dataclass(frozen=True)
class ServerFailed:
    """tritonserver, or a part of it that cannot be replaced alone, exited or hangs.

    stream_error: error text for streams in flight; "" if no process is left to send it.
    """

    problem: str
    stream_error: str = ""


@dataclass(frozen=True)
class StubFailed:
    """A stub process of ``model`` exited or hangs. streams: requests in flight cannot continue without it."""

    model: str
    streams: bool
    problem: str


@dataclass(frozen=True)
class ProbePassed:
    """The liveness probe generated a token, or the server was full and answered other requests."""


@dataclass(frozen=True)
class ProbeFailed:
    reason: str


@dataclass(frozen=True)
class StopRequested:
    """A signal arrived, or the child command exited."""

    reason: str


Event = BecameReady | StartFailed | ServerFailed | StubFailed | ProbePassed | ProbeFailed | StopRequested


@dataclass(frozen=True)
class Restart:
    """Kill what is left of the server and start a new one after ``delay_s``.

    stream_error: error text for streams in flight, sent before the kill; "" if no process is left to send it.
    """

    delay_s: float
    stream_error: str = ""


@dataclass(frozen=True)
class Reload:
    """Unload and load ``model``; the other models keep running."""

    model: str


@dataclass(frozen=True)
class GiveUp:
    pass


@dataclass(frozen=True)
class Drain:
    pass


Action = Restart | Reload | GiveUp | Drain


def decide(record: Record, event: Event, now_s: float) -> tuple[Record, Action | None]:
    """Return the record after ``event`` and the action to take."""
    if record.state in (State.DRAINING, State.FAILED):
        return record, None
    if isinstance(event, BecameReady):
        ready = replace(record, state=State.READY, since_s=now_s, reason="", failed_starts=0, failed_probes=0)
        return ready, None
    if isinstance(event, StopRequested):
        return replace(record, state=State.DRAINING, since_s=now_s, reason=event.reason), Drain()
    if isinstance(event, ProbePassed):
        return replace(record, failed_probes=0), None
    if isinstance(event, ProbeFailed):
        return _count_failed_probe(record, event, now_s)
    if isinstance(event, StubFailed):
        return _replace_stub(record, event, now_s)
    if isinstance(event, StartFailed):
        return _retry_start(record, event, now_s)
    return _restart(record, event.problem, now_s, event.stream_error)


def describe_exit(code: int) -> str:
    """Describe a shell's exit code: 137 → "signal 9", 1 → "code 1"."""
    return f"signal {code - 128}" if code > 128 else f"code {code}"


def backoff_s(failures: int) -> float:
    """Return the pause before the next start after ``failures`` in a row: 0, 0.5, 1, 2, 4, 5, 5 … seconds."""
    return 0.0 if failures <= 1 else min(MAX_BACKOFF_S, 0.25 * 2 ** (failures - 1))


def _count_failed_probe(record: Record, event: ProbeFailed, now_s: float) -> tuple[Record, Action | None]:
    if record.state is not State.READY:
        return record, None  # a start or reload is under way, which probes by itself
    record = replace(record, failed_probes=record.failed_probes + 1)
    if record.failed_probes < MAX_FAILED_PROBES:
        return record, None
    return _restart(record, f"{MAX_FAILED_PROBES} liveness probes in a row failed ({event.reason})", now_s)


def _replace_stub(record: Record, event: StubFailed, now_s: float) -> tuple[Record, Action | None]:
    if event.streams:
        return _restart(record, f"{event.problem}; its streams cannot end in this server", now_s)
    if record.state is not State.READY:
        return _restart(record, f"{event.problem} during a start or reload", now_s)
    reason = f"{event.problem}; reloading the {event.model}, streams in flight continue"
    record = replace(record, state=State.RESTARTING, since_s=now_s, reason=reason, reloads=record.reloads + 1)
    return record, Reload(event.model)


def _retry_start(record: Record, event: StartFailed, now_s: float) -> tuple[Record, Action | None]:
    failed_starts = record.failed_starts + 1
    permanent = record.state is State.STARTING and not event.crashed
    if permanent or failed_starts >= MAX_FAILED_STARTS:
        tries = "" if failed_starts == 1 else f" {failed_starts} times in a row"
        reason = f"tritonserver did not start{tries}: {event.reason}"
        return replace(record, state=State.FAILED, since_s=now_s, reason=reason, failed_starts=failed_starts), GiveUp()
    state = State.STARTING if record.state is State.STARTING else State.RESTARTING
    reason = f"tritonserver did not start, trying again: {event.reason}"
    record = replace(record, state=state, reason=reason, failed_starts=failed_starts, restarts=record.restarts + 1)
    return record, Restart(backoff_s(failed_starts + 1))


def _restart(record: Record, problem: str, now_s: float, stream_error: str = "") -> tuple[Record, Action | None]:
    early = record.state is not State.READY or now_s - record.since_s < EARLY_S
    early_failures = record.early_failures + 1 if early else 1
    record = replace(record, since_s=now_s, early_failures=early_failures, failed_probes=0)
    if early_failures >= MAX_EARLY_FAILURES:
        reason = f"tritonserver failed {early_failures} times within {EARLY_S:g} s of being ready; last: {problem}"
        return replace(record, state=State.FAILED, reason=reason), GiveUp()
    reason = f"{problem}; restarting tritonserver"
    record = replace(record, state=State.RESTARTING, reason=reason, restarts=record.restarts + 1)
    return record, Restart(backoff_s(early_failures), stream_error)
