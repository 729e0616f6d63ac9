"""Can the figures be believed? Client and server are asked the same questions, and the generator is asked about itself.

A check that could not be made (no metrics, no timings) says so and neither passes nor fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.driver import GeneratorUse
from benchmarks.machine import Company
from benchmarks.record import Record
from benchmarks.server_side import ServerSide

# The client's TTFT holds the server's plus the way there and back: gRPC, the queue before the tokenizer, and the
# detokenizer. So much more is believed, or this share of the server's own, whichever is larger; less is never.
TTFT_MORE_S = 0.025
TTFT_MORE_SHARE = 0.25
TTFT_LESS_S = 0.001
# The supervisor's canary asks for a token now and then; nobody else should.
CANARY_EVERY_S = 1.0
CANARY_TOKENS = 16
LAG_P99_S = 0.02
CPU_SHARE = 0.85
OTHERS_SHARE = 0.1


@dataclass(frozen=True)
class Check:
    """ok is None where it could not be made."""

    name: str
    ok: bool | None
    detail: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def checks(
    records: Sequence[Record],
    server: ServerSide | None,
    generators: Sequence[GeneratorUse],
    company: Company,
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
        alone(company),
    ]


def verdict(found: Sequence[Check]) -> str:
    failed = [check.name for check in found if check.ok is False]
    unmade = [check.name for check in found if check.ok is None]
    if failed:
        return f"doubtful: {', '.join(failed)}"
    return "sound" + (f" as far as it was checked (not checked: {', '.join(unmade)})" if unmade else "")


def believable_more_s(server_ttft_s: float) -> float:
    """By how much the client's TTFT may exceed the server's."""
    return max(TTFT_MORE_S, TTFT_MORE_SHARE * server_ttft_s)


def answers(records: Sequence[Record]) -> Check:
    """Failures are figures; of a run without a single answer there are none."""
    failed = sum(bool(record.error) for record in records)
    if not records:
        return Check("answers", None, "nothing was sent")
    return Check("answers", failed < len(records), f"{failed} of {len(records)} requests failed")


def ttft_per_request(records: Sequence[Record]) -> Check:
    """Each request's own instants from the engine against ours, at the median.

    The only response of an answer that came whole left the engine at its last token."""
    name = "TTFT, request by request"

    def server_s(record: Record) -> float:
        timings, whole = record.timings, len(record.messages) == 1
        return ((timings.last_token_ns if whole else timings.first_token_ns) - timings.arrival_ns) / 1e9

    pairs = [
        (record.first_s - record.sent_s, server_s(record))
        for record in records
        if record.timings is not None and record.first_s is not None
    ]
    if not pairs:
        return Check(name, None, "the server sent no timings")
    clients, servers = np.array(pairs).T
    return _ttft(
        name, float(np.median(clients - servers)), float(np.median(servers)), f"median over {len(pairs)} requests"
    )


def ttft_on_average(records: Sequence[Record], server: ServerSide | None) -> Check:
    """The mean of the server's histogram against the mean of ours, over all requests with a first token."""
    name = "TTFT, server's histogram"
    if server is None or not server.latencies["ttft"].count:
        return Check(name, None, "the server's metrics have no TTFT")
    ours = [record.first_s - record.sent_s for record in records if record.first_s is not None]
    if not ours:
        return Check(name, None, "no request had a first token")
    found = server.latencies["ttft"]
    return _ttft(
        name, float(np.mean(ours)) - found.mean_s, found.mean_s, f"mean, {found.count} and {len(ours)} requests"
    )


def _ttft(name: str, more_s: float, server_s: float, how: str) -> Check:
    allowed_s = believable_more_s(server_s)
    ok = -TTFT_LESS_S <= more_s <= allowed_s
    between = f"allowed {-TTFT_LESS_S * 1e3:g} … {allowed_s * 1e3:.1f} ms"
    return Check(
        name, ok, f"client's is {more_s * 1e3:+.1f} ms beside the server's {server_s * 1e3:.1f} ms ({how}; {between})"
    )


def output_tokens(records: Sequence[Record], server: ServerSide | None) -> Check:
    """Everything the server counted arrived. Of requests that were left or failed it may have made more."""
    name = "output tokens"
    if server is None or not server.requests:
        return Check(name, None, "the server's metrics do not count them")
    ours, theirs = sum(record.tokens for record in records), server.output_tokens
    made_more = any(record.left or record.error for record in records)
    ok = ours <= theirs and (made_more or theirs - ours <= _canary(records))
    note = "; it may have made more for requests that were left or failed" if made_more else ""
    return Check(name, ok, f"{ours} arrived, the server made {theirs}{note}")


def input_tokens(records: Sequence[Record], server: ServerSide | None) -> Check:
    name = "input tokens"
    if server is None or not server.requests:
        return Check(name, None, "the server's metrics do not count them")
    unknown = any(not record.input_tokens for record in records)
    ours, theirs = sum(record.input_tokens for record in records), server.input_tokens
    ok = ours <= theirs and (unknown or theirs - ours <= _canary(records))
    note = "; not known for requests that were left or failed" if unknown else ""
    return Check(name, ok, f"usage says {ours}, the server's counter {theirs}{note}")


def usage_tokens(records: Sequence[Record]) -> Check:
    """What every answer says it holds is what arrived."""
    name = "usage"
    told = [record for record in records if record.usage_tokens is not None and not record.left]
    if not told:
        return Check(name, None, "no answer carried its usage")
    wrong = sum(record.usage_tokens != record.tokens for record in told)
    return Check(name, wrong == 0, f"{wrong} of {len(told)} answers say another number of tokens than they brought")


def cpu(generators: Sequence[GeneratorUse]) -> Check:
    busiest = max((use.cpu_s / use.wall_s for use in generators if use.wall_s > 0), default=0.0)
    detail = f"the busiest of {len(generators)} used {busiest:.0%} of a core, allowed {CPU_SHARE:.0%}"
    return Check("load generator: CPU", busiest <= CPU_SHARE, detail)


def event_loop(generators: Sequence[GeneratorUse]) -> Check:
    name = "load generator: event loop"
    lags = [lag for use in generators for lag in use.lags_s]
    if not lags:
        return Check(name, None, "the run was too short")
    p99_s = float(np.percentile(lags, 99))
    detail = f"late by {np.median(lags) * 1e3:.1f} ms at p50, {p99_s * 1e3:.1f} ms at p99, allowed {LAG_P99_S * 1e3:g}"
    return Check(name, p99_s <= LAG_P99_S, detail)


def punctuality(records: Sequence[Record]) -> Check:
    """Whether requests left when they were due. Latencies count from there in any case."""
    late = [record.sent_s - record.intended_s for record in records if record.sent_s]
    if not late:
        return Check("load generator: punctuality", None, "nothing was sent")
    p99_s = float(np.percentile(late, 99))
    detail = f"sent {p99_s * 1e3:.1f} ms late at p99, allowed {LAG_P99_S * 1e3:g}"
    return Check("load generator: punctuality", p99_s <= LAG_P99_S, detail)


def alone(company: Company) -> Check:
    """Whether the machine had nothing else to do."""
    share = company.others + company.stolen
    detail = f"ours used {company.ours:.0%} of the machine, others {share:.0%}, allowed {OTHERS_SHARE:.0%}"
    return Check("machine to ourselves", share <= OTHERS_SHARE, detail)


def saturated(found: Sequence[Check]) -> bool:
    """Whether the generator itself, not the server, may have set the pace."""
    return any(check.ok is False for check in found if check.name == "load generator: CPU")


def _canary(records: Sequence[Record]) -> int:
    """Tokens that canary requests may have added meanwhile."""
    if not records:
        return 0
    span_s = max(record.ended_s for record in records) - min(record.sent_s or record.intended_s for record in records)
    return CANARY_TOKENS * (1 + int(span_s / CANARY_EVERY_S))
