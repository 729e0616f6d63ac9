"""A scenario file: pools, gateways, people who send requests, faults. docs/simulator.md shows one with every field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from benchmarks import arrivals, lengths
from benchmarks.server_process import ENGINES
from cluster.plan.engine import Replica
from cluster.plan.scenario import Acceptance
from cluster.scaling.rules import Rules
from contract import step_model, toml_table
from contract.errors import InvalidArgument, TridentError
from contract.step_model import StepModel
from contract.toml_table import Amount, Part, Positive, Table
from gateway.config.rules import PoolName
from gateway.routing.registrations import MAX_REGISTERED

_Seconds = Annotated[float, Field(ge=0, le=31 * 86_400, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=10_000_000)]
_CountOrZero = Annotated[int, Field(ge=0, le=10_000_000)]
MOST_REQUESTS = 10_000_000  # of a persona: about two hours of CPU

_GIVEN = {"manifest_sha256": "", "machine": "", "source": step_model.ROOFLINE, "made": "", "format": step_model.FORMAT}


class Pool(Table):
    """Replicas of one kind.

    engine: whose step model was measured (``python -m benchmarks calibrate``); or step: terms of a StepModel, which it
        is afterwards.
    slots, kv_tokens, prefill_chunk (tokens of one step), slower, short_tokens, max_seq_len: as of
        cluster.plan.engine.Replica; an engine has its own. replicas: at the start.
    acceptance: of an engine that drafts, in place of the step model's: a number, or one for each kind of text.
    shared: the gateway and the people's programs run on the cores of a replica's machine.
    start_s: from the order of a replica until it is ready. start_spread: largest part by which it varies.
    noise: standard deviation of the logarithm of a step's time. send_s: seconds between two messages of a stream; 0:
        one for each step, the most exact and the slowest.
    """

    engine: str = ""
    step: Any = None  # StepModel
    replicas: _CountOrZero = 1
    slots: _Count = 64
    kv_tokens: _Count = 200_000
    max_seq_len: _CountOrZero = 0
    prefill_chunk: _Count = 512
    slower: Amount = 0.0
    short_tokens: _CountOrZero = 0
    acceptance: Acceptance = ()
    shared: bool = False
    start_s: _Seconds = 60.0
    start_spread: Part = 0.0
    noise: Part = 0.0
    send_s: _Seconds = 1.0
    price_hour: Amount = 0.0

    @model_validator(mode="before")
    @classmethod
    def _measured(cls, table: Any) -> Any:
        if not isinstance(table, dict) or not isinstance(engine := table.get("engine", ""), str):
            return table
        step = table.get("step")
        if bool(engine) == (step is not None):
            raise ValueError("step: must be set if engine is not, else left out")
        try:
            if not engine:
                if not isinstance(step, Mapping):
                    raise ValueError(f"step: must be a table of a step model's terms, got {step!r}")
                terms = {"sequence_s": 0.0, "prefill_token_s": 0.0, **step}
                return table | {"step": StepModel.from_json(_GIVEN | terms)}
            own = dict(vars(Replica.of_engine(ENGINES / engine)))
        except (TridentError, OverflowError) as exc:
            raise ValueError(f"{'engine' if engine else 'step'}: must be measured or given: {exc}") from exc
        own["prefill_chunk"] = own.pop("chunk_tokens")
        return {name: own[name] for name in own if name in cls.model_fields} | table | {"step": own["step"]}

    @model_validator(mode="after")
    def _known(self) -> Pool:
        try:
            self.step.of_texts(self.acceptance, "acceptance")
        except InvalidArgument as exc:
            raise ValueError(str(exc)) from exc
        return self

    @property
    def kind(self) -> Replica:
        step = self.step.of_texts(self.acceptance, "acceptance")
        step = step.behind_gateway if self.shared else step
        rule = self.slower, self.short_tokens
        return Replica(step, self.slots, self.prefill_chunk, self.kv_tokens, *rule, self.max_seq_len)


class Gateways(Table):
    """count: requests go to each in turn. policy: file as TRIDENT_GATEWAY_CONFIG. settings: TRIDENT_GATEWAY_… by the
    rest of the name in lower case."""

    count: Annotated[int, Field(ge=1, le=64)] = 1
    policy: str = ""
    settings: Mapping[str, str] = {}


class Persona(Table):
    """People who send the same kind of requests.

    arrivals: an open loop: poisson:RATE, bursty:RATE,SIZE, ramp:FROM,TO or trace:FILE[,SPEED]; or users: a closed loop
        of so many, each of whom sends think_s (in the mean) after an answer.
    input, output: tokens: N, lognormal:MEDIAN,SIGMA[,MAX] or histogram:FILE. max_tokens: 0: the length of the answer.
    day: part of the arrivals, or of the users, that there is at each hour. sessions: conversations; 0: none.
    prefix_tokens: that prompts have in common, of prefix_groups kinds. class: in x-trident-class.
    key: org/team/key of the policy; a team that it does not know has no limits. model: "" for the only one.
    patience_s: they leave without a first token by then; 0: never. leave: part of those who leave within the answer.
    retries: times that a refused one comes again when it was told to. network_s: to the gateway, one way.
    """

    model_config = ConfigDict(populate_by_name=True)
    arrivals: Any = None  # benchmarks.arrivals.Arrivals
    users: Annotated[int, Field(ge=1, le=100_000)] = 0
    think_s: _Seconds = 10.0
    input: Any = lengths.Fixed(128)
    output: Any = lengths.Fixed(64)
    max_tokens: _CountOrZero = 0
    day: Annotated[list[Part], Field(min_length=24, max_length=24)] | None = None
    from_s: _Seconds = 0.0
    until_s: _Seconds | None = None
    prefix_tokens: _CountOrZero = 0
    prefix_groups: _Count = 1
    sessions: _CountOrZero = 0
    key: Annotated[str, Field(pattern=r"^([\w.-]+/[\w.-]+/[\w.-]+)?$")] = ""
    request_class: Annotated[str, Field(alias="class")] = ""
    model: str = ""
    operation: Literal["chat", "text_completion"] = "chat"
    patience_s: _Seconds = 0.0
    leave: Part = 0.0
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    network_s: _Seconds = 0.0

    @field_validator("arrivals", "input", "output", mode="before")
    @classmethod
    def _parsed(cls, value: Any, info: Any) -> Any:
        try:
            if info.field_name == "arrivals":
                return arrivals.parse(str(value))
            return lengths.parse(str(value), info.field_name)
        except InvalidArgument as exc:
            raise ValueError(exc.problem) from exc

    @model_validator(mode="after")
    def _one(self) -> Persona:
        if (self.arrivals is None) == (self.users == 0):
            raise ValueError("users: must be set if arrivals is not, else left out")
        if self.arrivals is not None and "think_s" in self.model_fields_set:
            raise ValueError("think_s: must be left out, since users is not set")
        rows = self.arrivals.rows if isinstance(self.arrivals, arrivals.Trace) else ()
        for name in {"input", "output"} & self.model_fields_set:
            if rows and all(getattr(row, f"{name}_tokens") for row in rows):
                raise ValueError(f"{name}: must be left out, since every request of the trace has its {name}_tokens")
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError(f"until_s: must be more than from_s, got {self.until_s:g}")
        if self.prefix_groups > 1 and not self.prefix_tokens:
            raise ValueError("prefix_tokens: must be set with prefix_groups, got 0")
        return self


class Fault(Table):
    """kind: kill (the process ends and starts again after for_s), hang, fail (the engine fails every request, which
    probes do not see), slow (steps take factor times as long), metrics_outage (of its replicas and of all gateways),
    network_delay (delay_s more each way). replica: number of it in the pool in the order of starting; None: all."""

    kind: Literal["kill", "hang", "fail", "slow", "metrics_outage", "network_delay"]
    at_s: _Seconds
    for_s: _Seconds = 30.0
    pool: str
    replica: _CountOrZero | None = None
    factor: Positive = 4.0
    delay_s: _Seconds = 0.1

    @model_validator(mode="after")
    def _of_its_kind(self) -> Fault:
        for field, kind in (("factor", "slow"), ("delay_s", "network_delay")):
            if field in self.model_fields_set and self.kind != kind:
                raise ValueError(f"{field}: must be left out, since kind is not {kind}")
        return self


class Change(Table):
    """What ``python -m gateway release`` does. set: of a start as in [releases.NAME], ``to`` = percent of a shift."""

    at_s: _Seconds
    release: str
    action: Literal["start", "shift", "rollback", "finish"]
    set: Mapping[str, Any] = {}


class Scenario(Table):
    """start_hour: time of day (UTC) at the start. warmup_s: of duration_s, left out of the figures. slo_ttft_s,
    slo_latency_s: targets at the 95th percentile. scaling: without it the pools stay as they are. interval_s: between
    two decisions."""

    name: str = ""
    duration_s: Annotated[_Seconds, Field(gt=0)]
    warmup_s: _Seconds = 0.0
    start_hour: Annotated[float, Field(ge=0, lt=24)] = 0.0
    slo_ttft_s: Positive = 0.5
    slo_latency_s: Positive = 5.0
    gateway: Gateways = Gateways()
    pools: Annotated[Mapping[PoolName, Pool], Field(min_length=1)]
    scaling: Rules | None = None
    interval_s: Annotated[float, Field(ge=0.1, le=86_400)] = 5.0
    personas: Annotated[Mapping[str, Persona], Field(min_length=1)]
    faults: list[Fault] = []
    changes: list[Change] = []

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        named = [("scaling.pools", pool) for pool in (self.scaling.pools if self.scaling else ())]
        named += [(f"faults.{number}.pool", fault.pool) for number, fault in enumerate(self.faults)]
        for field, pool in named:
            if pool not in self.pools:
                raise ValueError(f"{field}: must be one of the pools {', '.join(self.pools)}, got {pool!r}")
        moments = {"warmup_s": self.warmup_s}
        moments |= {f"personas.{name}.from_s": persona.from_s for name, persona in self.personas.items()}
        moments |= {f"faults.{number}.at_s": fault.at_s for number, fault in enumerate(self.faults)}
        moments |= {f"changes.{number}.at_s": change.at_s for number, change in enumerate(self.changes)}
        for field, moment_s in moments.items():
            if moment_s >= self.duration_s:
                raise ValueError(f"{field}: must be less than duration_s, got {moment_s:g}")
        for name, persona in self.personas.items():
            seconds = min(self.duration_s, persona.until_s or math.inf) - persona.from_s
            if persona.arrivals is not None and (sent := persona.arrivals.expected(seconds)) > MOST_REQUESTS:
                allowed = f"at most {MOST_REQUESTS:,} requests in all"
                raise ValueError(f"personas.{name}.arrivals: must be {allowed}, got {sent:,.0f} in {seconds:g} s")
            if not isinstance(trace := persona.arrivals, arrivals.Trace):
                continue
            if (first_s := trace.rows[0].at_s / trace.speed) >= seconds:
                problem = f"must have a request in its {seconds:g} s, got the first at {first_s:g} s"
                raise ValueError(f"personas.{name}.arrivals: {problem}")
        for number, fault in enumerate(self.faults):
            most, _ = self._most(fault.pool)
            if fault.replica is not None and fault.replica >= most:
                raise ValueError(f"faults.{number}.replica: must be less than {most}, got {fault.replica}")
        left = MAX_REGISTERED
        for pool in self.pools:
            most, field = self._most(pool)
            if most > left:
                raise ValueError(f"{field}: must be at most {left}, {MAX_REGISTERED} in all pools, got {most}")
            left -= most
        return self

    def _most(self, pool: str) -> tuple[int, str]:
        """Return the most replicas that a pool may have, and the field that allows them."""
        replicas, ceiling = self.pools[pool].replicas, self.scaling.of(pool).ceiling if self.scaling else 0
        if self.scaling is None or replicas >= ceiling:
            return replicas, f"pools.{pool}.replicas"
        return ceiling, f"scaling.{f'pools.{pool}' if pool in self.scaling.pools else 'defaults'}.max_replicas"


def read(path: Path) -> Scenario:
    """Read a scenario file; the files that it names are relative to it. Raises InvalidArgument."""
    return of(toml_table.read(path), str(path), path.parent)


def of(table: Mapping[str, Any], path: str = "scenario", folder: Path = Path()) -> Scenario:
    """Return the scenario of a table. Raises as ``read``."""
    found = toml_table.checked(Scenario, _placed(table, folder), path)
    return found if found.name else found.model_copy(update={"name": Path(path).stem})


def _placed(value: Any, folder: Path, name: str = "") -> Any:
    """Return a table with files relative to ``folder``."""
    if isinstance(value, Mapping):
        return {key: _placed(inner, folder, key) for key, inner in value.items()}
    kind, colon, file = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if colon and kind in ("trace", "histogram"):
        return f"{kind}:{folder / file}"
    return str(folder / value) if name == "policy" and value and isinstance(value, str) else value
