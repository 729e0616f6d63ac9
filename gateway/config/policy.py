"""The rules of the configuration file, beside its tenants: a section each, all optional, checked by name.

docs/gateway-configuration.md shows a file with every field.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from contract import toml_table
from contract.errors import InvalidArgument
from contract.generation import Usage
from gateway.config.calendar import check_zone
from gateway.config.identity import ExpandedPath, IdentityRules, expanded
from gateway.config.release import ReleaseRules
from gateway.config.rules import LIST, NAMES, Fraction, Name, PoolName, PositiveFraction, RedisUrl, Rules, Seconds
from gateway.config.samples import SampleRules

# A tenant's turn in tokens, times its weight. Well below a chat's answer: rounds cost nothing, and turns of several
# answers in a row let a tenant with a large weight run against its share and lose what it could not send meanwhile.
QUANTUM_TOKENS = 128
SETTLING_S = 60.0  # that a settlement may take, however often it is retried
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Size = Annotated[int, Field(ge=0, lt=2**48)]
_Amount = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Fullness = Annotated[float, Field(gt=0, le=10)]
_Name = Annotated[str, Field(pattern="^[ -~]{1,64}$")]  # also in headers
_ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]
Capability = Literal["chat", "completions", "tools", "schema", "embeddings", "rerank"]
ToolFormat = Literal["auto", "hermes", "llama3", "mistral", "none"]
Operation = Literal["chat", "responses", "text_completion", "embeddings", "rerank", "score", "batch"]
ReasoningFormat = Literal["auto", "tagged", "open", "none"]
_Priority = Annotated[int, BeforeValidator(lambda key: int(key) if key.isdecimal() else key), Field(ge=0, le=9)]


class AdmissionRules(Rules):
    """Who may run at each pool, and who waits."""

    max_running: Annotated[int, Field(ge=0, lt=2**31)] = 0
    tenant_share: PositiveFraction = 0.8
    short_reserve: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    max_wait_s: Seconds = 30.0
    max_waiting_per_class: _Count = 1000
    max_waiting_per_tenant: _Count = 100
    max_in_flight_of_class: Mapping[_Priority, _Count] = {}
    quantum_tokens: _Count = QUANTUM_TOKENS
    aging_s: Seconds = 10.0


class ClassRules(Rules):
    """One class of requests. What is beyond its ``share`` of a pool's slots is kept free for more urgent classes."""

    priority: Annotated[int, Field(ge=0, le=9)]
    operations: Annotated[tuple[Operation, ...], NAMES] = ()
    max_wait_s: Seconds | None = None
    max_tokens: _Count | None = None
    share: PositiveFraction = 1.0
    ttft_s: Seconds | None = None
    itl_s: Seconds | None = None


class DegradationRules(Rules):
    """From which pressure on requests are degraded. Pressure: the fullest bound as a fraction, 1 is full.

    overflow: targets in order. They also serve requests whose pool has no healthy replica, or that fail elsewhere
        before their first token.
    """

    shorter_at: _Fullness = 0.7
    overflow_at: _Fullness = 0.85
    refuse_at: _Fullness = 1.0
    max_tokens: _Count = 128
    overflow: Annotated[tuple[_Name, ...], NAMES, Field(max_length=16)] = ()

    @model_validator(mode="after")
    def _rising(self) -> DegradationRules:
        if not self.shorter_at <= self.overflow_at <= self.refuse_at:
            raise ValueError("must rise from shorter_at over overflow_at to refuse_at")
        return self


class ModelPrice(Rules):
    """What 1,000 tokens cost. cached: of prompt tokens in the prefix cache; None: as others."""

    input: _Amount = 0.0
    cached: _Amount | None = None
    output: _Amount = 0.0

    def micros(self, usage: Usage) -> int:
        """Return what ``usage`` costs in millionths of the currency: exact, and rounded to the nearest at the end."""
        cached = self.input if self.cached is None else self.cached
        uncached = usage.input_tokens - usage.cached_tokens
        parts = (self.input, uncached), (cached, usage.cached_tokens), (self.output, usage.output_tokens)
        # Prices are read to the ninth decimal, so that a token costs whole millionths of a millionth.
        return (sum(round(price * 10**9) * tokens for price, tokens in parts) + 500_000) // 10**6


class UpstreamEndpoint(Rules):
    """One key of an upstream, or one of its regions. model: None: the target's. spend_per_day: at this gateway."""

    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    model: str | None = None
    api_key: Annotated[str, Field(repr=False)] = ""
    price: ModelPrice = ModelPrice()
    spend_per_day: _Amount | None = None

    @model_validator(mode="after")
    def _bounded(self) -> UpstreamEndpoint:
        if self.spend_per_day and not (self.price.input or self.price.output):
            raise ValueError("spend_per_day must have a price beside it: without one nothing is ever spent")
        return self


class OverflowTarget(Rules):
    """A target of overflowing requests: a pool, an upstream, or an upstream with several keys or regions.

    prefer: which endpoint is tried first: ``fastest``, drawn by time to first token and errors, or ``cheapest``.
    """

    pool: str = ""
    url: Annotated[str, Field(pattern=r"^(https?://\S+)?$")] = ""
    model: str = ""
    api_key: Annotated[str, Field(repr=False)] = ""
    endpoints: Mapping[_Name, UpstreamEndpoint] = {}
    prefer: Literal["fastest", "cheapest"] = "fastest"

    @model_validator(mode="after")
    def _one(self) -> OverflowTarget:
        remote = bool(self.url or self.endpoints)
        if bool(self.pool) == remote or remote != bool(self.model) or (self.url and self.endpoints):
            raise ValueError("must have either pool, or model together with url or endpoints")
        return self

    @property
    def upstreams(self) -> Mapping[str, UpstreamEndpoint]:
        """The endpoints by name; a single one has none."""
        if self.url:
            return {"": UpstreamEndpoint(url=self.url, api_key=self.api_key)}
        return self.endpoints


class TracingRules(Rules):
    """content: organisations, teams or keys whose prompts and outputs are written to spans."""

    content: Annotated[tuple[_Name, ...], NAMES] = ()


class BudgetRules(Rules):
    """What holds of days and months where a level has nothing else. redis: holds from the next start on."""

    redis: Annotated[RedisUrl, Field(repr=False)] = ""
    time_zone: Annotated[str, BeforeValidator(check_zone)] = "UTC"
    warn_at: PositiveFraction = 0.8


class ReuseRules(Rules):
    coalesce: bool = True
    cache_bytes: _Size = 64 * 1024 * 1024
    cache_ttl_s: Seconds = 3600.0
    engine: str = ""
    idempotency_ttl_s: Seconds = 600.0
    idempotency_linger_s: Seconds = 30.0
    idempotency_bytes: _Size = 256 * 1024 * 1024


class ShadowRules(Rules):
    pool: _Name
    fraction: Fraction
    max_running: _Count = 8


class PoolRules(Rules):
    """weight: share of the requests. replicas: as in TRIDENT_GATEWAY_REPLICAS. None leaves the variable's.

    kind: what its replicas serve: a generating model, or an encoder, which is called by the pool's name.
    scale_to_zero: whether requests wait for a replica while there is none, for ``hold_s`` at most.
    """

    weight: _Amount | None = None
    replicas: Annotated[str, Field(min_length=1)] | None = None
    kind: Literal["generator", "encoder"] = "generator"
    scale_to_zero: bool = False
    hold_s: Seconds = 300.0

    @model_validator(mode="after")
    def _unweighted(self) -> PoolRules:
        if self.kind == "encoder" and (self.weight is not None or self.replicas is None):
            raise ValueError("allowed for an encoder are replicas, and no weight: requests name it")
        return self


def _pool(value: object) -> object:
    """Return a pool's table; a number alone is its weight."""
    return {"weight": value} if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class ContextRules(Rules):
    """What is left out of a chat so that prompt and ``max_tokens`` fit (docs/prompts.md)."""

    policy: Literal["drop_oldest", "keep_system", "summarise"]
    prompt_tokens: _Count | None = None
    summary_model: str | None = None
    summary_tokens: Annotated[int, Field(ge=8, le=4096)] = 128
    summary_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0

    @model_validator(mode="after")
    def _complete(self) -> ContextRules:
        if (self.policy == "summarise") != (self.summary_model is not None):
            raise ValueError("summary_model must be set for policy summarise, and left out of other policies")
        return self


class ModelRules(Rules):
    """One model, or a router to models, smallest first.

    fallbacks: overflow targets that serve it when its pools cannot, in order; without pools they serve all of it.
    capabilities: None: not checked here. context_length: prompt and output. adapters: those that its replicas report
        without any. tool_format, reasoning_format: where ``auto``, the setting holds.
    """

    pools: Annotated[tuple[PoolName, ...], NAMES] = ()
    fallbacks: Annotated[tuple[_Name, ...], NAMES] = ()
    router: Annotated[tuple[_ModelName, ...], NAMES] = ()
    aliases: Annotated[tuple[_ModelName, ...], NAMES] = ()
    adapters: Annotated[tuple[_ModelName, ...], NAMES] = ()
    capabilities: Annotated[tuple[Capability, ...] | None, NAMES] = None
    context_length: _Count | None = None
    tokenizer: ExpandedPath | None = None
    tool_format: ToolFormat = "auto"
    reasoning_format: ReasoningFormat = "auto"
    price: ModelPrice | None = None
    context: ContextRules | None = None
    plain_tools: bool = False
    adapter_prices: Mapping[_ModelName, ModelPrice] = {}

    @model_validator(mode="after")
    def _one(self) -> ModelRules:
        if self.router and self.context:
            raise ValueError("context must be left out of a router: it holds of the models that it names")
        if bool(self.router) == bool(self.pools or self.fallbacks):
            raise ValueError("must have either router, or pools or fallbacks")
        return self


class HookRules(Rules):
    """One hook; those of a file are called in its order (docs/hooks.md)."""

    use: Annotated[str, Field(min_length=1)]
    options: Mapping[str, Any] = {}
    tenants: Annotated[tuple[str, ...], LIST] = ()
    timeout_ms: Annotated[float, Field(gt=0, le=60_000)] = 100.0
    on_failure: Literal["open", "closed"] = "closed"
    threads: Annotated[int, Field(ge=1, le=64)] = 4
    max_hangs: Annotated[int, Field(ge=1, le=1000)] = 3


class Prices(Rules):
    replica_hour: _Amount | None = None
    currency: _Name = "USD"


class Policy(Rules):
    """All rules."""

    admission: AdmissionRules = AdmissionRules()
    classes: Mapping[_Name, ClassRules] = {}
    degradation: DegradationRules | None = None
    overflow: Mapping[_Name, OverflowTarget] = {}
    budgets: BudgetRules = BudgetRules()
    reuse: ReuseRules = ReuseRules()
    shadow: ShadowRules | None = None
    pools: Mapping[PoolName, Annotated[PoolRules, BeforeValidator(_pool)]] = {}
    models: Mapping[_ModelName, ModelRules] = {}
    releases: Mapping[Name, ReleaseRules] = {}
    hooks: Mapping[_Name, HookRules] = {}
    tracing: TracingRules = TracingRules()
    prices: Prices | None = None
    identity: IdentityRules = IdentityRules()
    samples: SampleRules | None = None

    @field_validator("classes")
    @classmethod
    def _one_class(cls, classes: Mapping[str, ClassRules]) -> Mapping[str, ClassRules]:
        named = [operation for rules in classes.values() for operation in rules.operations]
        for operation in named:
            if named.count(operation) > 1:
                raise ValueError(f"operations must be of one class each, got {operation} twice")
        return classes

    @property
    def longest_wait_s(self) -> float:
        """The longest time in a queue of any class."""
        return max([self.admission.max_wait_s, *(rules.max_wait_s or 0.0 for rules in self.classes.values())])

    def lease_s(self, request_timeout_s: float) -> float:
        """Return how long budget stays reserved for a request that is not settled: longer than any takes."""
        return request_timeout_s + self.longest_wait_s + SETTLING_S

    @property
    def tenants_named(self) -> list[tuple[str, str]]:
        """Every (field, name) where a rule names an organisation, a team or a key."""
        named = [(f"hooks.{hook}.tenants", name) for hook, rules in self.hooks.items() for name in rules.tenants]
        return named + [("tracing.content", name) for name in self.tracing.content]

    @property
    def pools_used(self) -> list[tuple[str, str]]:
        """Every (field, pool) where a rule sends requests to a pool."""
        named = [(f"overflow.{name}.pool", target.pool) for name, target in self.overflow.items() if target.pool]
        named += [(f"models.{name}.pools", pool) for name, model in self.models.items() for pool in model.pools]
        for name, release in self.releases.items():
            named += [(f"releases.{name}.{field}", getattr(release, field)) for field in ("stable", "candidate")]
        return named + ([("shadow.pool", self.shadow.pool)] if self.shadow else [])


FILE = "$file:"
SECTIONS = tuple(Policy.model_fields)


def read(path: str, table: Mapping[str, Any], environ: Mapping[str, str]) -> Policy:
    """Return the rules in ``table``. Raises InvalidArgument that names the file, the field and what is allowed."""
    sections = {name: table[name] for name in SECTIONS if name in table}
    policy = toml_table.checked(Policy, _from_environment(path, sections, environ), path, shown=False)
    models, degradation = policy.models, policy.degradation
    used = [("degradation.overflow", target) for target in (degradation.overflow if degradation else ())]
    used += [(f"models.{name}.fallbacks", target) for name, rules in models.items() for target in rules.fallbacks]
    check_named(path, used, policy.overflow, "targets")
    names = list(models)
    for name, rules in models.items():
        for alias in rules.aliases:
            if alias in names:
                raise InvalidArgument(f"{path}: models.{name}.aliases", f"{alias!r} is the name of another model too")
            names.append(alias)
    summarised = [(name, rules.context.summary_model) for name, rules in models.items() if rules.context]
    used = [(f"models.{name}.context.summary_model", model) for name, model in summarised if model]
    check_named(path, used, names, "models")
    used = [(f"models.{name}.router", listed) for name, rules in models.items() for listed in rules.router]
    direct = [name for name, rules in models.items() if not rules.router]
    check_named(path, used, direct, "models with replicas or upstreams")
    return policy


def check_named(path: str, used: Iterable[tuple[str, str]], known: Collection[str], kind: str) -> None:
    """Raises InvalidArgument where a field names what is not known. used: (field, name). kind: of what, in words."""
    for field, name in used:
        if name not in known:
            allowed = ", ".join(one or "''" for one in known) or "none"
            raise InvalidArgument(f"{path}: {field}", f"must be one of the {kind} {allowed}, got {name!r}")


def secret(field: str, path: str | Path) -> str:
    """Return the secret in a file, without blanks around it. Raises InvalidArgument."""
    try:
        return expanded(path).read_text("utf-8").strip()
    except (OSError, ValueError) as exc:
        raise InvalidArgument(field, f"must be a file that can be read, got {path}: {exc}") from exc


def secret_files(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of files that texts in a table name, as they stand there."""
    for value in table.values():
        if isinstance(value, Mapping):
            yield from secret_files(value)
        elif isinstance(value, str) and value.startswith(FILE):
            yield value.removeprefix(FILE)


def _from_environment(path: str, value: Any, environ: Mapping[str, str], field: str = "") -> Any:
    """Return ``value`` with each text that begins with $ replaced by that environment variable, or file."""
    if isinstance(value, Mapping):
        return {
            key: _from_environment(path, inner, environ, f"{field}.{key}" if field else key)
            for key, inner in value.items()
        }
    if isinstance(value, str) and value.startswith(FILE):
        return secret(f"{path}: {field}", value.removeprefix(FILE))
    if isinstance(value, str) and value.startswith("$"):
        if value[1:] not in environ:
            raise InvalidArgument(f"{path}: {field}", f"the environment has no variable {value[1:]}")
        return environ[value[1:]]
    return value
