"""Check whether the figures are sound: compare client and server, and check the load generator itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.driver import GeneratorUse
from benchmarks.machine import HostLoad
from benchmarks.record import Record
from benchmarks.scrape import ServerSide

# The client's TTFT is the server's plus gRPC, the queue before the tokenizer, and the detokenizer. It may exceed the
# server's by this much, or by this share of the server's own, whichever is larger; it must not be less.
TTFT_MORE_S, TTFT_MORE_SHARE, TTFT_LESS_S = 0.025, 0.25, 0.001
PROBE_EVERY_S, PROBE_TOKENS = 1.0, 16  # the supervisor's liveness probe generates tokens too
LAG_P99_S, CPU_SHARE, OTHERS_SHARE = 0.02, 0.85, 0.1


@dataclass(frozen=True)
class Check:
    """One check; ok is None if there was no data for it."""

    name: str
    ok: bool | None
    detail: str


def checks(
    records: Sequence[Record],
    server: ServerSide | None,
    generators: Sequence[GeneratorUse],
    host_load: HostLoad,
    open_loop: bool,
) -> list[Check]:
    return [
        answers(records),
        ttft_per_request(records),
        ttft_on_average(records, server),
        output_tokens(records, server),
        input_tokens(records, server),
        usage_tokens(records),
        cpu(generators),
        *([punctuality(records)] if open_loop else []),
        event_loop(generators),
        machine_load(host_load),
    ]


def verdict(found: Sequence[Check]) -> str:
    failed = [check.name for check in found if check.ok is False]
    unchecked = [check.name for check in found if check.ok is None]
    if failed:
        return f"doubtful: {', '.join(failed)}"
    return "sound" + (f" as far as it was checked (not checked: {', '.join(unchecked)})" if unchecked else "")


def answers(records: Sequence[Record]) -> Check:
    """Check that at least one request was answered; single failures are part of the figures."""
    failed = sum(bool(record.error) for record in records)
    if not records:
        return Check("answers", None, "nothing was sent")
    return Check("answers", failed < len(records), f"{failed} of {len(records)} requests failed")


def ttft_per_request(records: Sequence[Record]) -> Check:
    """Compare each request's engine timings with the client's instants, at the median.

    The only message of an answer that is not streamed leaves the engine with its last token.
    """
    name, pairs = "TTFT, request by request", []
    for record in records:
        timings, ttft_s = record.timings, record.ttft_from_send_s
        if timings is not None and ttft_s is not None:
            first_ns = timings.last_token_ns if len(record.messages) == 1 else timings.first_token_ns
            pairs.append((ttft_s, (first_ns - timings.arrival_ns) / 1e9))
    if not pairs:
        return Check(name, None, "the server sent no timings")
    clients, servers = np.array(pairs).T
    how = f"median over {len(pairs)} requests"
    return _ttft(name, float(np.median(clients - servers)), float(np.median(servers)), how)


def ttft_on_average(records: Sequence[Record], server: ServerSide | None) -> Check:
    """Compare the mean of the server's histogram with the client's mean, over all requests with a first token."""
    name = "TTFT, server's histogram"
    if server is None or not (found := server.latencies["ttft"]).count:
        return Check(name, None, "the server's metrics have no TTFT")
    ours = [ttft_s for record in records if (ttft_s := record.ttft_from_send_s) is not None]
    if not ours:
        return Check(name, None, "no request had a first token")
    how = f"mean, {found.count} and {len(ours)} requests"
    return _ttft(name, float(np.mean(ours)) - found.mean_s, found.mean_s, how)


def _ttft(name: str, more_s: float, server_s: float, how: str) -> Check:
    allowed_s = max(TTFT_MORE_S, TTFT_MORE_SHARE * server_s)
    between = f"allowed {-TTFT_LESS_S * 1e3:g} … {allowed_s * 1e3:.1f} ms"
    detail = f"client's is {more_s * 1e3:+.1f} ms beside the server's {server_s * 1e3:.1f} ms ({how}; {between})"
    return Check(name, -TTFT_LESS_S <= more_s <= allowed_s, detail)


def output_tokens(records: Sequence[Record], server: ServerSide | None) -> Check:
    """Check that every token the server counted arrived, cancelled and failed requests excepted."""
    more = any(record.cancelled or record.error for record in records)
    note = "; more are possible for cancelled or failed requests" if more else ""
    ours, theirs = sum(record.tokens for record in records), server.output_tokens if server else 0
    detail = f"{ours} arrived, the server generated {theirs}{note}"
    return _counted("output tokens", records, server, ours, theirs, more, detail)


def input_tokens(records: Sequence[Record], server: ServerSide | None) -> Check:
    more = any(not record.input_tokens for record in records)
    note = "; unknown for cancelled or failed requests" if more else ""
    ours, theirs = sum(record.input_tokens for record in records), server.input_tokens if server else 0
    detail = f"{ours} by usage, {theirs} by the server's counter{note}"
    return _counted("input tokens", records, server, ours, theirs, more, detail)


def _counted(
    name: str, records: Sequence[Record], server: ServerSide | None, ours: int, theirs: int, more: bool, detail: str
) -> Check:
    """more: the server may have counted any number that we have not."""
    if server is None or not server.requests:
        return Check(name, None, "the server's metrics do not count them")
    return Check(name, ours <= theirs and (more or theirs - ours <= _probe_tokens(records)), detail)


def usage_tokens(records: Sequence[Record]) -> Check:
    """Check that each answer's usage equals the tokens that arrived."""
    name = "usage"
    with_usage = [record for record in records if record.usage_tokens is not None and not record.cancelled]
    if not with_usage:
        return Check(name, None, "no answer had a usage")
    wrong = sum(record.usage_tokens != record.tokens for record in with_usage)
    return Check(name, wrong == 0, f"{wrong} of {len(with_usage)} answers have a usage that differs from their tokens")


def cpu(generators: Sequence[GeneratorUse]) -> Check:
    busiest = max((use.cpu_s / use.wall_s for use in generators if use.wall_s > 0), default=0.0)
    detail = f"the busiest of {len(generators)} used {busiest:.0%} of a core, allowed {CPU_SHARE:.0%}"
    return Check("load generator: CPU", busiest <= CPU_SHARE, detail)


def event_loop(generators: Sequence[GeneratorUse]) -> Check:
    lags = [lag for use in generators for lag in use.lags_s]
    return _late("load generator: event loop", lags, "the run was too short", "its timers are")


def punctuality(records: Sequence[Record]) -> Check:
    """Check that requests were sent when they were due. Latencies count from the intended instant in any case."""
    late = [record.sent_s - record.intended_s for record in records if record.sent_s]
    return _late("load generator: punctuality", late, "nothing was sent", "requests were sent")


def _late(name: str, late_s: Sequence[float], without: str, what: str) -> Check:
    if not late_s:
        return Check(name, None, without)
    p50_s, p99_s = np.percentile(late_s, (50, 99))
    detail = f"{what} late by {p50_s * 1e3:.1f} ms at p50, {p99_s * 1e3:.1f} at p99, allowed {LAG_P99_S * 1e3:g}"
    return Check(name, bool(p99_s <= LAG_P99_S), detail)


def machine_load(host_load: HostLoad) -> Check:
    """Check that other processes used little of the machine."""
    share = host_load.disturbance
    detail = f"ours used {host_load.ours:.0%} of the machine, others {share:.0%}, allowed {OTHERS_SHARE:.0%}"
    return Check("machine load", share <= OTHERS_SHARE, detail)


def saturated(found: Sequence[Check]) -> bool:
    """Return whether the generator rather than the server may have limited the run."""
    return any(check.ok is False for check in found if check.name == "load generator: CPU")


def _probe_tokens(records: Sequence[Record]) -> int:
    """Return how many tokens liveness probes may have added meanwhile."""
    if not records:
        return 0
    span_s = max(record.ended_s for record in records) - min(record.sent_s or record.intended_s for record in records)
    return PROBE_TOKENS * (1 + int(span_s / PROBE_EVERY_S))
