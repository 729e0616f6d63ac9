"""What must hold whatever breaks, judged over the whole record of a run. Pure: no process and no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

from chaos.fleet import CAPPED_REQUESTS
from chaos.load import CUT, LATE, LEFT, LONG, Outcome
from chaos.scenario import GATEWAYS, KINDS, REDIS, REPLICAS, Fault, Kind
from contract.prometheus import Metrics

RECOVERY_S = 10.0
MORE_DESCRIPTORS, MORE_BYTES = 24, 100_000_000
WORKER, CACHE_BYTES = "cpu_engine.worker", 270_000_000  # of the demo's KV cache, a page of which is there once used
# Of gateways and of replicas, 0 once no request is under way.
_OF_GATEWAYS = "in_flight waiting pool_running pool_waiting pool_queued_tokens pool_backlog_tokens"
_OF_GATEWAYS += " queue_depth replica_outstanding body_bytes counted_requests"
GAUGES = (*(f"trident_gateway_{name}" for name in _OF_GATEWAYS.split()), "trident_open_streams")
COUNTERS = ("trident_gateway_requests_total", "trident_gateway_tokens_total")
NAMES = "faults ends bytes isolation errors budgets frees gauges resources recovery floor alerts".split()
ALERTS = {"TridentReplicaOut": "replica", "TridentGatewayDown": "gateway"}
SLACK_S = 2.5  # of what samples tell: two readings in a row may get no answer in time
NOTICED_S = 1.5  # in which a gateway notices that a caller left; measured without a defect: 0.5 s at most
CALLER_S = 0.25  # that a caller may see a stream's end later than the beginning of the next


@dataclass(frozen=True)
class Happened:
    """A fault as it was done. Times are seconds of the monotonic clock."""

    fault: Fault
    begun_s: float
    ended_s: float


@dataclass(frozen=True)
class Violation:
    """at_s: seconds of the monotonic clock, 0 for the end."""

    invariant: str
    detail: str
    at_s: float = 0.0


@dataclass
class Record:
    """All that was seen of a run. Times are seconds of the monotonic clock.

    expected, inputs: undisturbed text and tokens of each prompt. missed: faults that could not be done.
    samples: metrics of all processes that answered, by the time of reading; the last is of the end.
    well_s: times of those samples at which every process was well. stored: when, and what is wrong with responses.
    resources: descriptors and bytes of memory by name and pid, before the first fault and at the end.
    defects: lines of the gateways' logs that tell of one. redis_late_s: when Redis did not answer a gateway in time.
    budgets: of "metered" at the end, tokens that its bucket lacks and those still held; None without Redis.
    caps: requests that Redis still counts under caps at the end.
    admitted: requests that the bucket of "capped" admits over the time of the run. at_once: at the same time.
    alerts: when each fired, by ``ALERT PROCESS REPLICA``; None without Prometheus. alerts_left: that fire at the end.
    unread: when Prometheus could not read a gateway. closing_s: when the last load began, after all recoveries.
    settled_s: when every process was well after the load; 0: never. recovery_s: how long that may take.
    """

    expected: Mapping[str, str]
    least_replicas: int
    recovery_s: float = RECOVERY_S
    inputs: Mapping[str, int] = field(default_factory=dict)
    outcomes: Sequence[Outcome] = ()
    happened: list[Happened] = field(default_factory=list)
    missed: list[Happened] = field(default_factory=list)
    samples: list[tuple[float, Mapping[str, Metrics]]] = field(default_factory=list)
    well_s: list[float] = field(default_factory=list)
    resources: tuple[Mapping, Mapping] = ({}, {})
    stored: Sequence[tuple[float, str]] = ()
    defects: Sequence[str] = ()
    redis_late_s: Sequence[float] = ()
    budgets: tuple[float, float] | None = None
    caps: int = 0
    admitted: int = 0
    at_once: int = 2
    alerts: Mapping[str, Sequence[tuple[float, float]]] | None = None
    alerts_left: Sequence[str] = ()
    unread: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    load_ended_s: float = 0.0
    closing_s: float = math.inf
    settled_s: float = 0.0
    held_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def last(self) -> Mapping[str, Metrics]:
        """The metrics at the end."""
        return self.samples[-1][1] if self.samples else {}

    def felt(self, since_s: float, until_s: float) -> list[tuple[Kind, str]]:
        """Return kinds and targets of the faults that may be felt in that time, their recovery included."""
        near = (one for one in self.happened if one.begun_s <= until_s and since_s <= one.ended_s + self.recovery_s)
        return [(KINDS[one.fault.kind], one.fault.target) for one in near]

    def redis_was_late(self, since_s: float, until_s: float) -> bool:
        """Return whether Redis did not answer a gateway in time: on a busy machine also without a fault."""
        return any(one_s - CALLER_S <= until_s and since_s <= one_s + self.recovery_s for one_s in self.redis_late_s)


def check(record: Record) -> list[Violation]:
    """Return every violation, by invariant."""
    of_requests = (_ends, _texts, _stored, _errors, _budgets, _logged, _caps, _frees, _leavers)
    of_processes = (_gauges, _counters, _resources, _recovery, _floor, _alerts)
    return [violation for check in (_faults, *of_requests, *of_processes) for violation in check(record)]


def _faults(record: Record) -> Iterator[Violation]:
    for missed in record.missed:
        at_s = missed.begun_s
        kinds = [kind for kind, target in record.felt(at_s, at_s) if target == missed.fault.target]
        if not any(kind.replica_out or kind.gateway_out or kind.budgets_out for kind in kinds):
            detail = f"`{missed.fault}` could not be done, and no fault before it ended what it is done to"
            yield Violation("faults", detail, at_s)


def _ends(record: Record) -> Iterator[Violation]:
    for one in record.outcomes:
        if one.error == LATE:
            yield Violation("ends", f"no end: {one}", one.sent_s)
        elif one.error not in (CUT, LEFT) and (one.ends != 1 or one.late_text):
            detail = f"{one.ends} ends, {len(one.late_text)} characters behind the first: {one}"
            yield Violation("ends", detail, one.sent_s)
        elif one.ok and one.reason != "length":  # no answer ends before its max_tokens
            yield Violation("ends", f"the reason is {one.reason!r}, must be 'length': {one}", one.sent_s)


def _texts(record: Record) -> Iterator[Violation]:
    for one in record.outcomes:
        expected = record.expected[one.prompt.text]
        if one.ok and one.shape == "logprobs" and one.scores != one.prompt.max_tokens:
            yield Violation("bytes", f"{one.scores} log probabilities came: {one}", one.sent_s)
        if one.text == expected or (one.error and expected.startswith(one.text)):
            continue
        others, tail = (text for prompt, text in record.expected.items() if prompt != one.prompt.text), one.text[-20:]
        elsewhere = any(text.startswith(tail) or one.text in text for text in others)
        # Where its own text goes on like this too, it lost or doubled something before.
        foreign = len(one.text) > 20 and elsewhere and tail not in expected
        at = next((n for n, pair in enumerate(zip(one.text, expected, strict=False)) if pair[0] != pair[1]), -1)
        seam = f"{one.text[at : at + 40]!r}, must be {expected[at : at + 40]!r}" if at >= 0 else "its length differs"
        detail = f"differs at character {at} of {len(expected)}, {len(one.text)} came: {one}: {seam}"
        yield Violation("isolation" if foreign else "bytes", detail, one.sent_s)


def _stored(record: Record) -> Iterator[Violation]:
    for at_s, problem in record.stored:
        yield Violation("isolation", f"a stored response: {problem}", at_s)


def _errors(record: Record) -> Iterator[Violation]:
    for one in record.outcomes:
        if one.error and one.error != LATE and not allowed(one, record):
            yield Violation("errors", f"no fault explains it: {one}", one.sent_s)
    for line in record.defects:
        yield Violation("errors", f"a log tells of a defect: {line}")


def allowed(one: Outcome, record: Record) -> bool:
    """Return whether docs/chaos.md allows that a request ends so."""
    if one.error == LEFT:
        return True
    felt = record.felt(one.sent_s, one.ended_s)
    if one.error == "Overloaded" and one.prompt.tenant == "capped":
        served = [other for other in record.outcomes if other.prompt.tenant == "capped" and other.error != one.error]
        before = [other for other in served if other.sent_s <= one.ended_s]
        # A gateway that Redis does not answer at once has its share of the cap: one of the two.
        under_way = any(other.ended_s >= one.sent_s - SLACK_S for other in before)
        return bool(felt) or under_way or len(before) >= CAPPED_REQUESTS
    if one.error == CUT:
        begun = one.received or one.text
        # A gateway that is stopped takes no connection, and a caller gives up before it goes on.
        return any(kind.gateway_out or (kind.silent and not begun) for kind, at in felt if at == one.gateway)
    if one.error not in ("Unavailable", "DeadlineExceeded", "EngineFailed"):
        return False
    if one.prompt.tenant != "plain" and one.error == "Unavailable" and any(kind.budgets_out for kind, _ in felt):
        return True
    if one.error == "DeadlineExceeded" and any(kind.silent for kind, _ in felt):
        return True
    out = {target for kind, target in felt if kind.replica_out or kind.silent}
    return out.issuperset(REPLICAS) or one.gateway in out


def _budgets(record: Record) -> Iterator[Violation]:
    served = sum((one.ok or one.received > 0) and one.prompt.tenant == "capped" for one in record.outcomes)
    if served > record.admitted:
        yield Violation("budgets", f"{served} requests of 'capped' were served and {record.admitted} allowed")
    for one in (one for one in record.outcomes if one.ok):
        if one.tokens != (due := (record.inputs[one.prompt.text], one.prompt.max_tokens)):
            yield Violation("budgets", f"the usage is {one.tokens}, must be {due}: {one}", one.sent_s)
    if record.budgets is None:
        return
    used, held = record.budgets
    metered = [one for one in record.outcomes if one.prompt.tenant == "metered"]
    for one in metered:
        if one.error == LEFT and one.tokens and one.received > one.tokens[1]:
            yield Violation("budgets", f"counted with {one.tokens[1]} tokens, {one.received} came: {one}", one.sent_s)
    charged = [one for one in metered if one.error in ("", LEFT) and one.tokens and not one.repeats]
    least = sum(sum(one.tokens or ()) for one in charged)
    # A stream that broke is charged what it used, or stays reserved until its lease ends if its gateway is gone.
    broken = [one for one in metered if one not in charged and not (one.repeats and _is_reader(one, record))]
    most = least + sum(len(one.prompt.text) + one.prompt.max_tokens for one in broken)
    if not least - 2 <= used + held <= most + 2:
        yield Violation("budgets", f"'metered' was charged {used:.1f} with {held:.1f} held: must be {least} to {most}")
    if held > 0.5 and not any(one.error == CUT for one in metered):
        yield Violation("budgets", f"{held:.1f} tokens of 'metered' are still reserved and no gateway is gone")


def _logged(record: Record) -> Iterator[Violation]:
    """The gateways' logs say of each request what its caller was told, or what its prompt has."""
    for one in record.outcomes:
        if one.logged is None:
            continue
        prompt = record.inputs[one.prompt.text]
        if one.ok and not one.repeats and one.logged != one.tokens:
            yield Violation("budgets", f"{one.logged} is logged and {one.tokens} was told: {one}", one.sent_s)
        # Without a usage a gateway counts by its own tokenizer, which does not add what begins a text (BOS).
        if one.error == LEFT and one.logged[1] and one.logged[0] not in (prompt - 1, prompt):
            yield Violation("budgets", f"{one.logged} is logged of {prompt} prompt tokens: {one}", one.sent_s)


def _is_reader(one: Outcome, record: Record) -> bool:
    """Return whether a repeated request must have got the response of the first one, and cost nothing."""
    [first] = (other for other in record.outcomes if other.id == one.key)
    felt = record.felt(first.sent_s, one.ended_s)
    late = record.redis_was_late(first.sent_s, one.ended_s)
    return first.ok and not late and not any(target in GATEWAYS + REDIS for _, target in felt)


def _caps(record: Record) -> Iterator[Violation]:
    """Of 'capped' no more streams than its cap are open at once while the gateways can count them together."""
    capped = [one for one in record.outcomes if one.prompt.tenant == "capped" and one.first_s and one.error != LATE]
    spans = [(one.first_s, one.ended_s - CALLER_S) for one in capped]
    for at_s in sorted(begun_s for begun_s, _ in spans):
        count = sum(begun_s <= at_s < ended_s for begun_s, ended_s in spans)
        # A gateway that hangs for longer than its lease in Redis is not counted, and its streams go on later.
        felt = record.felt(at_s, at_s)
        alone = any(kind.budgets_out or (kind.silent and target in GATEWAYS) for kind, target in felt)
        if count > record.at_once and not alone and not record.redis_was_late(at_s, at_s):
            yield Violation("budgets", f"'capped' had {count} streams at once and may have {record.at_once}", at_s)
            return


def _frees(record: Record) -> Iterator[Violation]:
    """Of callers that leave early, far from any fault, half are served no further, and half of those free an engine."""
    cut, cancelled, counts = 0, 0.0, dict[str, float]()
    long = [one for one in record.outcomes if one.prompt.max_tokens >= LONG]  # others end while their caller leaves
    far = [one for one in long if not record.felt(one.sent_s, one.ended_s + 1)]
    for protocol in ("http", "grpc"):
        left = [one for one in far if one.error == LEFT and one.protocol == protocol and one.received]
        ends = [one.tokens[1] < one.prompt.max_tokens for one in left if one.tokens]
        cut += sum(ends)
        if sum(ends) < len(ends) // 2:
            yield Violation("frees", f"{ends.count(False)} of {len(ends)} who left over {protocol} were served on")
    for name, page in (item for _, pages in record.samples for item in pages.items()):
        now = page.value("trident_requests_total", finish_reason="cancelled")
        cancelled += max(0.0, now - counts.get(name, now))  # a process that was started again counts anew
        counts[name] = now
    if cancelled < cut // 2:
        yield Violation("frees", f"gateways ended {cut} streams whose callers had left, engines {cancelled:.0f}")


def _leavers(record: Record) -> Iterator[Violation]:
    """Far from any fault a gateway notices each caller that leaves, also one whose request is still in a queue."""
    for one in record.outcomes:
        if one.error != LEFT or record.felt(one.sent_s, one.ended_s + NOTICED_S):
            continue
        if one.logged is None and one.received:  # without output it may have left before its request was read
            yield Violation("frees", f"no gateway logged that its caller left: {one}", one.sent_s)
        if (late_s := one.logged_s - (one.ended_s - one.sent_s)) > NOTICED_S:
            yield Violation("frees", f"a gateway noticed {late_s:.1f} s late that its caller left: {one}", one.sent_s)


def _gauges(record: Record) -> Iterator[Violation]:
    for name, value in left(record.last).items():
        yield Violation("gauges", f"{name} is {value:g} and no request is under way")
    if record.caps:
        yield Violation("gauges", f"Redis counts {record.caps} requests under caps and none is under way")


def _counters(record: Record) -> Iterator[Violation]:
    """No counter of a gateway falls while the gateway lives, also where a worker of it dies."""
    before: dict[str, tuple[float, dict]] = {}
    kills = [one for one in record.happened if one.fault.kind == "kill.gateway"]
    for at_s, pages in record.samples:
        for name in GATEWAYS & pages.keys():
            now = dict(_counts(pages[name]))
            before_s, counts = before.get(name, (at_s, {}))
            before[name] = at_s, now
            if any(one.fault.target == name and before_s <= one.begun_s <= at_s for one in kills):
                continue
            for series, count in counts.items():
                if (less := now.get(series, 0.0)) < count:
                    yield Violation("gauges", f"{series} of {name} fell from {count:g} to {less:g}", at_s)


def _counts(page: Metrics) -> Iterator[tuple[str, float]]:
    for metric in COUNTERS:
        for labels, count in page.matching(metric):
            yield f"{metric} {' '.join(labels.values())}", count


def left(pages: Mapping[str, Metrics]) -> dict[str, float]:
    """Return the gauges that are not 0."""
    found = {f"{gauge} of {name}": page.value(gauge) for name, page in pages.items() for gauge in GAUGES}
    for name, page in pages.items():
        found[f"active of {name}"] = page.value("nv_trt_llm_request_metrics", request_type="active")
        found[f"KV blocks of {name}"] = page.value("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")
    return {name: value for name, value in found.items() if value}


def _resources(record: Record) -> Iterator[Violation]:
    before, after = record.resources
    for key in before.keys() & after.keys():  # a process that was started again begins anew
        descriptors, memory = (now - then for then, now in zip(before[key], after[key], strict=True))
        if descriptors > MORE_DESCRIPTORS:
            yield Violation("resources", f"{key[0]} has {descriptors} more descriptors than before the faults")
        if memory > MORE_BYTES + CACHE_BYTES * (WORKER in key[0]):
            yield Violation("resources", f"{key[0]} has {memory / 1e6:.0f} MB more memory than before the faults")


def _recovery(record: Record) -> Iterator[Violation]:
    last_s = max([this.ended_s for this in record.happened], default=0.0)
    until_s = max(last_s, record.load_ended_s) + record.recovery_s
    well_s = set(record.well_s)
    out = _spans((at_s, set() if at_s in well_s else {"the fleet"}) for at_s, _ in record.samples)
    for fault_s, next_s in _quiet_periods(record):
        due_s = fault_s + record.recovery_s
        for name in {one.gateway for one in record.outcomes}:
            before_s = min(next_s, record.closing_s)
            later = [one for one in record.outcomes if one.gateway == name and fault_s <= one.sent_s < before_s]
            served = [one for one in later if one.ok or (one.error == LEFT and one.received)]
            # Of one that served none it is known until its last request ended: the load may end before it is due.
            last = max([one.ended_s for one in later], default=0.0)
            served_s = min((one.ended_s for one in served), default=last)
            if len(later) >= 3 and served_s > due_s:
                after = f"{served_s - fault_s:.1f} s after a fault"
                yield Violation("recovery", f"{name} served nothing for {after}", fault_s)
        for _, begun_s, ended_s in out:
            if ended_s - begun_s > SLACK_S and begun_s <= due_s < min(ended_s, next_s):
                after = f"{begun_s - fault_s:.1f} to {ended_s - fault_s:.1f} s after a fault"
                yield Violation("recovery", f"the fleet was not whole from {after}", fault_s)
    for name, replica in broken(record.last):
        yield Violation("recovery", f"the breaker of {replica} at {name} is not closed at the end")
    if not record.settled_s:
        yield Violation("recovery", "the fleet was never whole again")
    elif record.settled_s > until_s:
        yield Violation("recovery", f"the fleet was whole {record.settled_s - last_s:.1f} s after the last fault")


def broken(pages: Mapping[str, Metrics]) -> list[tuple[str, str]]:
    """Return the gateways and replicas between which a breaker is not closed."""
    states = [(name, pair) for name, page in pages.items() for pair in page.matching("trident_gateway_breaker_state")]
    return [(name, labels.get("replica", "")) for name, (labels, state) in states if state]


def _quiet_periods(record: Record) -> Iterator[tuple[float, float]]:
    """Yield the end of each fault that no other one follows within its recovery, and when the next one begins."""
    ended_s = 0.0
    ordered = sorted(record.happened, key=lambda this: this.begun_s)
    for this, following in zip_longest(ordered, ordered[1:]):
        ended_s = max(ended_s, this.ended_s)
        next_s = following.begun_s if following is not None else math.inf
        if next_s > ended_s + record.recovery_s:
            yield ended_s, next_s


def _floor(record: Record) -> Iterator[Violation]:
    for at_s, pages in record.samples:
        for labels, value in pages["scaler"].matching("trident_scaler_wanted") if "scaler" in pages else ():
            if value < record.least_replicas:
                pool = labels.get("pool", "")
                yield Violation("floor", f"the scaler wants {value:g} replicas of {pool!r}: min_replicas is 2", at_s)
                return
    if "scaler" in record.last and not list(record.last["scaler"].matching("trident_scaler_wanted")):
        yield Violation("floor", "the scaler does not tell how many replicas it wants")


def _alerts(record: Record) -> Iterator[Violation]:
    if record.alerts is None:
        return
    for alert, what in ALERTS.items():
        for name, begun_s, ended_s in spans(record.samples, what):
            fired = any(one[0] <= ended_s + 1 and begun_s <= one[1] for one in record.alerts.get(f"{alert} {name}", ()))
            # What a gateway says of replicas holds for Prometheus as long as it can read the gateway.
            unread = record.unread.get(name.partition(" ")[0], ()) if what == "replica" else ()
            breaks = sorted([(begun_s, begun_s), *unread, (ended_s, ended_s)])
            held_s = max(min(b[0], ended_s) - max(a[1], begun_s) for a, b in pairwise(breaks))
            if held_s > record.held_s[alert] + SLACK_S and not fired:
                yield Violation("alerts", f"{alert} {name} did not fire in {held_s:.1f} s", begun_s)
    for alert in record.alerts_left:
        yield Violation("alerts", f"{alert} still fires at the end")


def spans(samples: Sequence[tuple[float, Mapping[str, Metrics]]], what: str) -> list[tuple[str, float, float]]:
    """Return the times between which one gateway was not there, or said without a pause that one replica is out."""
    return _spans((at_s, _out(pages, what)) for at_s, pages in samples)


def _out(pages: Mapping[str, Metrics], what: str) -> set[str]:
    if what == "gateway":
        return set(GATEWAYS) - pages.keys()
    told = ((name, one) for name, page in pages.items() for one in page.matching("trident_gateway_replica_healthy"))
    return {f"{name} {labels['replica']}" for name, (labels, value) in told if value == 0}


def _spans(samples: Iterable[tuple[float, set[str]]]) -> list[tuple[str, float, float]]:
    """Return what was out without a pause, from when to when. samples: all that is out, by the time."""
    open_at: dict[str, float] = {}
    found, at_s = [], 0.0
    for at_s, out in samples:
        found += [(name, open_at.pop(name), at_s) for name in open_at.keys() - out]
        for name in out:
            open_at.setdefault(name, at_s)
    return found + [(name, begun_s, at_s) for name, begun_s in open_at.items()]
