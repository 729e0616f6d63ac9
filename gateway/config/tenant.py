"""Tenants and their limits, as the configuration declares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.config.calendar import Length
from gateway.config.policy import ClassRules

LOWEST_PRIORITY = 9


@dataclass(frozen=True)
class Quota:
    """A limit of what a calendar day or month may use.

    money: whether ``most`` is in millionths of the currency of [prices]; else in tokens.
    soft: more is allowed, and told. warn_at: the used part from which on callers are told.
    """

    length: Length
    money: bool
    most: int
    soft: bool = False
    time_zone: str = "UTC"
    warn_at: float = 0.8

    @property
    def name(self) -> str:
        """Its field in the file, such as ``tokens_per_day`` or ``soft_money_per_month``."""
        return f"{'soft_' if self.soft else ''}{'money' if self.money else 'tokens'}_per_{self.length}"


@dataclass(frozen=True)
class Limits:
    """The limits of one level; None is unlimited.

    burst_tokens, burst_requests: capacities of the token buckets; one minute's worth by default.
    max_in_flight: requests from arrival to the end of their stream. quotas: of calendar days and months.
    """

    tokens_per_minute: int | None = None
    burst_tokens: int | None = None
    requests_per_minute: int | None = None
    burst_requests: int | None = None
    max_in_flight: int | None = None
    quotas: tuple[Quota, ...] = ()


@dataclass(frozen=True)
class Scope:
    """Limits of the requests to one model, with all its adapters or to one of them, or to one endpoint, or both; ""
    for any."""

    model: str
    endpoint: str
    limits: Limits

    def covers(self, model: str, endpoint: str) -> bool:
        return self.model in ("", model, model.partition(":")[0]) and self.endpoint in ("", endpoint)

    @property
    def name(self) -> str:
        model, endpoint = self.model and f" model={self.model}", self.endpoint and f" endpoint={self.endpoint}"
        return model + endpoint


@dataclass(frozen=True)
class Level:
    """One level of the hierarchy. name: its full path, such as ``acme/research/alice``. scopes: further limits of a
    part of its requests."""

    name: str
    limits: Limits = Limits()
    scopes: tuple[Scope, ...] = ()

    @property
    def quotas(self) -> list[Quota]:
        """Its quotas, and those of its scopes."""
        return [*self.limits.quotas, *(quota for scope in self.scopes for quota in scope.limits.quotas)]


Levels = Sequence[Level]  # of one request: organisation, team and key


def applying(levels: Levels, model: str, endpoint: str) -> tuple[Level, ...]:
    """Return the levels of a request, and one for each scope of theirs that it is in."""
    pairs = [(level.name, scope) for level in levels for scope in level.scopes if scope.covers(model, endpoint)]
    return (*levels, *(Level(name + scope.name, scope.limits) for name, scope in pairs))


@dataclass(frozen=True)
class Tenant:
    """The party that is charged for a request and isolated from the others.

    name: from the configuration, never from the request: it keys caches and labels metrics.
    models: public names of the models it may use; empty for all. pool: that it is pinned to; "" for any public one.
    priority: class 0 (most urgent) to 9. weight: its share among tenants that compete.
    request_class: of its requests by default; of a classified request, the request's.
    classes: that its requests may name; empty: those that are not more urgent. class_rules: None without a class.
    samples: whether its prompts and answers may be kept.
    levels: organisation, team and key, whose limits all apply; empty without API keys.
    administers: the level whose keys and usage this key manages, ``acme`` or ``acme/research``; "" for none.
    """

    name: str = "anonymous"
    models: tuple[str, ...] = ()
    pool: str = ""
    priority: int = 1
    weight: float = 1.0
    request_class: str = ""
    classes: tuple[str, ...] = ()
    class_rules: ClassRules | None = None
    samples: bool = False
    levels: tuple[Level, ...] = ()
    administers: str = ""

    def within(self, names: Sequence[str]) -> bool:
        """Return whether one of the names is the tenant's or that of one of its levels."""
        return self.name in names or any(level.name in names for level in self.levels)
