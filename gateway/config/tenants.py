"""API keys and their tenants: organisation → team → key, from the configuration file and the environment.

A team is a tenant: its keys share its name, its queue and its caches, and can be rotated without effect on them. Keys
are random and long, so a slow hash would protect nothing and would let anybody keep the gateway busy with wrong ones.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cached_property
from itertools import product
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from contract import toml_table
from contract.errors import InvalidArgument, Unauthenticated
from gateway.config.calendar import Length, check_zone
from gateway.config.policy import SECTIONS, BudgetRules, Operation, Policy, check_named, secret
from gateway.config.rules import LIST, NAME, Name, PositiveFraction, Rules
from gateway.config.settings import API_KEYS, API_KEYS_FILE
from gateway.config.tenant import LOWEST_PRIORITY, Level, Limits, Quota, Scope, Tenant

LEAST_KEY_LENGTH = 20
_QUOTAS = {
    kind.name: kind for kind in (Quota(*each) for each in product(get_args(Length), (False, True), (0,), (False, True)))
}
_MOST_MONEY = 10**9  # of the currency; its millionths are exact in Redis


def digest(salt: bytes, api_key: str) -> bytes:
    """Return the hash of a key that is stored: HMAC-SHA256, 32 bytes."""
    return hmac.new(salt, api_key.encode(errors="surrogatepass"), hashlib.sha256).digest()


def new_key() -> str:
    return "tri-" + secrets.token_urlsafe(32)


def _hash(value: Any) -> bytes:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):  # not shown: it may be the key itself
        raise ValueError("must be an HMAC-SHA256, 64 lower-case hexadecimal digits")
    return bytes.fromhex(value)


def _micros(value: Any) -> int:
    """Return a sum of money in millionths. Raises ValueError."""
    if type(value) in (int, float) and 0 < value <= _MOST_MONEY:
        micros = Decimal(repr(value)) * 10**6
        if micros == int(micros):
            return int(micros)
    raise ValueError(f"must be a sum above 0, {_MOST_MONEY} at most, with at most 6 decimals, got {value!r}")


_Count = Annotated[int, Field(ge=1, lt=2**53)]
_Money = Annotated[int, BeforeValidator(_micros)]


class LimitRules(Rules):
    """Limits; None is unlimited. Names and units: see ``Limits`` and ``Quota``.

    time_zone, warn_at: of days and months; None: as the level above.
    """

    tokens_per_minute: _Count | None = None
    burst_tokens: _Count | None = None
    requests_per_minute: _Count | None = None
    burst_requests: _Count | None = None
    tokens_per_day: _Count | None = None
    soft_tokens_per_day: _Count | None = None
    money_per_day: _Money | None = None
    soft_money_per_day: _Money | None = None
    tokens_per_month: _Count | None = None
    soft_tokens_per_month: _Count | None = None
    money_per_month: _Money | None = None
    soft_money_per_month: _Money | None = None
    time_zone: Annotated[str, BeforeValidator(check_zone)] | None = None
    warn_at: PositiveFraction | None = None

    @model_validator(mode="after")
    def _with_rates(self) -> LimitRules:
        for kind in ("tokens", "requests"):
            if getattr(self, f"burst_{kind}") and not getattr(self, f"{kind}_per_minute"):
                raise ValueError(f"burst_{kind}: is allowed only together with {kind}_per_minute")
        return self

    def around(self, above: BudgetRules) -> BudgetRules:
        """Return the time zone and the warning that hold here, by those of the level above."""
        own = {"time_zone": self.time_zone or above.time_zone, "warn_at": self.warn_at or above.warn_at}
        return above.model_copy(update=own)

    def made(self, around: BudgetRules, max_in_flight: int | None = None) -> Limits:
        """Return the limits. around: as they hold here."""
        rates = (self.tokens_per_minute, self.burst_tokens, self.requests_per_minute, self.burst_requests)
        found = [(kind, getattr(self, name)) for name, kind in _QUOTAS.items()]
        zone, warn_at = around.time_zone, around.warn_at
        quotas = [replace(kind, most=most, time_zone=zone, warn_at=warn_at) for kind, most in found if most is not None]
        return Limits(*rates, max_in_flight, tuple(quotas))


class ScopeRules(LimitRules):
    """Limits of a part of a level's requests; see ``Scope``."""

    model: Annotated[str, Field(pattern="^[^ ]*$")] = ""
    endpoint: Operation | None = None

    @model_validator(mode="after")
    def _scoped(self) -> ScopeRules:
        if not self.model and not self.endpoint:
            raise ValueError("must have model or endpoint, or both")
        return self

    def scope(self, above: BudgetRules) -> Scope:
        return Scope(self.model, self.endpoint or "", self.made(self.around(above)))


class LevelRules(LimitRules):
    """One level. limits: further ones, of a part of its requests."""

    max_in_flight: _Count | None = None
    limits: Annotated[tuple[ScopeRules, ...], LIST] = ()

    @field_validator("limits")
    @classmethod
    def _different(cls, limits: tuple[ScopeRules, ...]) -> tuple[ScopeRules, ...]:
        names = [scope.scope(BudgetRules()).name for scope in limits]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ValueError(f"must have one table for{twice}, got two")
        return limits

    def level(self, name: str, above: BudgetRules) -> Level:
        """Return the level of this name. above: time zone and warning of the level above."""
        around = self.around(above)
        return Level(name, self.made(around, self.max_in_flight), tuple(scope.scope(around) for scope in self.limits))


class KeyRules(LevelRules):
    """One key. administers: the level whose keys and usage it manages; request_class: in place of its team's."""

    hash: Annotated[bytes, BeforeValidator(_hash)]
    request_class: str = Field("", alias="class")
    administers: Literal["", "team", "org"] = ""


class TeamRules(LevelRules):
    """One team; see ``Tenant``."""

    models: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], LIST] = ()
    pool: str = ""
    priority: Annotated[int, Field(ge=0, le=LOWEST_PRIORITY)] = 1
    weight: Annotated[float, Field(ge=0.001, le=1000)] = 1.0
    request_class: str = Field("", alias="class")
    classes: Annotated[tuple[str, ...], LIST] = ()
    samples: bool = False
    keys: Mapping[Name, KeyRules] = {}

    @model_validator(mode="after")
    def _one_priority(self) -> TeamRules:
        if self.request_class and "priority" in self.model_fields_set:
            raise ValueError("priority: is allowed only without class, which has a priority")
        return self

    def tenant(self, name: str, levels: tuple[Level, ...] = ()) -> Tenant:
        own = ("models", "pool", "priority", "weight", "request_class", "classes", "samples")
        return Tenant(name, levels=levels, **{field: getattr(self, field) for field in own})


class OrgRules(LevelRules):
    teams: Mapping[Name, TeamRules] = {}


class _Table(Rules):
    orgs: Mapping[Name, OrgRules] = {}


# The rules of a key and of a team that are not in the file.
_NO_KEY, _NO_TEAM = KeyRules.model_validate({"hash": "0" * 64}), TeamRules.model_validate({})


@dataclass(frozen=True)
class Orgs:
    """The organisations of the file. above: time zone and warning of days and months where no level has its own."""

    table: Mapping[str, OrgRules] = field(default_factory=dict)
    above: BudgetRules = BudgetRules()

    def levels(self) -> Iterator[tuple[tuple[str, ...], LevelRules]]:
        """Yield every level with its names: (org,), (org, team) or (org, team, key)."""
        for org, org_rules in self.table.items():
            yield (org,), org_rules
            for team, team_rules in org_rules.teams.items():
                yield (org, team), team_rules
                for key, key_rules in team_rules.keys.items():
                    yield (org, team, key), key_rules

    def has(self, name: str) -> bool:
        """Return whether there is a team, ORG/TEAM."""
        org, _, team = name.partition("/")
        return org in self.table and team in self.table[org].teams

    def tenants(self, path: str) -> dict[bytes, Tenant]:
        """Return the tenant of each key by its hash. Raises InvalidArgument."""
        tenants: dict[bytes, Tenant] = {}
        for names, rules in self.levels():
            if isinstance(rules, KeyRules):
                if rules.hash in tenants:
                    problem = f"is that of {tenants[rules.hash].levels[-1].name} too; every key belongs to one"
                    raise InvalidArgument(f"{path}: {_place(names)}.hash", problem)
                tenants[rules.hash] = self.tenant(*names)
        return tenants

    def tenant(self, org: str, team: str, key: str) -> Tenant:
        """Return the tenant of a key, whose levels need not be in the file."""
        org_rules = self.table.get(org, OrgRules())
        team_rules = org_rules.teams.get(team, _NO_TEAM)
        rules = team_rules.keys.get(key, _NO_KEY)
        tenant = self._tenant((org, team, key), org_rules, team_rules, rules)
        managed = {"": "", "team": tenant.name, "org": org}[rules.administers]
        return replace(tenant, request_class=rules.request_class or tenant.request_class, administers=managed)

    def member(self, org: str, team: str, key: str, default_team: str) -> Tenant | None:
        """Return the tenant of a caller whose key is not in the file; None for an unknown team.

        default_team: ORG/TEAM, whose limits and models a team has that is not in the file; "" for none.
        """
        like_org, _, like_team = (f"{org}/{team}" if self.has(f"{org}/{team}") else default_team).partition("/")
        if not like_org:
            return None
        like = self.table[like_org]
        return self._tenant((org, team, key), self.table.get(org, like), like.teams[like_team], _NO_KEY)

    def _tenant(self, names: tuple[str, str, str], org: OrgRules, team: TeamRules, key: KeyRules) -> Tenant:
        levels, above = [], self.above
        for depth, rules in enumerate((org, team, key), 1):
            levels.append(rules.level("/".join(names[:depth]), above))
            above = rules.around(above)
        return team.tenant("/".join(names[:2]), tuple(levels))


def _place(names: Sequence[str]) -> str:
    return ".".join(f"{kind}.{name}" for kind, name in zip(("orgs", "teams", "keys"), names, strict=False))


@dataclass(frozen=True)
class KeyTable:
    """One reading of the file and the environment. Hashes only; the keys of the environment are hashed as well."""

    # salt, and by the first 8 bytes of the hash the whole hash and the tenant
    salted: tuple[tuple[bytes, Mapping[bytes, tuple[bytes, Tenant]]], ...] = ()
    orgs: Orgs = Orgs()

    def __len__(self) -> int:
        return sum(len(tenants) for _, tenants in self.salted)

    def tenant(self, api_key: str) -> Tenant:
        """Return the tenant of a key. The look-up is by a salted hash, which a caller cannot choose; the whole hash is
        compared in constant time.

        Raises Unauthenticated; its message does not reveal which keys exist.
        """
        if not api_key:
            raise Unauthenticated("no API key was sent; send it as Authorization: Bearer <key>")
        found = None
        for salt, tenants in self.salted:
            hashed = digest(salt, api_key)
            known, tenant = tenants.get(hashed[:8], (bytes(32), None))
            if hmac.compare_digest(known, hashed):
                found = tenant
        if found is None:
            raise Unauthenticated("this API key is not known here")
        return found

    def tenants(self, others: bool = False) -> Iterator[Tenant]:
        """Yield the tenant of each key. others: whether callers can have tokens or stored keys; then also that of each
        team, without levels."""
        yield from (tenant for _, tenants in self.salted for _, tenant in tenants.values())
        if others:
            yield from self._teams

    @cached_property
    def _teams(self) -> tuple[Tenant, ...]:
        teams = ((names, rules) for names, rules in self.orgs.levels() if isinstance(rules, TeamRules))
        return tuple(rules.tenant("/".join(names)) for names, rules in teams)

    @property
    def pools_used(self) -> list[tuple[str, str]]:
        """Every (field, pool) where a team of the file is pinned to a pool."""
        teams = [(names, rules) for names, rules in self.orgs.levels() if isinstance(rules, TeamRules)]
        return [(f"{_place(names)}.pool", rules.pool) for names, rules in teams if rules.pool]

    def named(self, key: str) -> Tenant | None:
        """Return the tenant of the key whose whole name is ``key``, such as ``acme/research/alice``."""
        return self._by_name.get(key)

    @cached_property
    def _by_name(self) -> Mapping[str, Tenant]:
        return {tenant.levels[-1].name: tenant for tenant in self.tenants()}

    @cached_property
    def quotas(self) -> Mapping[str, Level]:
        """The levels with limits of days or months, by their places in the file."""
        levels = {_place(names): rules.level("", self.orgs.above) for names, rules in self.orgs.levels()}
        return {place: level for place, level in levels.items() if level.quotas}

    def may_have(self, name: str, others: bool = False) -> bool:
        """Return whether a request may come from an organisation, team or key of this name; a team's keys may be made
        while the gateway runs. others: as in ``tenants``."""
        if not len(self) and not others:
            return name == Tenant().name
        levels = {level.name for tenant in self.tenants() for level in tenant.levels}
        return name in levels or name in self.orgs.table or self.orgs.has("/".join(name.split("/")[:2]))


def _indexed(tenants: Mapping[bytes, Tenant]) -> dict[bytes, tuple[bytes, Tenant]]:
    return {hashed[:8]: (hashed, tenant) for hashed, tenant in tenants.items()}


def read(path: str, table: Mapping, environ: Mapping[str, str], rules: Policy) -> KeyTable:
    """Return the keys in a file's table, which has these rules, and in the environment.

    Raises InvalidArgument that names the place.
    """
    for name in table.keys() - {"salt", "orgs", *SECTIONS}:
        raise InvalidArgument(f"{path}: {name}", f"is not known: must be one of salt, orgs, {', '.join(SECTIONS)}")
    orgs = Orgs(toml_table.checked(_Table, {"orgs": table.get("orgs", {})}, path, shown=False).orgs, rules.budgets)
    used = []
    for names, level in orgs.levels():
        used += [(f"{_place(names)}.class", name) for name in (getattr(level, "request_class", ""),) if name]
        used += [(f"{_place(names)}.classes", name) for name in getattr(level, "classes", ())]
    check_named(path, used, rules.classes, "classes")
    from_environment = environ.get(API_KEYS, "")
    if environ.get(API_KEYS_FILE):
        from_environment += "," + secret(API_KEYS_FILE, environ[API_KEYS_FILE])
    tenants = orgs.tenants(path)
    salted = [(salt(path, table), _indexed(tenants))] if tenants else []
    if from_environment:
        own = secrets.token_bytes(16)
        salted.append((own, _indexed(_from_environment(orgs, from_environment, own))))
    return KeyTable(tuple(salted), orgs)


def salt(path: str, table: Mapping) -> bytes:
    """Return the file's salt. Raises InvalidArgument if it is missing or malformed."""
    text = table.get("salt")
    try:
        found = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        found = b""
    if len(found) < 16:
        problem = "must be 16 bytes or more in hexadecimal, made once and at random"
        raise InvalidArgument(f"{path}: salt", problem)
    return found


def _from_environment(orgs: Orgs, text: str, salt: bytes) -> dict[bytes, Tenant]:
    tenants: dict[bytes, Tenant] = {}
    for number, part in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        name, _, api_key = part.partition("=")
        names = name.strip().split("/")
        if len(names) != 3 or not all(re.fullmatch(NAME, word) for word in names):
            raise InvalidArgument(API_KEYS, f"entry {number}: must be ORG/TEAM/KEY=<the API key>")
        if len(api_key) < LEAST_KEY_LENGTH:
            raise InvalidArgument(API_KEYS, f"{name}: the API key is shorter than {LEAST_KEY_LENGTH} characters")
        hashed = digest(salt, api_key)
        if hashed in tenants:
            raise InvalidArgument(API_KEYS, f"{name}: the same API key stands there twice")
        tenants[hashed] = orgs.tenant(*names)
    return tenants
