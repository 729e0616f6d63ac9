"""How many replicas a pool needs: a pure function of what is known now. No clock, no I/O.

The load is work that arrives, in tokens of decoding per second, and work that waits and would not be begun in time by
the replicas that are ready or starting. Replicas are added while their capacity leaves less than ``least_headroom`` of
it, and removed while one less would still leave ``most_headroom`` of the load and of what it varies by. What is unknown
is not zero: without a load, or with a part of it, no replica is removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.scaling.rules import PoolRules

BUCKETS, BUCKET_S = 96, 900  # the load by time of day: a mean for each quarter of an hour
MOST = 1_000_000  # replicas; larger numbers are errors
_LEVEL_S, _TREND_S, _NOISE_S = 60.0, 300.0, 900.0  # memory of the arriving load, of its trend and of its variation
_GAP_S = 300.0  # after so long without a load its trend is forgotten
_LATE = 3.0  # a start that takes so many times as long as usual is not counted on
_TRIFLE = 0.01  # of a replica: a load below this is none
_Count = Annotated[int, Field(ge=0, le=MOST)]
_Amount = Annotated[float, Field(ge=0, le=1e15)]
_Known = Annotated[float, Field(ge=-1, le=1e15)]  # -1: nothing is
_NEVER = -1e12
_Time = Annotated[float, Field(ge=_NEVER)]


@dataclass(frozen=True)
class Load:
    """What is known of one pool.

    complete: whether every gateway told its part; if not, the numbers are at least so large.
    queued, running: tokens by class, as reserved: prompt and ``max_tokens``. cost: of one, in tokens of decoding.
    arrived_per_s: tokens that came per second, as reserved; None as long as it is not measured.
    ready: replicas that serve. starting: those that said so; starting_s: until the last of them is ready, if known.
    tokens_per_s: capacity of one replica in tokens of decoding; 0 if unknown. slots: of one replica; 0 if unknown.
    """

    complete: bool = True
    queued: Mapping[int, float] = field(default_factory=dict)
    running: Mapping[int, float] = field(default_factory=dict)
    queued_requests: float = 0.0
    running_requests: float = 0.0
    arrived_per_s: float | None = None
    cost: float = 1.0
    ready: int = 0
    starting: int = 0
    starting_s: float | None = None
    tokens_per_s: float = 0.0
    slots: float = 0.0

    @property
    def any(self) -> bool:
        return bool(self.queued_requests or self.running_requests or self.arrived_per_s or sum(self.queued.values()))


@dataclass
class Decision:
    """rule: what decided: load, steady, cooldown, floor, ceiling, partial or unknown. starting: wanted and not ready.
    forecast: work, tokens of decoding per second, expected when a replica ordered now would serve. demand: forecast and
    what waits too long. capacity: of one replica, 0 if unknown. state: for the next call, as JSON.
    """

    wanted: int
    rule: str
    reason: str
    starting: int = 0
    forecast: float = 0.0
    demand: float = 0.0
    capacity: float = 0.0
    state: dict[str, Any] = field(default_factory=dict)


class _State(BaseModel):
    """What one decision leaves for the next. Times are on the caller's clock.

    wanted: the latest decision, -1 for none. up_s, changed_s: the latest addition, the latest change.
    recent: (time, replicas needed), each larger than those after it: the first is the most within the cooldown.
    level, trend, level_s: of the arriving work, and when it was taken. noise: its mean deviation, as a part of level.
    requests: mean of those that hold a slot. bucket: (number, sum, samples) of the current one of ``days``.
    ordered: when each starting replica was ordered. lost: some of them were not: they served before, or were missing
        when their pool was seen first. ready: replicas at the latest load. start_s: measured; 0: not yet.
    busy_s: when there was work last. tokens_per_s, slots: of a replica, as last measured.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    wanted: Annotated[int, Field(ge=-1, le=MOST)] = -1
    up_s: _Time = _NEVER
    changed_s: _Time = _NEVER
    recent: Annotated[list[tuple[_Time, _Count]], Field(max_length=MOST)] = []
    level: _Amount = 0.0
    trend: Annotated[float, Field(ge=-1e12, le=1e12)] = 0.0
    level_s: _Time = _NEVER
    noise: Annotated[float, Field(ge=0, le=1)] = 0.0
    requests: _Amount = 0.0
    days: Annotated[list[_Known], Field(min_length=BUCKETS, max_length=BUCKETS)] = [-1.0] * BUCKETS
    bucket: tuple[Annotated[int, Field(ge=-1, lt=BUCKETS)], _Amount, _Count] = (-1, 0.0, 0)
    ordered: Annotated[list[_Time], Field(max_length=MOST)] = []
    lost: bool = False
    ready: _Count = 0
    start_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    busy_s: _Time = _NEVER
    tokens_per_s: _Amount = 0.0
    slots: _Amount = 0.0

    @staticmethod
    def from_json(value: object, now_s: float) -> _State:
        """Read a state, also one of another version or time, or a broken one: what cannot be used is left out."""
        found = dict(value) if isinstance(value, Mapping) else {}
        try:
            state = _State.model_validate(found)
        except ValidationError as exc:
            wrong = {error["loc"][0] for error in exc.errors()}
            state = _State.model_validate({name: item for name, item in found.items() if name not in wrong})
        for name in ("up_s", "changed_s", "level_s", "busy_s"):  # a time that has not come yet is none
            setattr(state, name, getattr(state, name) if getattr(state, name) <= now_s else _NEVER)
        recent, state.recent = sorted(state.recent), []
        for at_s, needed in recent:
            state.needs(needed, min(at_s, now_s), math.inf)
        state.ordered = [min(at_s, now_s) for at_s in state.ordered]
        return state

    def needs(self, replicas: int, now_s: float, memory_s: float) -> None:
        """Add to the replicas needed recently; drop what is older than ``memory_s``, or not larger."""
        kept = [item for item in self.recent if item[1] > replicas and now_s - item[0] < memory_s]
        self.recent = [*kept, (now_s, replicas)]

    def order(self, missing: int, now_s: float) -> None:
        """Keep in ``ordered`` so many replicas, the longest known ones first."""
        self.ordered = (self.ordered + [now_s] * missing)[: max(0, missing)]

    def take(self, load: Load, now: int, now_s: float) -> None:
        """Take in a load: what a replica can do, which of those that were ordered are ready, what arrives."""
        self.busy_s = now_s if load.any else self.busy_s
        self.tokens_per_s, self.slots = load.tokens_per_s or self.tokens_per_s, load.slots or self.slots
        come = min(max(0, load.ready - self.ready), len(self.ordered))
        if come and not self.lost:  # the first of them tells how long a start takes; a return is none
            took_s = min(max(1.0, now_s - self.ordered[0]), 3600.0)
            self.start_s += (took_s - self.start_s) * (0.3 if self.start_s else 1.0)
        self.ordered, self.ready = self.ordered[come:], load.ready
        lost = self.lost or now - load.ready > len(self.ordered)
        self.order(now - load.ready, now_s)
        self.lost = lost and bool(self.ordered)
        if load.arrived_per_s is not None and load.complete:
            self._arrives(load.arrived_per_s * load.cost, load.running_requests, now_s)
        else:
            self.requests = max(self.requests, load.running_requests)

    def _arrives(self, work: float, requests: float, now_s: float) -> None:
        """Take in the arriving work: its level, its variation, its trend and its time of day."""
        passed_s, before = now_s - self.level_s, self.level
        if passed_s > _GAP_S:
            self.level, self.trend, self.requests = work, 0.0, requests
        elif passed_s > 0:
            expected, new = max(0.0, before + self.trend * passed_s), 1 - math.exp(-passed_s / _LEVEL_S)
            self.level = expected + (work - expected) * new
            self.requests += (requests - self.requests) * new
            away = min(1.0, abs(work - expected) / expected) if expected else 0.0
            self.noise += (away - self.noise) * (1 - math.exp(-passed_s / _NOISE_S))
            self.trend += ((self.level - before) / passed_s - self.trend) * (1 - math.exp(-passed_s / _TREND_S))
        self.level_s = now_s
        (number, total, samples), current = self.bucket, int(now_s // BUCKET_S % BUCKETS)
        if current != number:
            if samples and number >= 0:
                known, mean = self.days[number], total / samples
                self.days[number] = mean if known < 0 else (known + mean) / 2
            total, samples = 0.0, 0
        self.bucket = current, total + work, samples + 1


def decide(rules: PoolRules, load: Load | None, state: object, now_s: float, target: int | None = None) -> Decision:
    """Return how many replicas the pool needs.

    load: None if nothing is known. state: of the decision before; None, or any other value, for the first.
    now_s: seconds since 1970, UTC. target: replicas ordered now; None: those of the decision before.
    """
    known = _State.from_json(state, now_s)
    seen = load.ready + load.starting if load else 0
    now = target if target is not None else known.wanted if known.wanted >= 0 else seen
    if not known.recent:  # a first decision removes nothing
        known.recent, known.busy_s = [(now_s, now)], max(known.busy_s, now_s)
    if load is None:
        known.needs(now, now_s, rules.down_cooldown_s)
        reason = f"nothing is known of the load, {_count(now)} as before"
        decision = Decision(now, "unknown", reason, forecast=known.level, capacity=known.tokens_per_s)
    else:
        known.take(load, now, now_s)
        decision = _decided(rules, load, known, now, now_s)
    return _bounded(rules, decision, now, known, now_s)


def _decided(rules: PoolRules, load: Load, state: _State, now: int, now_s: float) -> Decision:
    """Return the decision without the bounds."""
    capacity, slots = state.tokens_per_s or rules.tokens_per_s, state.slots
    start_s = state.start_s or rules.start_s
    ahead_s = start_s + rules.slow_start_s
    # By its rising trend, at most doubled, or as on earlier days.
    forecast = min(state.level + max(0.0, state.trend) * ahead_s, 2 * state.level)
    if rules.time_of_day:
        forecast = max(forecast, state.days[int((now_s + ahead_s) // BUCKET_S % BUCKETS)])
    demand = forecast + _late_work(rules, load, state, capacity, forecast, start_s, now_s)

    def needed(headroom: float) -> int:
        by_tokens = demand * (1 + headroom) / capacity if capacity else 0.0
        # What finds no slot now waits, and is counted there; their mean is that of the arriving work.
        requests = state.requests if capacity else load.running_requests + load.queued_requests
        by_slots = requests * (1 + headroom) / slots if slots else 0.0
        count = math.ceil(min(MOST / 2, max(by_tokens, by_slots)) - _TRIFLE)
        return max(count, int(load.any)) + rules.warm_replicas

    least, roomy = needed(rules.least_headroom), needed(rules.most_headroom)
    # The noise of single readings is about twice the standard deviation of their mean over a minute or two.
    enough = needed((1 + rules.most_headroom) * (1 + state.noise) - 1)
    certain = load.complete and bool(capacity or slots or not load.any)
    state.needs(enough if certain else max(now, enough), now_s, rules.down_cooldown_s)
    last = int(now_s - state.busy_s < rules.zero_after_s)  # the last replica stays so long
    lasting = max(state.recent[0][1], last)
    wanted, rule, reason = now, "steady", _in_words(load, forecast, demand, capacity, slots, least)
    if least > now:
        if now and now_s - state.up_s < rules.up_cooldown_s:
            rule, reason = "cooldown", f"{reason}; the latest addition was {now_s - state.up_s:.0f} s ago"
        else:
            wanted, rule = min(roomy, now + rules.step_up), "load"
    elif enough < now and now > rules.min_replicas:
        if not certain:
            rule, reason = "partial", f"{reason}; not all of the load is known, so none is removed"
        elif lasting >= now or now_s - state.changed_s < rules.down_cooldown_s:
            rule, reason = "cooldown", f"{reason}; less is needed, but not for long enough"
        else:
            wanted, rule = max(lasting, now - rules.step_down), "load"
    return Decision(wanted, rule, reason, 0, forecast, demand, capacity)


def _bounded(rules: PoolRules, decision: Decision, now: int, state: _State, now_s: float) -> Decision:
    """Return the decision within floor and ceiling, which hold at any time, with the state after it."""
    wanted = min(max(decision.wanted, rules.min_replicas), rules.ceiling)
    if wanted > decision.wanted:
        decision.rule, decision.reason = "floor", f"{decision.reason}; min_replicas is {wanted}"
    elif wanted < decision.wanted:
        bound = "cost_per_hour allows" if wanted < rules.max_replicas else "max_replicas is"
        decision.rule, decision.reason = "ceiling", f"{decision.reason}; {bound} {wanted}"
    if wanted != now:
        state.changed_s, state.up_s = now_s, now_s if wanted > now else state.up_s
    decision.reason = f"{f'{now} → ' if wanted != now else ''}{wanted}: {decision.reason}"
    state.order(wanted - state.ready, now_s)
    state.wanted = decision.wanted = wanted
    decision.starting, decision.state = len(state.ordered), state.model_dump(mode="json")
    return decision


def _late_work(
    rules: PoolRules, load: Load, state: _State, capacity: float, forecast: float, start_s: float, now_s: float
) -> float:
    """Return the work per second that it takes to work off in time what will still wait when a replica ordered now
    would serve. In time: within ``wait_s`` of the class, and as long again as a replica takes to serve; in less,
    replicas would be added that have nothing to do once they are there."""
    ramp_s = rules.slow_start_s / 2  # a new replica gets half of its share in the mean
    ahead_s = start_s + ramp_s
    serving_s = load.ready * ahead_s
    for place, at_s in enumerate(state.ordered):
        told = load.starting_s if place < load.starting else None
        if told is not None or now_s - at_s < _LATE * start_s:
            left_s = max(0.0, at_s + start_s - now_s) if told is None else told
            serving_s += max(0.0, ahead_s - left_s - ramp_s)
    running = sum(load.running.values()) * load.cost / 2  # half of it is done, in the mean
    spare = max(0.0, capacity * serving_s - forecast * ahead_s - running)
    late = 0.0
    for priority in sorted(load.queued):
        work = load.queued[priority] * load.cost
        late += max(0.0, work - spare) / (rules.wait_of(priority) + ahead_s)
        spare = max(0.0, spare - work)
    return late


def _in_words(load: Load, forecast: float, demand: float, capacity: float, slots: float, least: int) -> str:
    if not load.any and demand < 1:
        return "no work"
    if not capacity:
        requests = f"{load.running_requests + load.queued_requests:.0f} requests, {load.ready} replicas ready"
        return f"{requests}, {slots:.0f} slots each" if slots else f"{requests}, what one can do is not known yet"
    late = f" and {demand - forecast:.0f} for what would wait too long" if demand > forecast else ""
    replicas = f"{capacity:.0f} a replica; {_count(least)} needed, {load.ready} ready"
    return f"{forecast:.0f} tokens/s expected{late}; {replicas}"


def _count(replicas: int) -> str:
    return f"{replicas} replica{'' if replicas == 1 else 's'}"
