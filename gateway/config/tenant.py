"""Tenants and their limits, as the configuration declares them."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.config.policy import ClassRules

LOWEST_PRIORITY = 9


@dataclass(frozen=True)
class Limits:
    """The limits of one level; None is unlimited.

    tokens_per_minute, requests_per_minute: refill rates of the token buckets.
    burst_tokens, burst_requests: their capacities; one minute's worth by default.
    max_in_flight: requests from arrival to the end of their stream.
    """

    tokens_per_minute: int | None = None
    burst_tokens: int | None = None
    requests_per_minute: int | None = None
    burst_requests: int | None = None
    max_in_flight: int | None = None


@dataclass(frozen=True)
class Level:
    """One level of the hierarchy. name: its full path, such as ``acme/research/alice``."""

    name: str
    limits: Limits = Limits()


@dataclass(frozen=True)
class Tenant:
    """The party that is charged for a request and isolated from the others.

    name: from the configuration, never from the request: it keys caches and labels metrics.
    models: public names of the models it may use; empty for all.
    pool: the pool its requests are pinned to; "" for any public one.
    priority: class 0 (most urgent) to 9.
    weight: its share among tenants that compete.
    request_class: of its requests by default; of a classified request, the request's.
    classes: that its requests may name; empty: those that are not more urgent.
    class_rules: of a classified request; None without a class.
    samples: its prompts and answers may be kept.
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
