"""How many replicas a scenario needs, at which operating point, what binds, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.plan import estimate
from cluster.plan.engine import Replica
from cluster.plan.replica import Forecast, Request, forecast
from cluster.plan.scenario import HOURS, Class, Pool, Price, Scenario, Slo
from contract.errors import InvalidArgument, TridentError

MONTH_H = 730.0
CHECKED = "plan_check.json"  # in an engine's folder
REQUESTS, ROUNDS = 600, 10  # of a simulated load: so many, and so many more for each sequence that a replica holds
SEARCH = 9  # halvings of the interval in which the operating point is
WHAT_MOVES = {
    "ttft_s": "horizontal: more replicas, less of a queue at each; vertical: faster prefill, cached prefixes",
    "itl_s": "vertical: a faster step (fewer bits, more cards, a smaller max_num_tokens); more replicas help little",
    "e2e_s": "vertical: a faster step; horizontal: more replicas, each with fewer sequences in its batch",
    "kv": "vertical: more KV cache (memory, a smaller KV type) or shorter max_tokens; horizontal: more replicas",
    "slots": "vertical: a larger max_batch_size; horizontal: more replicas",
    "steps": "horizontal: more replicas; vertical: a faster step",
}


@dataclass
class Cost:
    """Of a day, in the scenario's currency, with the replicas of each kind that are paid for, in replica-hours.
    reserved: replicas kept day and night."""

    day: float
    month: float
    per_1000_tokens: float
    per_1000_output_tokens: float
    reserved: int
    reserved_hours: float
    on_demand_hours: float
    spot_hours: float


@dataclass
class PoolPlan:
    """The plan of one pool.

    source: measured, published or roofline; the last two are estimates. error_p50_percent, error_p95_percent: of the
    step model. checked: the largest errors of the forecasts of this step model beside the bench, as parts of what was
    measured, by figure of cluster.plan.check; none where they were not compared.
    rate: requests per second that one replica serves within the objectives: the operating point.
    forecast: at that rate. binds: what ends it: ttft_s, itl_s, e2e_s, kv, slots or steps. moves: what would move it.
    little: concurrency of the peak hour by Little's law, requests per second times seconds of each.
    kv_sequences: that the KV cache holds. decode_batch: sequences whose step keeps itl_s, prompts counted.
    shares: of a step's seconds at the operating point: fixed, context (bandwidth), sequences, prefill (compute).
    replicas: by hour. sensitivity: change in per cent of a day's cost, or of its replica-hours where nothing is priced,
    by input, for 20 per cent less and more of it; None where the objectives are missed.
    check: the command that checks the forecast.
    """

    name: str
    machine: str
    source: str
    error_p50_percent: float
    error_p95_percent: float
    checked: dict[str, float]
    requests_per_s: tuple[float, ...]
    input_tokens: float
    output_tokens: float
    rate: float
    forecast: Forecast
    binds: str
    moves: str
    little: float
    slots: int
    kv_sequences: float
    decode_batch: int
    tokens_per_step: float
    shares: dict[str, float]
    headroom: float
    replicas: tuple[int, ...]
    cost: Cost
    sensitivity: dict[str, tuple[float | None, float | None]]
    check: str


@dataclass(frozen=True)
class _Load:
    """The peak hour's mix of a pool's classes."""

    classes: tuple[Class, ...]
    weights: tuple[float, ...]
    seed: int

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        one = rng.choices(self.classes, self.weights)[0]
        assert one.input is not None and one.output is not None, "the scenario was checked"
        return one.input.draw(rng), one.output.draw(rng)

    def requests(self, rate: float, count: int) -> list[Request]:
        """Return Poisson arrivals, the same requests at every rate."""
        rng, at_s, found = random.Random(self.seed), 0.0, []
        for _ in range(count):
            at_s += rng.expovariate(rate)
            found.append(Request(at_s, *self.lengths(rng)))
        return found

    def means(self) -> tuple[float, float]:
        rng = random.Random(self.seed)
        drawn = [self.lengths(rng) for _ in range(500)]
        return sum(size for size, _ in drawn) / len(drawn), sum(size for _, size in drawn) / len(drawn)


def plan(scenario: Scenario, path: Path) -> list[PoolPlan]:
    """Return the plan of every pool. path: of the scenario; engines and commands are relative to where it is run.

    Raises InvalidArgument: an objective cannot be met. Raises NotFound, EngineFailed: an engine was not calibrated.
    """
    return [_plan(name, pool, scenario.seed, path) for name, pool in scenario.pools.items()]


def kind_of(pool: Pool, place: str) -> Replica:
    """Return the pool's kind of replica. Raises InvalidArgument for ``place``, NotFound, EngineFailed."""
    if pool.estimate is not None:
        return estimate.replica(pool.estimate, f"{place}.estimate")
    try:
        kind = Replica.of_engine(Path(pool.engine))
    except TridentError as exc:
        raise InvalidArgument(f"{place}.engine", f"must be a calibrated engine: {exc}") from exc
    return dataclasses.replace(kind, step=kind.step.of_texts(pool.acceptance, f"{place}.acceptance"))


def load_of(pool: Pool, seed: int) -> tuple[_Load, tuple[float, ...]]:
    """Return the mix at the peak hour, and requests per second by hour."""
    rates = [one.rates() for one in pool.classes]
    hourly = tuple(sum(of_class[hour] for of_class in rates) for hour in range(HOURS))
    peak = hourly.index(max(hourly))
    weights = tuple(of_class[peak] for of_class in rates)
    return _Load(pool.classes, weights if any(weights) else (1.0,) * len(weights), seed), hourly


def operating_point(replica: Replica, load: _Load, slo: Slo, place: str) -> tuple[float, Forecast, str]:
    """Return the most requests per second within the objectives, what they do, and what ends it.

    Raises InvalidArgument: an objective is missed by requests that are alone.
    """
    input_tokens, output_tokens = load.means()
    if input_tokens + output_tokens > replica.longest:
        mean = f"{input_tokens + output_tokens:.0f} in the mean"
        raise InvalidArgument(f"{place}.classes", f"must be requests of at most {replica.longest} tokens, got {mean}")
    sequences = max(1.0, min(replica.slots, replica.kv_tokens / (input_tokens + output_tokens)))
    context, ratio = input_tokens + output_tokens / 2, input_tokens / output_tokens
    most = sequences / replica.step.seconds(sequences, sequences * context, sequences * ratio) / output_tokens
    alone = forecast(replica, load.requests(most / 1000, 40))
    if name := _missed(alone, slo):
        got, least = getattr(slo, name), getattr(alone, f"{name[:-2]}_p95_s")
        raise InvalidArgument(
            f"{place}.slo.{name}", f"must be at least {least:.3g}, which requests alone take, got {got:g}"
        )
    count = REQUESTS + ROUNDS * int(sequences)
    low, high, best = most / 1000, 1.2 * most, alone
    for _ in range(SEARCH):
        rate = (low + high) / 2
        found = forecast(replica, load.requests(rate, count), count // 4)
        if found.stable and not _missed(found, slo):
            low, best = rate, found
        else:
            high = rate
    over = forecast(replica, load.requests(1.3 * low, count), count // 4)
    if name := _missed(over, Slo(itl_s=slo.itl_s)):
        return low, best, name
    if max(over.full_slots, over.full_kv) > 0.5:
        return low, best, "kv" if over.full_kv > over.full_slots else "slots"
    return low, best, _missed(over, slo) or "steps"


def _missed(found: Forecast, slo: Slo) -> str:
    """Return the objective that is missed, "" if none is."""
    reached = {"itl_s": found.itl_p95_s, "ttft_s": found.ttft_p95_s, "e2e_s": found.e2e_p95_s}
    return next((name for name, value in reached.items() if value > getattr(slo, name)), "")


def replicas_by_hour(pool: Pool, hourly: Sequence[float], rate: float) -> tuple[int, ...]:
    """Return the replicas that serve each hour's rate with the headroom free."""
    needed = (math.ceil(per_s * (1 + pool.headroom) / rate - 1e-9) for per_s in hourly)
    return tuple(max(pool.min_replicas, count) for count in needed)


def cost_of(price: Price, replicas: Sequence[int], tokens: float, output_tokens: float) -> Cost:
    """Return the least cost of a day's replicas: so many reserved ones that one more would cost more than it saves.

    tokens, output_tokens: of a day, prompts and answers; answers alone.
    """
    offers = [kind for kind in (price.on_demand, price.spot) if kind]
    other = price.on_demand or price.reserved or (min(offers) if offers else 0.0)
    cheaper = price.spot if price.spot and price.spot < other else other
    best: Cost | None = None
    for reserved in range(max(replicas) + 1) if price.reserved else [0]:
        left = [max(0, count - reserved) for count in replicas]
        spot = [math.floor(count * price.spot_share) if cheaper < other else 0 for count in left]
        elastic = sum(left) - sum(spot)
        day = reserved * HOURS * price.reserved + elastic * other + sum(spot) * cheaper
        if best is None or day < best.day - 1e-9:
            per_token, per_output = (day / count if count else 0.0 for count in (tokens, output_tokens))
            kept = float(reserved * HOURS), float(elastic), float(sum(spot))
            best = Cost(day, day / HOURS * MONTH_H, 1000 * per_token, 1000 * per_output, reserved, *kept)
    assert best is not None
    return best


def _plan(name: str, pool: Pool, seed: int, path: Path) -> PoolPlan:
    place = f"pools.{name}"
    replica, (load, hourly) = kind_of(pool, place), load_of(pool, seed)
    rate, found, binds = operating_point(replica, load, pool.slo, place)
    input_tokens, output_tokens = load.means()
    replicas = replicas_by_hour(pool, hourly, rate)
    cost = _priced(pool, replicas, hourly, input_tokens, output_tokens)
    context, ratio = input_tokens + output_tokens / 2, input_tokens / output_tokens
    batch = replica.step.operating_point(pool.slo.itl_s, replica.slots, round(context), ratio)
    step = replica.step
    return PoolPlan(
        name=name,
        machine=step.machine,
        source=step.source,
        error_p50_percent=step.error_p50_percent,
        error_p95_percent=step.error_p95_percent,
        checked=_checked(Path(pool.engine), step.made) if pool.engine else {},
        requests_per_s=hourly,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        rate=rate,
        forecast=found,
        binds=binds,
        moves=WHAT_MOVES[binds],
        little=max(hourly) * found.e2e_mean_s,
        slots=replica.slots,
        kv_sequences=replica.kv_tokens / (input_tokens + output_tokens),
        decode_batch=batch,
        tokens_per_step=step.tokens_per_step,
        shares=_shares(replica, found.sequences, context, ratio),
        headroom=pool.headroom,
        replicas=replicas,
        cost=cost,
        sensitivity=_sensitivity(pool, replica, load, hourly, place, rate, cost, replicas),
        check=_check(name, pool, path, rate),
    )


def _checked(folder: Path, made: str) -> dict[str, float]:
    """Return what ``--check`` found of a step model. made: instant of it."""
    kept = json.loads((folder / CHECKED).read_text("utf-8")) if (folder / CHECKED).exists() else {}
    return kept["errors"] if kept.get("of") == made else {}


def _check(name: str, pool: Pool, path: Path, rate: float) -> str:
    """Return the command that checks the forecast: here, or of an estimate on such a replica."""
    if pool.engine:
        return f"python -m cluster plan {path} --check {name}"
    sizes = [getattr(pool.classes[0], kind) for kind in ("input", "output")]
    lengths = [f"lognormal:{size.p50:g},{size.sigma:.3g},{size.most}" for size in sizes]
    load = f"--arrivals poisson:{rate:.3g} --input {lengths[0]} --output {lengths[1]} --duration 60"
    return f"python -m benchmarks run --url HOST:8001 --tokenizer FOLDER {load}"


def _priced(
    pool: Pool, replicas: Sequence[int], hourly: Sequence[float], input_tokens: float, output_tokens: float
) -> Cost:
    requests = 3600 * sum(hourly)
    return cost_of(pool.price, replicas, requests * (input_tokens + output_tokens), requests * output_tokens)


def _shares(replica: Replica, sequences: float, context: float, ratio: float) -> dict[str, float]:
    """Return the parts of a mean step."""
    step = replica.step
    whole = step.seconds(sequences, sequences * context, sequences * ratio)
    parts = {
        "fixed": step.seconds(0, 0, 0),
        "context": step.context_token_s * sequences * context,
        "prefill": whole - step.seconds(sequences, sequences * context, 0),
    }
    parts["sequences"] = whole - sum(parts.values())
    return {name: seconds / whole for name, seconds in parts.items()}


def _sensitivity(
    pool: Pool,
    replica: Replica,
    load: _Load,
    hourly: tuple[float, ...],
    place: str,
    rate: float,
    cost: Cost,
    replicas: Sequence[int],
) -> dict[str, tuple[float | None, float | None]]:
    """Return the change of cost, else of replica-hours, in per cent for each input less and more 20 per cent.

    rate: the operating point, which requests, headroom and prices do not change.
    """

    def value(cost: Cost, replicas: Sequence[int]) -> float:
        return cost.day or float(sum(replicas))

    base = value(cost, replicas)

    def changed(what: str, factor: float) -> float | None:
        other, kind, mix, rates = pool, replica, load, hourly
        if what == "requests":
            rates = tuple(rate * factor for rate in hourly)
        elif what in ("input", "output"):
            classes = [one.model_copy(update={what: getattr(one, what).scaled(factor)}) for one in load.classes]
            mix = dataclasses.replace(load, classes=tuple(classes))
        elif what == "step time":
            terms: dict[str, Any] = {name: seconds * factor for name, seconds in replica.step.terms.items()}
            kind = dataclasses.replace(replica, step=dataclasses.replace(replica.step, **terms))
        elif what == "objectives":
            slo = Slo(**{name: limit * factor for name, limit in pool.slo})
            other = pool.model_copy(update={"slo": slo})
        elif what == "headroom":
            other = pool.model_copy(update={"headroom": pool.headroom * factor})
        else:
            prices = pool.price.model_dump()
            scaled = {name: prices[name] * factor for name in ("on_demand", "reserved", "spot")}
            other = pool.model_copy(update={"price": Price(**prices | scaled)})
        point = rate
        if (kind, mix, other.slo) != (replica, load, pool.slo):
            try:
                point, _, _ = operating_point(kind, mix, other.slo, place)
            except InvalidArgument:
                return None
        count = replicas_by_hour(other, rates, point)
        return 100 * (value(_priced(other, count, rates, *mix.means()), count) / base - 1) if base else 0.0

    inputs = ["requests", "input", "output", "step time", "headroom"]
    inputs += ["objectives"] * any(limit < math.inf for _, limit in pool.slo) + ["price"] * bool(cost.day)
    return {what: (changed(what, 0.8), changed(what, 1.2)) for what in inputs}
