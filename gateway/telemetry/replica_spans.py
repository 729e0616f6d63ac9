"""What happened inside a replica, as spans below the gateway's span of the call, from the replica's own instants."""

from __future__ import annotations

import time

from opentelemetry.trace import Span

from contract.generation import Timings
from gateway.telemetry.tracing import Tracing

TOLERANCE_NS = 1_000_000  # by which two readings of clocks of one machine may differ


def record(tracing: Tracing, call: Span, timings: Timings | None, now_ns: int) -> None:
    """Record the parts of a call that has been answered, in order and without gaps.

    ``tokenizer.queue`` (network, and Triton's queue in front of the tokenizer), ``tokenizer``, ``engine`` with
    ``engine.queue``, ``engine.prefill`` and ``engine.decode``, ``detokenizer.queue``, ``detokenizer`` (of the last
    response) and ``response`` (network). From a replica that does not say when it tokenized, the engine's work alone:
    ``engine`` with ``engine.prefill`` and ``engine.decode``.

    now_ns: when the last response came, wall clock.
    """
    began_ns = getattr(call, "start_time", None)
    if timings is None or not began_ns:
        return
    whole = timings.tokenized_ns > 0 and timings.detokenized_ns > 0
    last_ns = timings.detokenized_ns if whole else timings.last_token_ns
    own_ns = time.time_ns() - time.monotonic_ns()
    shift_ns = clock_shift_ns(began_ns, now_ns, timings.arrival_ns, last_ns, own_ns)

    at_ns = began_ns
    instants = []
    for instant_ns in (
        timings.arrival_ns,
        timings.tokenized_ns or timings.first_scheduled_ns,
        timings.first_scheduled_ns,
        timings.first_token_ns,
        timings.last_token_ns,
        *((timings.received_ns, timings.detokenized_ns) if whole else ()),
    ):
        at_ns = max(at_ns, min(now_ns, instant_ns + shift_ns))  # no span ends before it starts, also if a clock was set
        instants.append(at_ns)
    arrival, tokenized, scheduled, first, last, *rest = instants
    if whole:
        tracing.past(call, "tokenizer.queue", began_ns, arrival)
        tracing.past(call, "tokenizer", arrival, tokenized)
    engine = tracing.past(call, "engine", tokenized, last)
    if whole:
        tracing.past(engine, "engine.queue", tokenized, scheduled)
    tracing.past(engine, "engine.prefill", scheduled, first)
    tracing.past(engine, "engine.decode", first, last)
    if whole:
        received, detokenized = rest
        tracing.past(call, "detokenizer.queue", last, received)
        tracing.past(call, "detokenizer", received, detokenized)
        tracing.past(call, "response", detokenized, now_ns)


def clock_shift_ns(began_ns: int, now_ns: int, first_ns: int, last_ns: int, own_ns: int) -> int:
    """Return what to add to a replica's instants to get the gateway's wall clock.

    began_ns, now_ns: of the call, wall clock. first_ns, last_ns: the replica's within it. own_ns: this machine's shift.
    A shift is possible if it puts the replica's instants inside the call. If our own is, the replica is on this machine
    and all instants are exact. Another machine's clock began at another time, by far more than a call takes; then the
    last instant is put where the answer came, and what is not known, the way there and back, lies before the first.
    """
    possible = began_ns - first_ns - TOLERANCE_NS <= own_ns <= now_ns - last_ns + TOLERANCE_NS
    return own_ns if possible else now_ns - last_ns
