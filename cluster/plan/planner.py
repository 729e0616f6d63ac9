"""How many replicas a scenario needs, at which operating point, what binds, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from cluster.plan.engine import Replica
from cluster.plan.replica import Forecast, Request, forecast
from cluster.plan.scenario import HOURS, Class, Pool, Price, Scenario, Slo, kind_of
from contract.errors import InvalidArgument

MONTH_H = 730.0
CHECKED = "plan_check.json"  # in an engine's folder
REQUESTS, ROUNDS = 2000, 5  # of a simulated load: so many, and so many more for each sequence that a replica holds
MOST_REQUESTS = 12_000  # of it: a plan simulates 90 to 130 loads; the most sequences, 2048, still come and go 6 times
DRAWN = 10_000  # requests of a class whose lengths are averaged
MOST_REFUSED = 0.05  # of a class: objectives hold for 95 of 100 requests
NEAR = 100  # see _reserved
ROUND_OFF = 1e-9  # of a number of replicas: 0.29 * 100 is a little less than 29
SEARCH = 9  # halvings of the interval in which the operating point is
GAINS = 1.05  # twice the slots or the KV cache bind if they make so many times the operating point
ALIKE = 0.1  # a class's parts of two hours' requests and work may differ by so much where one operating point holds
MOST_MIXES = 4  # operating points of a pool: each one more takes a seventh of a plan's time
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
    """Of a day, in the scenario's currency, and the replica-hours that are paid for. per_…: None without requests.
    reserved: kept day and night."""

    day: float
    month: float
    per_1000_tokens: float | None
    per_1000_output_tokens: float | None
    reserved: int
    reserved_hours: float
    on_demand_hours: float
    spot_hours: float


@dataclass
class Mix:
    """The operating point of an hour's mix of classes, and what ends it."""

    hour: int
    rate: float
    binds: str


@dataclass
class PoolPlan:
    """The plan of one pool.

    source: measured, published or roofline; the last two are estimates. error_p50_percent, error_p95_percent: of the
        step model. checked: its largest errors beside the bench, by figure of cluster.plan.check; {}: not compared.
    refused: part of the requests that are longer than ``longest`` tokens; means, forecast and cost are without them.
    hour: with the most work; the means and all that follows up to ``shares`` are of its mix of classes.
    rate: requests per second of one replica within the objectives, the operating point. forecast: at that rate.
    binds: what ends it: ttft_s, itl_s, e2e_s, kv, slots or steps. moves: what would move it.
    little: concurrency of that hour by Little's law, at its load of each replica.
    kv_sequences: that the KV cache holds. decode_batch: sequences whose step keeps itl_s, prompts counted.
    shares: of a step's seconds at the operating point: fixed, context (bandwidth), sequences, prefill (compute).
    others: operating points of the hours whose mix is another. rates, replicas: by hour.
    sensitivity: change in per cent of a day's cost, or of replica-hours where nothing is priced, by input, for 20 per
        cent less and more of it; None where the objectives are missed or too much is refused.
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
    refused: float
    longest: int
    hour: int
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
    others: list[Mix]
    rates: tuple[float, ...]
    headroom: float
    replicas: tuple[int, ...]
    cost: Cost
    sensitivity: dict[str, tuple[float | None, float | None]]
    check: str


@dataclass(frozen=True)
class Load:
    """An hour's mix of a pool's classes. weights: requests per second of each class. seconds: that a request of each
    takes of a replica that is full."""

    classes: tuple[Class, ...]
    weights: tuple[float, ...]
    seconds: tuple[float, ...]
    hour: int
    seed: int

    @property
    def parts(self) -> list[float]:
        """Each class's part of the requests."""
        return [weight / sum(self.weights) for weight in self.weights]

    @property
    def request_s(self) -> float:
        """Seconds that the mean request takes of a full replica."""
        return sum(part * seconds for part, seconds in zip(self.parts, self.seconds, strict=True))

    @property
    def work(self) -> float:
        """Full replicas that the hour's requests take."""
        return sum(self.weights) * self.request_s

    def apart(self, other: Load) -> float:
        """Return by how much a class's part of the requests or of the work differs, at most."""
        mine_s, its_s = self.request_s, other.request_s
        return max(
            max(abs(mine - its), seconds * abs(mine / mine_s - its / its_s))
            for seconds, mine, its in zip(self.seconds, self.parts, other.parts, strict=True)
        )

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        return rng.choices(self.classes, self.weights)[0].draw(rng)

    def requests(self, rate: float, count: int) -> list[Request]:
        """Return Poisson arrivals, the same requests at every rate."""
        return [Request(at / rate, *lengths) for at, lengths in _arrivals(self, count)]

    def means(self, longest: int, place: str = "") -> tuple[float, float, float]:
        """Return mean tokens of prompt and answer of requests up to ``longest``, and the part of those that are longer.
        Raises InvalidArgument: too many of a class are longer."""
        input_tokens = output_tokens = taken = 0.0
        for number, (one, weight) in enumerate(zip(self.classes, self.weights, strict=True)):
            prompt, answer, part = _means(one, self.seed, longest)
            if 1 - part > MOST_REFUSED and (weight or any(one.rates())):
                problem = f"must be requests of at most {longest} tokens, {1 - MOST_REFUSED:.0%} of them"
                raise InvalidArgument(f"{place}.classes.{number}", f"{problem}; got {1 - part:.0%} that are longer")
            input_tokens += weight * prompt
            output_tokens += weight * answer
            taken += weight * part
        return input_tokens / taken, output_tokens / taken, 1 - taken / sum(self.weights)


@cache
def _means(one: Class, seed: int, longest: int) -> tuple[float, float, float]:
    """Return the mean tokens of prompt and answer, 0 for requests above ``longest``, and the part that is not above."""
    rng = random.Random(seed)
    drawn = [sizes for sizes in (one.draw(rng) for _ in range(DRAWN)) if sum(sizes) <= longest]
    return sum(prompt for prompt, _ in drawn) / DRAWN, sum(answer for _, answer in drawn) / DRAWN, len(drawn) / DRAWN


@lru_cache(maxsize=1)  # a search simulates one load at many rates
def _arrivals(load: Load, count: int) -> list[tuple[float, tuple[int, int]]]:
    """Return requests that come at a rate of 1: instants and lengths."""
    rng, at, found = random.Random(load.seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(1.0)
        found.append((at, load.lengths(rng)))
    return [(count / at * each, lengths) for each, lengths in found]


def plan(scenario: Scenario, path: Path) -> list[PoolPlan]:
    """Return the plan of every pool. path: of the scenario, for commands. Raises InvalidArgument: an objective cannot
    be met, or an engine was not calibrated."""
    return [_plan(name, pool, scenario.seed, path) for name, pool in scenario.pools.items()]


def loads_of(pool: Pool, replica: Replica, seed: int, place: str) -> list[Load]:
    """Return the mix of each hour that has requests, that with the most work first. Raises as ``Load.means``."""
    by_hour = list(zip(*(one.rates() for one in pool.classes), strict=True))
    if not any(map(any, by_hour)):
        by_hour = [(1.0,) * len(pool.classes)]
    day = Load(pool.classes, tuple(map(sum, zip(*by_hour, strict=True))), (), 0, seed)
    day.means(replica.longest, place)
    seconds = []
    for one, requests in zip(pool.classes, day.weights, strict=True):
        prompt, answer, part = _means(one, seed, replica.longest)
        seconds.append(part / _most(replica, prompt / part, answer / part) if requests else 0.0)
    hours = ((hour, weights) for hour, weights in enumerate(by_hour) if any(weights))
    loads = [Load(pool.classes, weights, tuple(seconds), hour, seed) for hour, weights in hours]
    return sorted(loads, key=lambda load: -load.work)


def _alike(loads: Sequence[Load]) -> dict[Load, Load]:
    """Return the mix whose operating point each one has: the first one's, or that of the most different ones."""
    found = dict.fromkeys(loads, loads[0])
    for _ in range(MOST_MIXES - 1):
        farthest = max(loads, key=lambda load: load.apart(found[load]))
        if farthest.apart(found[farthest]) <= ALIKE:
            break
        found |= {load: farthest for load in loads if load.apart(farthest) < load.apart(found[load])}
    return found


def _sequences(replica: Replica, input_tokens: float, output_tokens: float) -> float:
    return max(1.0, min(replica.slots, replica.kv_tokens / (input_tokens + output_tokens)))


def _most(replica: Replica, input_tokens: float, output_tokens: float) -> float:
    """Return about how many requests per second a full replica ends."""
    sequences = _sequences(replica, input_tokens, output_tokens)
    context, ratio = input_tokens + output_tokens / 2, input_tokens / output_tokens
    return sequences / replica.step.seconds(sequences, sequences * context, sequences * ratio) / output_tokens


def operating_point(replica: Replica, load: Load, slo: Slo, place: str) -> tuple[float, Forecast, str]:
    """Return the most requests per second within the objectives, what they do, and what ends it. Raises
    InvalidArgument: an objective is missed by requests that are alone, or too many are too long."""
    load.means(replica.longest, place)
    rate, found, above = _search(replica, load, slo, place)
    return rate, found, _binds(replica, load, slo, rate, above)


def _search(replica: Replica, load: Load, slo: Slo, place: str) -> tuple[float, Forecast, str]:
    """Return the operating point, its forecast, and the objective that is missed at the next rate that was tried."""
    count = _count(replica, load)
    low, high, best, above = 0.0, _capacity(replica, load, count), None, ""
    for _ in range(SEARCH):
        rate = (low + high) / 2
        found = _simulated(replica, load, rate, count)
        if _within(found, slo):
            low, best = rate, found
        else:
            high, above = rate, _missed(found, slo)
    if best is None:
        assert above, "no queue grows at a five-hundredth of the capacity"
        got, least = getattr(slo, above), getattr(found, f"{above[:-2]}_p95_s")
        problem = f"must be at least {least:.3g}, which requests alone take at hour {load.hour}, got {got:g}"
        raise InvalidArgument(f"{place}.slo.{above}", problem)
    return low, best, above


def _binds(replica: Replica, load: Load, slo: Slo, rate: float, above: str) -> str:
    """Return what ends the operating point ``rate``. above: the objective that is missed next to it, or ""."""
    count = _count(replica, load)
    over = _simulated(replica, load, 1.3 * rate, count)
    if max(over.full_slots, over.full_kv) > 0.5:
        lacked, more = "slots", dataclasses.replace(replica, slots=2 * replica.slots)
        if over.full_kv > over.full_slots:
            same = replica.longest  # whatever the cache holds
            lacked, more = "kv", dataclasses.replace(replica, kv_tokens=2 * replica.kv_tokens, max_seq_len=same)
        # Slots are full whatever an overloaded replica lacks.
        gained = _capacity(more, load, count) / _capacity(replica, load, count)
        if gained > GAINS and _within(_simulated(more, load, GAINS * rate, count), slo):
            return lacked
    return above or _missed(over, slo) or "steps"


def _count(replica: Replica, load: Load) -> int:
    """Return the requests of a simulated load."""
    input_tokens, output_tokens, _ = load.means(replica.longest)
    return min(MOST_REQUESTS, REQUESTS + ROUNDS * int(_sequences(replica, input_tokens, output_tokens)))


@cache
def _capacity(replica: Replica, load: Load, count: int) -> float:
    """Return the requests per second that a replica ends when more of them come."""
    input_tokens, output_tokens, refused = load.means(replica.longest)
    full = _simulated(replica, load, 1.5 * _most(replica, input_tokens, output_tokens), count)
    # Their lengths are not quite the mean ones: neither more requests nor more tokens than it ends.
    return min(full.requests_per_s, full.tokens_per_s / output_tokens) / (1 - refused)


def _simulated(replica: Replica, load: Load, rate: float, count: int) -> Forecast:
    return forecast(replica, load.requests(rate, count), count // 4)


def _concurrency(replica: Replica, load: Load, rate: float, replicas: int) -> float:
    """Return the requests that are at once in so many replicas, by Little's law. rate: of all of them together."""
    return rate * _simulated(replica, load, rate / replicas, _count(replica, load)).e2e_mean_s if rate else 0.0


def _within(found: Forecast, slo: Slo) -> bool:
    return found.stable and not _missed(found, slo)


def _missed(found: Forecast, slo: Slo) -> str:
    """Return the objective that is missed by most, "" if none is."""
    over = {name: getattr(found, f"{name[:-2]}_p95_s") / getattr(slo, name) for name in ("itl_s", "ttft_s", "e2e_s")}
    name = max(over, key=lambda each: over[each])
    return name if over[name] > 1 else ""


def replicas_by_hour(pool: Pool, hourly: Sequence[float], rate: float) -> tuple[int, ...]:
    """Return the replicas that serve each hour's rate with the headroom free."""
    needed = (math.ceil(per_s * (1 + pool.headroom) / rate - ROUND_OFF) for per_s in hourly)
    return tuple(max(pool.min_replicas, count) for count in needed)


def cost_of(price: Price, replicas: Sequence[int], tokens: float, output_tokens: float) -> Cost:
    """Return the least cost of a day's replicas. tokens: of prompts and answers in a day; output_tokens: of answers."""

    def day_of(reserved: int) -> float:
        on_demand, spot = _beyond(price, replicas, reserved)
        return reserved * HOURS * price.reserved + on_demand * price.on_demand + spot * price.spot

    reserved = min(_reserved(price, replicas), key=lambda count: round(day_of(count), 9))  # the fewest of equal ones
    day, (on_demand, spot) = day_of(reserved), _beyond(price, replicas, reserved)
    per_token, per_output = (1000 * day / count if count else None for count in (tokens, output_tokens))
    hours = float(reserved * HOURS), float(on_demand), float(spot)
    return Cost(day, day / HOURS * MONTH_H, per_token, per_output, reserved, *hours)


def _reserved(price: Price, replicas: Sequence[int]) -> list[int]:
    """Return numbers of reserved replicas of which one costs least, in order. The cost is linear between two hours'
    counts, but for the rounding of spot replicas, which repeats itself within NEAR if the share has two decimals."""
    if not price.reserved:
        return [0]
    share = price.spot_share if price.spot else 0.0
    least = 0 if price.on_demand else max(count - math.floor(count * share + ROUND_OFF) for count in replicas)
    near = {count + step for count in {0, least, *replicas} for step in range(-NEAR, NEAR + 1)}
    return sorted(count for count in near if least <= count <= max(replicas))


def _beyond(price: Price, replicas: Sequence[int], reserved: int) -> tuple[int, int]:
    """Return the on-demand and the spot hours of a day beyond so many reserved replicas."""
    left = [max(0, count - reserved) for count in replicas]
    if not price.on_demand:
        spot = sum(left) if price.spot else 0
    else:
        share = price.spot_share if 0 < price.spot < price.on_demand else 0.0
        spot = sum(math.floor(count * share + ROUND_OFF) for count in left)
    return sum(left) - spot, spot


def _plan(name: str, pool: Pool, seed: int, path: Path) -> PoolPlan:
    place = f"pools.{name}"
    replica = kind_of(pool, place)
    loads = loads_of(pool, replica, seed, place)
    load, alike = loads[0], _alike(loads)
    points = {one: operating_point(replica, one, pool.slo, place) for one in dict.fromkeys(alike.values())}
    rate, found, binds = points[load]
    # Of two mixes that share an operating point, a replica does as much work.
    by_hour = {one.hour: points[like][0] * (like.request_s / one.request_s) for one, like in alike.items()}
    rates = tuple(by_hour.get(hour, rate) for hour in range(HOURS))
    hourly = tuple(map(sum, zip(*(one.rates() for one in pool.classes), strict=True)))
    as_first = tuple(per_s * rate / point for per_s, point in zip(hourly, rates, strict=True))
    replicas = replicas_by_hour(pool, as_first, rate)
    of_day = dataclasses.replace(load, weights=tuple(map(sum, zip(*(one.weights for one in loads), strict=True))))
    input_tokens, output_tokens, refused = of_day.means(replica.longest)
    requests = 3600 * sum(hourly) * (1 - refused)
    cost = cost_of(pool.price, replicas, requests * (input_tokens + output_tokens), requests * output_tokens)
    input_tokens, output_tokens, refused_then = load.means(replica.longest)
    context, ratio, step = input_tokens + output_tokens / 2, input_tokens / output_tokens, replica.step
    of_step = {one: getattr(step, one) for one in ("machine", "source", "error_p50_percent", "error_p95_percent")}
    return PoolPlan(
        name=name,
        **of_step,
        checked=_checked(Path(pool.engine), step.made) if pool.engine else {},
        requests_per_s=hourly,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        refused=refused,
        longest=replica.longest,
        hour=load.hour,
        rate=rate,
        forecast=found,
        binds=binds,
        moves=WHAT_MOVES[binds],
        little=(1 - refused_then) * _concurrency(replica, load, hourly[load.hour], replicas[load.hour]),
        slots=replica.slots,
        kv_sequences=replica.kv_tokens / (input_tokens + output_tokens),
        decode_batch=step.operating_point(pool.slo.itl_s, replica.slots, round(context), ratio),
        tokens_per_step=step.tokens_per_step,
        shares=_shares(replica, found.sequences, input_tokens, output_tokens),
        others=[Mix(one.hour, point, ends) for one, (point, _, ends) in points.items() if one != load],
        rates=rates,
        headroom=pool.headroom,
        replicas=replicas,
        cost=cost,
        sensitivity=_sensitivity(pool, replica, load, as_first, rate, cost, replicas),
        check=_check(name, pool, path, rate, load),
    )


def _checked(folder: Path, made: str) -> dict[str, float]:
    """Return what ``--check`` found of a step model. made: instant of it."""
    try:
        kept = json.loads((folder / CHECKED).read_text("utf-8"))
        return dict(kept["errors"]) if kept["of"] == made else {}
    except (OSError, ValueError, LookupError, TypeError):  # there is none, or it was cut off
        return {}


def _check(name: str, pool: Pool, path: Path, rate: float, load: Load) -> str:
    """Return the command that checks the forecast: here, or of an estimate on such a replica."""
    if pool.engine:
        return shlex.join(["python", "-m", "cluster", "plan", str(path), f"--check={name}"])
    mix = enumerate(zip(load.classes, load.parts, strict=True))
    runs = [_bench(one, rate * part, seed) for seed, (one, part) in mix if part]
    if len(runs) == 1:
        return runs[0]
    return " & ".join([*(f"{run} --out check-{nth}" for nth, run in enumerate(runs)), "wait"])  # all at once: the mix


def _bench(one: Class, rate: float, seed: int) -> str:
    """Return the bench's command for a class. seed: classes of one differ in their prompts and instants."""
    if one.trace:
        load = f"--arrivals {shlex.quote(f'trace:{one.trace},{rate / fmean(one.rates()):.3g}')}"
    else:
        sizes = [f"lognormal:{size.p50:g},{size.sigma:.3g},{size.most}" for size in (one.input, one.output) if size]
        load = f"--arrivals poisson:{rate:.3g} --input {sizes[0]} --output {sizes[1]}"
    return f"python -m benchmarks run --url HOST:8001 --tokenizer FOLDER {load} --duration 60 --seed {seed}"


def _shares(replica: Replica, sequences: float, input_tokens: float, output_tokens: float) -> dict[str, float]:
    """Return the parts of a mean step; a prompt is read in steps of its own, not a little of it in each."""
    step, context = replica.step, sequences * (input_tokens + output_tokens / 2)
    read = sequences * input_tokens / output_tokens
    chunk = max(read, min(input_tokens, replica.chunk_tokens))
    plain_s = step.seconds(sequences, context, 0)
    parts = {
        "fixed": step.seconds(0, 0, 0),
        "context": step.context_token_s * context,
        "prefill": (step.seconds(sequences, context, chunk) - plain_s) * read / chunk,
    }
    parts["sequences"] = max(0.0, plain_s - parts["fixed"] - parts["context"])
    return {name: seconds / sum(parts.values()) for name, seconds in parts.items()}


def _sensitivity(
    pool: Pool, replica: Replica, load: Load, hourly: Sequence[float], rate: float, cost: Cost, replicas: Sequence[int]
) -> dict[str, tuple[float | None, float | None]]:
    """Return the change of cost, else of replica-hours, in per cent for each input less and more 20 per cent.

    hourly: requests per second of the load's mix that need each hour's replicas. rate: the operating point, which
    requests, headroom and prices do not change; those of other mixes change with it.
    """
    base = cost.day or float(sum(replicas))

    def changed(what: str, factor: float) -> float | None:
        kind, mix, rates, update = replica, load, hourly, dict[str, Any]()
        if what == "requests":
            rates = [per_s * factor for per_s in hourly]
        elif what in ("input", "output"):
            mix = dataclasses.replace(load, classes=tuple(one.scaled(what, factor) for one in load.classes))
        elif what == "step time":
            terms: dict[str, Any] = {name: seconds * factor for name, seconds in replica.step.terms.items()}
            kind = dataclasses.replace(replica, step=dataclasses.replace(replica.step, **terms))
        elif what == "objectives":
            update = {"slo": Slo(**{name: limit * factor for name, limit in pool.slo})}
        elif what == "headroom":
            update = {"headroom": pool.headroom * factor}
        else:
            prices = {name: getattr(pool.price, name) * factor for name in ("on_demand", "reserved", "spot")}
            update = {"price": pool.price.model_copy(update=prices)}
        other, point = pool.model_copy(update=update), rate
        if (kind, mix, other.slo) != (replica, load, pool.slo):
            try:
                point, *_ = _search(kind, mix, other.slo, "")
            except InvalidArgument:
                return None
        count = replicas_by_hour(other, rates, point)
        day = cost_of(other.price, count, 0.0, 0.0).day  # tokens do not change what a day costs
        return 100 * ((day or sum(count)) / base - 1) if base else 0.0

    inputs = ["requests", "input", "output", "step time", "headroom"]
    inputs += ["objectives"] * any(limit < math.inf for _, limit in pool.slo) + ["price"] * bool(cost.day)
    return {what: (changed(what, 0.8), changed(what, 1.2)) for what in inputs}
