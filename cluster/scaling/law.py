"""How many replicas a pool needs: a pure function of what is known now. No clock, no I/O.

    decision = decide(rules, load, state, now_s)     # wanted replicas and why; decision.state goes into the next call

The load is work that arrives, in tokens of decoding per second, and work that waits and would not be begun in time by
the replicas that are ready or starting. Replicas are added while their capacity leaves less than ``least_headroom`` of
it, and removed while one less would still leave ``most_headroom``. Between the two nothing changes, so that noise does
not move the number. What is unknown is not zero: without a load, or with a part of it, no replica is removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.scaling.rules import PoolRules

BUCKETS, BUCKET_S = 96, 900  # the load by time of day: a mean for each quarter of an hour
MOST = 1_000_000  # replicas; larger numbers are errors
_LEVEL_S, _TREND_S = 60.0, 300.0  # memory of the arriving load and of its trend
_GAP_S = 300.0  # after so long without a load its trend is forgotten
_LATE = 3.0  # a start that takes so many times as long as usual is not counted on
_Count = Annotated[int, Field(ge=0, le=MOST)]
_Amount = Annotated[float, Field(ge=0, le=1e15)]
_Mean = Annotated[float, Field(ge=-1, le=1e15)]
_Recent = tuple[tuple[float, int], ...]
_TRIFLE = 0.01  # of a replica: a load below this is none


@dataclass(frozen=True)
class Load:
    """What is known of one pool.

    complete: whether every gateway told its part; if not, the numbers are at least so large.
    queued, running: tokens by class, as reserved: prompt and ``max_tokens``.
    queued_requests, running_requests: those that wait for a slot, and those that hold one.
    arrived_per_s: tokens that came per second, as reserved; None as long as it is not measured.
    cost: work of a reserved token in tokens of decoding.
    ready: replicas that serve.
    tokens_per_s: capacity of one replica in tokens of decoding; 0 if unknown.
    slots: requests that one replica runs at once; 0 if unknown.
    """

    complete: bool = True
    queued: Mapping[int, float] = field(default_factory=dict)
    running: Mapping[int, float] = field(default_factory=dict)
    queued_requests: float = 0.0
    running_requests: float = 0.0
    arrived_per_s: float | None = None
    cost: float = 1.0
    ready: int = 0
    tokens_per_s: float = 0.0
    slots: float = 0.0

    @property
    def any(self) -> bool:
        return bool(self.queued_requests or self.running_requests or self.arrived_per_s or sum(self.queued.values()))


@dataclass(frozen=True)
class Decision:
    """wanted: replicas. rule: what decided, one of RULES. reason: in words.

    starting: replicas that were wanted and are not ready. forecast: expected work, tokens of decoding per second, when
    a replica ordered now would serve. demand: forecast and what waits too long, in the same unit. capacity: of one
    replica, 0 if unknown. state: for the next call, as JSON.
    """

    wanted: int
    rule: str
    reason: str
    starting: int
    forecast: float
    demand: float
    capacity: float
    state: dict[str, Any] = field(default_factory=dict)


class _State(BaseModel):
    """What one decision leaves for the next. Times are seconds since 1970; 0: never.

    wanted: the latest decision, -1 for none. up_s, changed_s: the latest addition, the latest change.
    recent: (time, replicas needed), each larger than those after it: the first is the most within the cooldown.
    level, trend, level_s: of the arriving work, and when it was taken.
    days: mean arriving work by time of day, -1 where none is known. bucket: (number, sum, samples) of the current one.
    ordered: when each starting replica was ordered. ready: replicas at the latest load. start_s: measured; 0: not yet.
    busy_s: when there was work last. tokens_per_s, slots: of a replica, as last measured.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)
    wanted: Annotated[int, Field(ge=-1, le=MOST)] = -1
    up_s: float = 0.0
    changed_s: float = 0.0
    recent: Annotated[tuple[tuple[float, _Count], ...], Field(max_length=MOST)] = ()
    level: _Amount = 0.0
    trend: Annotated[float, Field(ge=-1e12, le=1e12)] = 0.0
    level_s: float = 0.0
    days: Annotated[tuple[_Mean, ...], Field(min_length=BUCKETS, max_length=BUCKETS)] = (-1.0,) * BUCKETS
    bucket: tuple[Annotated[int, Field(ge=-1, lt=BUCKETS)], _Amount, _Count] = (-1, 0.0, 0)
    ordered: Annotated[tuple[float, ...], Field(max_length=MOST)] = ()
    ready: _Count = 0
    start_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    busy_s: float = 0.0
    tokens_per_s: _Amount = 0.0
    slots: _Amount = 0.0

    @staticmethod
    def from_json(value: object, now_s: float) -> _State:
        """Read a state, also one of another version or time, or a broken one: what cannot be used is left out."""
        found = value if isinstance(value, Mapping) else {}
        fields = {name: found[name] for name in _State.model_fields if name in found}
        for name in ("up_s", "changed_s", "level_s", "busy_s"):
            if isinstance(fields.get(name), int | float) and not 0 <= fields[name] <= now_s:
                del fields[name]
        try:
            state = _State.model_validate(fields)
        except ValidationError as exc:
            wrong = {error["loc"][0] for error in exc.errors()}
            state = _State.model_validate({name: item for name, item in fields.items() if name not in wrong})
        recent: _Recent = ()
        for at_s, needed in sorted(state.recent):
            recent = _pushed(recent, min(at_s, now_s), needed, math.inf)
        return state.model_copy(update={"recent": recent, "ordered": tuple(min(at, now_s) for at in state.ordered)})


def decide(rules: PoolRules, load: Load | None, state: object, now_s: float, target: int | None = None) -> Decision:
    """Return how many replicas the pool needs.

    load: None if nothing is known. state: of the decision before; None, or any other value, for the first.
    now_s: seconds since 1970, UTC. target: replicas that are ordered now, where the orchestrator tells; None: those of
    the decision before.
    """
    before = _State.from_json(state, now_s)
    now = target if target is not None else before.wanted if before.wanted >= 0 else load.ready if load else 0
    if not before.recent:  # a first decision removes nothing
        before = _with(before, recent=((now_s, now),), busy_s=max(before.busy_s, now_s))
    if load is None:
        after = _with(before, recent=_pushed(before.recent, now_s, now, rules.down_cooldown_s))
        reason = f"nothing is known of the load, {_count(now)} as before"
        held = Decision(now, "unknown", reason, 0, before.level, 0.0, before.tokens_per_s)
        return _bounded(rules, held, now, after, now_s)

    after = _with_starting(_with_load(before, load, now_s), load, now, now_s)
    capacity, slots = after.tokens_per_s or rules.tokens_per_s, after.slots
    start_s = after.start_s or rules.start_s
    forecast = _forecast(after, rules, start_s + rules.slow_start_s, now_s)
    demand = forecast + _late_work(rules, load, after, capacity, forecast, start_s, now_s)
    last = int(now_s - after.busy_s < rules.zero_after_s)  # the last replica stays so long

    def needed(headroom: float) -> int:
        by_tokens = demand * (1 + headroom) / capacity if capacity else 0.0
        requests = load.running_requests + (0.0 if capacity else load.queued_requests)
        by_slots = requests * (1 + headroom) / slots if slots else 0.0
        count = max(_whole(by_tokens), _whole(by_slots), int(load.any))
        return count + rules.warm_replicas if count else 0

    least, roomy = needed(rules.least_headroom), needed(rules.most_headroom)
    known = load.complete and bool(capacity or slots or not load.any)
    recent = _pushed(after.recent, now_s, roomy if known else max(now, roomy), rules.down_cooldown_s)
    after = _with(after, recent=recent)
    wanted, rule, reason = now, "steady", _in_words(load, forecast, demand, capacity, slots, least)
    if least > now:
        if now and now_s - after.up_s < rules.up_cooldown_s:
            rule, reason = "cooldown", f"{reason}; the latest addition was {now_s - after.up_s:.0f} s ago"
        else:
            wanted, rule = min(roomy, now + rules.step_up), "load"
    elif roomy < now and now > rules.min_replicas:
        if not known:
            rule, reason = "partial", f"{reason}; not all of the load is known, so none is removed"
        elif max(recent[0][1], last) >= now or now_s - after.changed_s < rules.down_cooldown_s:
            rule, reason = "cooldown", f"{reason}; less is needed, but not for long enough"
        else:
            wanted, rule = max(recent[0][1], now - rules.step_down, last), "load"
    return _bounded(rules, Decision(wanted, rule, reason, 0, forecast, demand, capacity), now, after, now_s)


def _bounded(rules: PoolRules, decision: Decision, now: int, state: _State, now_s: float) -> Decision:
    """Return the decision within floor and ceiling, which hold at any time, with the state after it."""
    wanted, rule, reason = min(max(decision.wanted, rules.min_replicas), rules.ceiling), decision.rule, decision.reason
    if wanted > decision.wanted:
        rule, reason = "floor", f"{reason}; min_replicas is {rules.min_replicas}"
    elif wanted < decision.wanted:
        bound = "cost_per_hour allows" if rules.ceiling < rules.max_replicas else "max_replicas is"
        rule, reason = "ceiling", f"{reason}; {bound} {rules.ceiling}"
    state = _with(
        state,
        wanted=wanted,
        ordered=_ordered(state.ordered, wanted - state.ready, now_s),
        up_s=now_s if wanted > now else state.up_s,
        changed_s=now_s if wanted != now else state.changed_s,
    )
    reason = f"{now} → {wanted}: {reason}" if wanted != now else f"{wanted}: {reason}"
    return replace(
        decision,
        wanted=wanted,
        rule=rule,
        reason=reason,
        starting=len(state.ordered),
        state=state.model_dump(mode="json"),
    )


def _with_load(state: _State, load: Load, now_s: float) -> _State:
    """Take in what a replica can do, and the arriving work: its level, its trend and its time of day."""
    capacity, slots = load.tokens_per_s or state.tokens_per_s, load.slots or state.slots
    state = _with(state, busy_s=now_s if load.any else state.busy_s, tokens_per_s=capacity, slots=slots)
    if load.arrived_per_s is None or not load.complete:
        return state
    work, passed_s = load.arrived_per_s * load.cost, now_s - state.level_s
    if passed_s > _GAP_S:
        level, trend = work, 0.0
    else:
        expected = max(0.0, state.level + state.trend * passed_s)
        level = expected + (work - expected) * (1 - math.exp(-passed_s / _LEVEL_S))
        slope = (level - state.level) / passed_s if passed_s > 0 else state.trend
        trend = state.trend + (slope - state.trend) * (1 - math.exp(-passed_s / _TREND_S))
    number, total, samples = state.bucket
    days, current = state.days, int(now_s // BUCKET_S % BUCKETS)
    if current != number:
        if samples and number >= 0:
            place, mean = number % len(days), total / samples
            known = days[place]
            days = (*days[:place], mean if known < 0 else (known + mean) / 2, *days[place + 1 :])
        total, samples = 0.0, 0
    bucket = current, total + work, samples + 1
    return _with(state, level=level, trend=trend, level_s=now_s, days=days, bucket=bucket)


def _with_starting(state: _State, load: Load, now: int, now_s: float) -> _State:
    """Take in which of the replicas that were ordered have become ready, and how long the first of them took."""
    come = min(max(0, load.ready - state.ready), len(state.ordered))
    start_s = state.start_s
    if come:
        took_s = min(max(1.0, now_s - state.ordered[0]), 3600.0)
        start_s = took_s if not start_s else start_s + 0.3 * (took_s - start_s)
    ordered = _ordered(state.ordered[come:], now - load.ready, now_s)
    return _with(state, ordered=ordered, ready=load.ready, start_s=start_s)


def _ordered(known: tuple[float, ...], missing: int, now_s: float) -> tuple[float, ...]:
    """Return when each of the ``missing`` replicas was ordered: the longest known ones, and now."""
    missing = max(0, missing)
    return known[:missing] + (now_s,) * (missing - len(known))


def _forecast(state: _State, rules: PoolRules, ahead_s: float, now_s: float) -> float:
    """Return the work expected in ``ahead_s``: by its rising trend, at most doubled, or as on earlier days."""
    soon = min(state.level + max(0.0, state.trend) * ahead_s, 2 * state.level)
    if not rules.time_of_day:
        return soon
    return max(soon, state.days[int((now_s + ahead_s) // BUCKET_S % BUCKETS)])


def _late_work(
    rules: PoolRules, load: Load, state: _State, capacity: float, forecast: float, start_s: float, now_s: float
) -> float:
    """Return the work per second that it takes to work off in time what will still wait when a replica ordered now
    would serve. Until then the ready and the starting ones work off what runs and what waits, the most urgent first.

    Time is ``wait_s`` of the class, and as long again as a replica takes to serve: in less, replicas would be added
    that have nothing to do once they are there.
    """
    ramp_s = rules.slow_start_s / 2  # a new replica gets half of its share in the mean
    ahead_s = start_s + ramp_s
    serving_s = load.ready * ahead_s
    for at_s in state.ordered:
        if now_s - at_s < _LATE * start_s:
            serving_s += max(0.0, ahead_s - max(0.0, at_s + start_s - now_s) - ramp_s)
    running = sum(load.running.values()) * load.cost / 2  # half of it is done, in the mean
    spare = max(0.0, capacity * serving_s - forecast * ahead_s - running)
    late = 0.0
    for priority in sorted(load.queued):
        work = load.queued[priority] * load.cost
        late += max(0.0, work - spare) / (rules.wait_of(priority) + ahead_s)
        spare = max(0.0, spare - work)
    return late


def _pushed(recent: _Recent, now_s: float, needed: int, memory_s: float) -> _Recent:
    """Add to the replicas needed recently; drop what is older than ``memory_s``, or not larger than what came later."""
    return (*(item for item in recent if item[1] > needed and now_s - item[0] < memory_s), (now_s, needed))


def _with(state: _State, **changed: Any) -> _State:
    return state.model_copy(update=changed)


def _in_words(load: Load, forecast: float, demand: float, capacity: float, slots: float, least: int) -> str:
    if not load.any and demand < 1:
        return "no work"
    if not capacity:
        requests = f"{load.running_requests + load.queued_requests:.0f} requests, {load.ready} replicas ready"
        return f"{requests}, {slots:.0f} slots each" if slots else f"{requests}, what one can do is not known yet"
    late = f" and {demand - forecast:.0f} for what would wait too long" if demand > forecast else ""
    return (
        f"{forecast:.0f} tokens/s expected{late}; {capacity:.0f} a replica; {_count(least)} needed, {load.ready} ready"
    )


def _whole(replicas: float) -> int:
    return math.ceil(min(MOST / 2, replicas) - _TRIFLE)


def _count(replicas: int) -> str:
    return f"{replicas} replica{'' if replicas == 1 else 's'}"
