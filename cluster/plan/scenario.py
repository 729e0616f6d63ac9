"""A scenario: the requests of every hour, their objectives, and prices of replicas (docs/capacity.md)."""

from __future__ import annotations

import http.client
import math
import os
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cluster.plan import estimate
from cluster.plan.engine import Replica
from cluster.plan.estimate import Accelerator
from contract import prometheus, step_model, toml_table
from contract.errors import InvalidArgument, TridentError
from contract.toml_table import Amount, Part, Positive, Table

HOURS = 24
MOST_BYTES = 4 * 1024 * 1024  # of a metrics page
_Z95 = 1.6449  # standard deviations from the median to the 95th percentile of a normal
MOST_TOKENS = 1_000_000  # as in the benchmarks, which check a plan
MOST_AMOUNT = 1e9
_Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
_Percentile = Annotated[float, Field(ge=1, le=MOST_TOKENS, allow_inf_nan=False)]


def _by_hour(value: object) -> tuple[object, ...]:
    """A number holds for every hour."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (value,) * HOURS
    if not isinstance(value, (list, tuple)) or len(value) != HOURS:
        raise ValueError(f"must be a number, or {HOURS} of them, got {value!r}")
    return tuple(value)


ByHour = Annotated[tuple[Amount, ...], BeforeValidator(_by_hour)]


class Lengths(Table):
    """A log-normal distribution of tokens. p50, p95: percentiles; equal ones are a fixed length. most: the longest."""

    p50: _Percentile
    p95: _Percentile
    most: _Tokens = MOST_TOKENS

    @model_validator(mode="after")
    def _ordered(self) -> Lengths:
        if self.p95 < self.p50:
            raise ValueError(f"p95: must be at least p50, got {self.p95:g}")
        return self

    @property
    def sigma(self) -> float:
        return math.log(self.p95 / self.p50) / _Z95

    def draw(self, rng: random.Random) -> int:
        return min(self.most, max(1, round(rng.lognormvariate(math.log(self.p50), self.sigma))))

    def scaled(self, factor: float) -> Lengths:
        p50, p95, most = (_bounded(factor * tokens) for tokens in (self.p50, self.p95, self.most))
        return Lengths(p50=p50, p95=p95, most=round(most))


def _bounded(tokens: float) -> float:
    return min(max(1.0, tokens), MOST_TOKENS)


def _fixed(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"p50": value, "p95": value, "most": value}
    if not isinstance(value, (dict, Lengths)):
        raise ValueError(f"must be a whole number or {{p50, p95, most}}, got {value!r}")
    return value


def _not_all_cut(lengths: Lengths) -> Lengths:  # not of Lengths itself: scaled ones may be
    if lengths.most < lengths.p50:
        raise ValueError(f"most: must be at least p50, got {lengths.most}")
    return lengths


_Lengths = Annotated[Lengths, BeforeValidator(_fixed), AfterValidator(_not_all_cut)]


class Class(Table):
    """Requests of one kind, by one of four sources.

    requests_per_s: by hour, or a number for every hour. users: likewise, and requests_per_user_hour of each.
    trace: JSON lines of at_s, input_tokens and output_tokens, as the benchmarks replay them: rates, and the requests
        that are drawn, in place of ``input`` and ``output``.
    metrics: of a gateway, http://HOST:PORT/metrics: rate and lengths of its pool of this name, over ``seconds``; ""
        is the one pool of a gateway that names none.
    """

    name: Annotated[str, Field(max_length=100)]
    requests_per_s: ByHour | None = None
    users: ByHour | None = None
    requests_per_user_hour: Positive = 10.0
    input: _Lengths | None = None
    output: _Lengths | None = None
    trace: str = ""
    metrics: Annotated[str, Field(pattern=r"^(https?://.+)?$")] = ""
    seconds: Annotated[float, Field(ge=1, le=3600)] = 10.0
    _recorded: tuple[tuple[int, int], ...] = ()  # tokens of prompt and answer of a trace's requests

    @model_validator(mode="after")
    def _one_source(self) -> Class:
        told = [name for name in ("requests_per_s", "users", "trace", "metrics") if getattr(self, name)]
        if len(told) != 1:
            allowed = "must be given, or users, trace or metrics, one of them"
            raise ValueError(f"requests_per_s: {allowed}; got {told or 'none'}")
        if not (self.name or self.metrics):
            raise ValueError("name: must have at least 1 character without metrics, got ''")
        for name, source in (("requests_per_user_hour", "users"), ("seconds", "metrics")):
            if name in self.model_fields_set and source not in told:
                raise ValueError(f"{name}: must be left out without {source}")
        for name in ("input", "output"):
            if self.trace or self.metrics:
                if name in self.model_fields_set:
                    raise ValueError(f"{name}: must be left out: {told[0]} tells it")
            elif getattr(self, name) is None:
                raise ValueError(f"{name}: must be a number of tokens or a table of p50, p95 and most, got none")
        return self

    def rates(self) -> tuple[float, ...]:
        """Return requests per second by hour."""
        if self.users is not None:
            return tuple(users * self.requests_per_user_hour / 3600 for users in self.users)
        assert self.requests_per_s is not None, "a trace was read"
        return self.requests_per_s

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Return the tokens of a prompt and of its answer."""
        if self._recorded:
            return rng.choice(self._recorded)
        assert self.input is not None and self.output is not None, "the scenario was checked"
        return self.input.draw(rng), self.output.draw(rng)

    def scaled(self, name: str, factor: float) -> Class:
        """Return the class with so many times the tokens of ``input`` or ``output``."""
        if not self._recorded:
            return self.model_copy(update={name: getattr(self, name).scaled(factor)})
        found = self.model_copy()
        a, b = (factor, 1.0) if name == "input" else (1.0, factor)
        found._recorded = tuple((round(_bounded(a * one)), round(_bounded(b * other))) for one, other in self._recorded)
        return found


class Slo(Table):
    """Objectives at the 95th percentile, in seconds; inf: none. itl_s: between two tokens."""

    ttft_s: Annotated[float, Field(gt=0)] = math.inf
    itl_s: Annotated[float, Field(gt=0)] = math.inf
    e2e_s: Annotated[float, Field(gt=0)] = math.inf


class Price(Table):
    """Of a replica-hour; 0 for a kind that is not to be had. spot_share: most of the replicas beyond the reserved ones
    that may be spot ones, which can be taken away; without on_demand, most of all replicas."""

    on_demand: Amount = 0.0
    reserved: Amount = 0.0
    spot: Amount = 0.0
    spot_share: Part = 0.0

    @model_validator(mode="after")
    def _all_to_be_had(self) -> Price:
        if self.spot and "spot_share" not in self.model_fields_set:
            raise ValueError("spot_share: must be set with spot, got none")
        if self.spot and self.spot_share < 1 and not (self.on_demand or self.reserved):
            raise ValueError("on_demand: must be set, or reserved, where spot_share is below 1, got 0")
        if "spot_share" in self.model_fields_set and "spot" not in self.model_fields_set:
            raise ValueError("spot: must be set with spot_share, got none")
        return self


# Probability that a draft token is accepted if those before it were: a number, or one for each kind of text, or for
# each one for each of ``step_model.STRETCHES``.
_OfText = Annotated[tuple[Part, ...], Field(min_length=1, max_length=len(step_model.STRETCHES))]
Acceptance = Annotated[tuple[_OfText, ...], BeforeValidator(step_model.texts)]


def _engine_folder(given: str) -> str:
    """Return the folder of an engine, which may be given by its name."""
    named = Path(given).name == given and given and not os.path.isdir(given)  # False for a name that is too long
    return str(Path(os.environ.get("TRIDENT_ENGINES_DIR") or "engines") / given) if named else given


class Pool(Table):
    """A kind of replica, ``engine`` (a folder with step_model.json, or a name in engines/) or ``estimate``, and what it
    serves. acceptance: of the drafts of an engine that drafts; what its calibration found by default."""

    engine: Annotated[str, AfterValidator(_engine_folder)] = ""
    acceptance: Acceptance = ()
    estimate: Accelerator | None = None
    classes: Annotated[tuple[Class, ...], Field(min_length=1, strict=False)]  # TOML has lists
    slo: Slo = Slo()
    price: Price = Price()
    headroom: Annotated[float, Field(ge=0, le=10)] = 0.3
    min_replicas: Annotated[int, Field(ge=0, le=100_000)] = 1

    @model_validator(mode="after")
    def _one_kind(self) -> Pool:
        if bool(self.engine) == (self.estimate is not None):
            raise ValueError("engine: must be a folder or a name, or estimate must be given, one of them")
        return self


class Scenario(Table):
    """Pools by name. currency: of the prices. seed: of every random choice."""

    pools: Annotated[dict[str, Pool], Field(min_length=1)]
    currency: str = "$"
    seed: int = 0


def kind_of(pool: Pool, place: str) -> Replica:
    """Return the pool's kind of replica. Raises InvalidArgument for ``place``."""
    if pool.estimate is not None:
        kind = estimate.replica(pool.estimate, f"{place}.estimate")
    else:
        try:
            kind = Replica.of_engine(Path(pool.engine))
        except (TridentError, OSError) as exc:
            raise InvalidArgument(f"{place}.engine", f"must be a calibrated engine: {exc}") from exc
    return replace(kind, step=kind.step.of_texts(pool.acceptance, f"{place}.acceptance"))


def read(path: Path) -> Scenario:
    """Raises InvalidArgument: names file, field and what is allowed."""
    return of_table(toml_table.read(path), path)


def of_table(table: Mapping[str, Any], path: Path = Path("scenario")) -> Scenario:
    """Return a scenario; traces and metrics are read, those relative to the file. Raises InvalidArgument, also for a
    pool's kind of replica."""
    found = toml_table.checked(Scenario, table, str(path))
    for name, pool in found.pools.items():
        kind_of(pool, f"{path}: pools.{name}")  # what is wrong is told before metrics are read and pools are planned
    pools = {}
    for name, pool in found.pools.items():
        places = (f"{path}: pools.{name}.classes.{number}" for number in range(len(pool.classes)))
        classes = tuple(_measured(one, place, path) for one, place in zip(pool.classes, places, strict=True))
        pools[name] = pool.model_copy(update={"classes": classes})
    return found.model_copy(update={"pools": pools})


def _measured(one: Class, place: str, path: Path) -> Class:
    """Return the class with what its trace or a gateway's metrics tell of it."""
    if not one.trace:
        return _of_metrics(one, f"{place}.metrics") if one.metrics else one
    trace, place = path.parent / one.trace, f"{place}.trace"
    rows = _rows(trace, place)
    found = _observed(one, _recorded_rates([row.at_s for row in rows]), place).model_copy(update={"trace": str(trace)})
    found._recorded = tuple((int(row.input_tokens), int(row.output_tokens)) for row in rows)
    return found


def _of_metrics(one: Class, place: str) -> Class:
    """Return the class with what the gateway's pool did between two readings; of lengths only the means are known."""

    def reading() -> prometheus.Metrics:
        try:
            with urllib.request.urlopen(one.metrics, timeout=5) as response:
                return prometheus.parse(response.read(MOST_BYTES).decode(), ("gen_ai_", "trident_gateway_pool_"))
        except (OSError, ValueError, OverflowError, http.client.HTTPException) as exc:
            raise InvalidArgument(place, f"must be a gateway's metrics page, got {one.metrics}: {exc}") from exc

    def counted(page: prometheus.Metrics) -> tuple[float, ...]:
        requests = page.value("gen_ai_server_request_duration_seconds_count", pool=one.name, error_type="")
        return requests, *(page.value(tokens, pool=one.name, direction=name) for name in ("input", "output"))

    tokens, before = "trident_gateway_pool_tokens_total", reading()
    time.sleep(one.seconds)
    after = reading()
    requests, input_tokens, output_tokens = (b - a for a, b in zip(counted(before), counted(after), strict=True))
    if not (requests > 0 and input_tokens > 0 and output_tokens > 0):
        pools = ", ".join(map(repr, sorted(after.by_label(tokens, "pool")))) or "no pool"
        problem = f"must have requests of a pool {one.name!r} within {one.seconds:g} s, got none at {one.metrics}"
        raise InvalidArgument(place, f"{problem}, which tells of {pools}")
    told = {"input": _of_mean(input_tokens / requests), "output": _of_mean(output_tokens / requests)}
    return _observed(one, (requests / one.seconds,) * HOURS, place).model_copy(update=told)


def _of_mean(mean: float) -> Lengths:
    """Return a log-normal distribution of this mean whose 95th percentile is three times the median."""
    p50 = mean / math.exp((math.log(3) / _Z95) ** 2 / 2)
    return Lengths(p50=_bounded(p50), p95=_bounded(3 * p50))


def _observed(one: Class, rates: tuple[float, ...], place: str) -> Class:
    """Return the class with requests per second by hour. Raises InvalidArgument for ``place``."""
    if not 0 < max(rates) <= MOST_AMOUNT:
        raise InvalidArgument(place, f"must have above 0 and at most {MOST_AMOUNT:g} requests/s, got {max(rates):g}")
    return one.model_copy(update={"requests_per_s": rates})


_Whole = Annotated[float, Field(ge=1, le=MOST_TOKENS, multiple_of=1)]  # 10.0 is 10, as in the benchmarks


class _Row(Table):
    model_config = ConfigDict(extra="ignore")
    at_s: Amount
    input_tokens: _Whole
    output_tokens: _Whole


def _rows(trace: Path, place: str) -> list[_Row]:
    """Return the rows of a trace in order. Raises InvalidArgument for ``place``."""
    rows = list[_Row]()
    try:
        for line in trace.read_text("utf-8").splitlines():
            if line.strip():
                rows.append(_Row.model_validate_json(line))
        if len({row.at_s for row in rows}) < 2:
            raise ValueError("at_s has fewer than two instants")
        return sorted(rows, key=lambda row: row.at_s)
    except OSError as exc:
        raise InvalidArgument(place, f"must be a file that can be read, got {trace}: {exc.strerror}") from exc
    except ValueError as exc:
        problem = str(exc)
        if isinstance(exc, ValidationError):
            error = exc.errors()[0]
            problem = ": ".join([f"request {len(rows) + 1}", *map(str, error["loc"]), error["msg"]])
        form = "JSON lines of at_s, input_tokens and output_tokens"
        raise InvalidArgument(place, f"must have {form}, got {trace}: {problem}") from exc


def _recorded_rates(at_s: Sequence[float]) -> tuple[float, ...]:
    """Return requests per second by hour: of each, if half of it or more was recorded of all 24, else their mean."""
    first_s, last_s, in_hour = at_s[0], at_s[-1], Counter(int(each // 3600) for each in at_s)
    requests, seconds = [0.0] * HOURS, [0.0] * HOURS
    for hour in range(int(first_s // 3600), int(last_s // 3600) + 1):
        recorded_s = min(last_s, 3600.0 * (hour + 1)) - max(first_s, 3600.0 * hour)
        if recorded_s >= 1800:
            requests[hour % HOURS] += in_hour[hour]
            seconds[hour % HOURS] += recorded_s
    if all(seconds):
        return tuple(count / spent_s for count, spent_s in zip(requests, seconds, strict=True))
    return ((len(at_s) - 1) / (last_s - first_s),) * HOURS
