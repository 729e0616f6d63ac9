"""API keys and their tenants: organisation → team → key, from the configuration file and the environment.

A team is a tenant: its keys share its name, its queue and its caches, and can be rotated without effect on them. Limits
are allowed on every level, and all apply. docs/gateway-configuration.md shows a file.

Keys are random and long, so a slow hash would protect nothing that is not safe already and would let anybody keep the
gateway busy with wrong ones.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from functools import cached_property
from itertools import product
from typing import Any, Protocol, get_args

from contract.errors import InvalidArgument, Unauthenticated
from gateway.config.calendar import Length, check_zone
from gateway.config.policy import SECTIONS, BudgetRules, Operation, secret
from gateway.config.tenant import LOWEST_PRIORITY, Level, Limits, Quota, Scope, Tenant

API_KEYS = "TRIDENT_GATEWAY_API_KEYS"
API_KEYS_FILE = f"{API_KEYS}_FILE"
LEAST_KEY_LENGTH = 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_LIMITS = tuple(declared.name for declared in fields(Limits) if declared.name != "quotas")
_QUOTAS = {
    kind.name: kind for kind in (Quota(*each) for each in product(get_args(Length), (False, True), (0,), (False, True)))
}
_QUOTA_FIELDS = (*_QUOTAS, "time_zone", "warn_at")
_Around = Mapping[str, Any]
_AROUND: _Around = BudgetRules().model_dump(include={"time_zone", "warn_at"})
_MOST_MONEY = 10**9  # of the currency; its millionths are exact in Redis
_TENANT = ("class", "classes", "models", "pool", "priority", "samples", "weight")


class Keys(Protocol):
    """A table of API keys."""

    def tenant(self, api_key: str) -> Tenant:
        """Return the tenant of a key; "" is no key. Raises Unauthenticated."""

    def named(self, tenant: str, key: str) -> Tenant | None:
        """Return a tenant as its key sees it now, for work that outlives its request.

        key: name of the key's level; "" without keys. None if the key does not exist any more.
        """


def digest(salt: bytes, api_key: str) -> bytes:
    """Return the hash of a key that is stored: HMAC-SHA256, 32 bytes."""
    return hmac.new(salt, api_key.encode(errors="surrogatepass"), hashlib.sha256).digest()


def new_key() -> str:
    return "tri-" + secrets.token_urlsafe(32)


@dataclass(frozen=True)
class KeyTable:
    """One reading of the file and the environment. Hashes only; the keys of the environment are hashed as well."""

    # salt, and by the first 8 bytes of the hash the whole hash and the tenant
    salted: tuple[tuple[bytes, Mapping[bytes, tuple[bytes, Tenant]]], ...] = ()
    file: _File | None = None

    def __len__(self) -> int:
        """Return the number of keys."""
        return sum(len(tenants) for _, tenants in self.salted)

    def tenant(self, api_key: str) -> Tenant:
        """Raises Unauthenticated; its message does not reveal which keys exist."""
        if not api_key:
            raise Unauthenticated("no API key was sent; send it as Authorization: Bearer <key>")
        found = self._find(api_key)
        if found is None:
            raise Unauthenticated("this API key is not known here")
        return found

    def has_admins(self) -> bool:
        """Return whether a key manages others."""
        return any(tenant.administers for tenant in self._tenants(False))

    def pools(self, others: bool = False) -> set[str]:
        """Return the pools that tenants are pinned to. others: whether callers can have tokens or stored keys."""
        return {tenant.pool for tenant in self._tenants(others) if tenant.pool}

    def sampled(self, others: bool = False) -> set[str]:
        """Return the tenants whose prompts and answers may be kept. others: as in ``pools``."""
        return {tenant.name for tenant in self._tenants(others) if tenant.samples}

    def _tenants(self, others: bool) -> Iterator[Tenant]:
        """Yield the tenant of each key, and with ``others`` that of each team, whose callers need no key here."""
        yield from (tenant for _, tenants in self.salted for _, tenant in tenants.values())
        if others:
            yield from self._teams

    @cached_property
    def _teams(self) -> tuple[Tenant, ...]:
        return tuple(self.file.teams()) if self.file is not None else ()

    @property
    def pools_used(self) -> list[tuple[str, str]]:
        """Every (field, pool) where a team of the file is pinned to a pool."""
        named = (("orgs.{}.teams.{}.pool".format(*team.name.split("/")), team.pool) for team in self._teams)
        return [(field, pool) for field, pool in named if pool]

    def _find(self, api_key: str) -> Tenant | None:
        """Return the tenant of a key. The look-up is by a salted hash, which a caller cannot choose; the whole hash is
        compared in constant time."""
        found = None
        for salt, tenants in self.salted:
            hashed = digest(salt, api_key)
            known, tenant = tenants.get(hashed[:8], (bytes(32), None))
            if hmac.compare_digest(known, hashed):
                found = tenant
        return found

    def named(self, key: str) -> Tenant | None:
        """Return the tenant of the key whose whole name is ``key``, such as ``acme/research/alice``."""
        return self._by_name.get(key)

    @cached_property
    def _by_name(self) -> Mapping[str, Tenant]:
        return {tenant.levels[-1].name: tenant for tenant in self._tenants(False)}

    def member(self, org: str, team: str, key: str, default_team: str) -> Tenant | None:
        """Return the tenant of a caller whose key is not in the file; None for an unknown team.

        default_team: ORG/TEAM, whose limits and models a team has that is not in the file; "" for none.
        """
        return self.file.member(org, team, key, default_team) if self.file is not None else None

    @property
    def quotas(self) -> Mapping[str, Level]:
        """The levels with limits of days or months, by their places in the file."""
        return self.file.with_quotas if self.file is not None else {}

    def has_team(self, name: str) -> bool:
        """Return whether the file has a team, ORG/TEAM."""
        return self.file is not None and self.file.has(*name.split("/"))

    def may_have(self, name: str, others: bool = False) -> bool:
        """Return whether a request may come from an organisation, team or key of this name; a team's keys may be made
        while the gateway runs. others: as in ``pools``."""
        if not len(self) and not others:
            return name == Tenant().name
        levels = {level.name for tenant in self._tenants(False) for level in tenant.levels}
        in_file = self.file is not None and (name in self.file.orgs or self.file.has(*(name.split("/") * 2)[:2]))
        return name in levels or in_file


def _indexed(tenants: Mapping[bytes, Tenant]) -> dict[bytes, tuple[bytes, Tenant]]:
    return {hashed[:8]: (hashed, tenant) for hashed, tenant in tenants.items()}


def read(path: str, table: Mapping, environ: Mapping[str, str]) -> KeyTable:
    """Return the keys in a file's table and in the environment. Raises InvalidArgument that names the place."""
    file, from_environment = _File(path, table), environ.get(API_KEYS, "")
    if environ.get(API_KEYS_FILE):
        from_environment += "," + secret(API_KEYS_FILE, environ[API_KEYS_FILE])
    tenants = file.tenants()
    salted = [(salt(path, table), _indexed(tenants))] if tenants else []
    if from_environment:
        own = secrets.token_bytes(16)
        salted.append((own, _indexed(_from_environment(file, from_environment, own))))
    return KeyTable(tuple(salted), file)


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


def _from_environment(file: _File, text: str, salt: bytes) -> dict[bytes, Tenant]:
    tenants: dict[bytes, Tenant] = {}
    for number, part in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        name, _, api_key = part.partition("=")
        names = name.strip().split("/")
        if len(names) != 3 or not all(_NAME.fullmatch(word) for word in names):
            raise InvalidArgument(API_KEYS, f"entry {number}: must be ORG/TEAM/KEY=<the API key>")
        if len(api_key) < LEAST_KEY_LENGTH:
            raise InvalidArgument(API_KEYS, f"{name}: the API key is shorter than {LEAST_KEY_LENGTH} characters")
        hashed = digest(salt, api_key)
        if hashed in tenants:
            raise InvalidArgument(API_KEYS, f"{name}: the same API key stands there twice")
        tenants[hashed] = file.tenant(*names)
    return tenants


def _micros(value: Any) -> int:
    """Return a sum of money in millionths; 0 for what is none."""
    if type(value) not in (int, float) or not 0 < value <= _MOST_MONEY:
        return 0
    micros = Decimal(repr(value)) * 10**6
    return int(micros) if micros == int(micros) else 0


@dataclass(frozen=True)
class _File:
    """The file's TOML table; errors name the place in it."""

    path: str
    table: Mapping = field(compare=False)  # two that differ elsewhere have the same tenants
    orgs: Mapping = field(init=False)
    with_quotas: dict[str, Level] = field(default_factory=dict, compare=False)  # by their places

    def __post_init__(self) -> None:
        self._only(self.table, "", ("salt", "orgs", *SECTIONS))
        object.__setattr__(self, "orgs", self._child(self.table, "", "orgs"))

    def tenants(self) -> dict[bytes, Tenant]:
        tenants: dict[bytes, Tenant] = {}
        for org, team, key, place in self._keys():
            hashed = place.get("hash")
            where = f"orgs.{org}.teams.{team}.keys.{key}"
            if not isinstance(hashed, str) or not _HASH.fullmatch(hashed):
                raise self._wrong(f"{where}.hash", "must be an HMAC-SHA256, 64 lower-case hexadecimal digits")
            if bytes.fromhex(hashed) in tenants:
                other = tenants[bytes.fromhex(hashed)].levels[-1].name
                raise self._wrong(f"{where}.hash", f"is that of {other} too; every key belongs to one")
            tenants[bytes.fromhex(hashed)] = self.tenant(org, team, key)
        return tenants

    def tenant(self, org: str, team: str, key: str) -> Tenant:
        org_table = self._child(self.orgs, "orgs", org)
        teams = self._child(org_table, f"orgs.{org}", "teams")
        team_table = self._child(teams, f"orgs.{org}.teams", team)
        keys = self._child(team_table, f"orgs.{org}.teams.{team}", "keys")
        key_table = self._child(keys, f"orgs.{org}.teams.{team}.keys", key)
        where, name = f"orgs.{org}.teams.{team}.keys.{key}", f"{org}/{team}"
        levels = self._levels(
            (org, org_table, f"orgs.{org}", ("teams",)),
            (name, team_table, f"orgs.{org}.teams.{team}", ("keys", *_TENANT)),
            (f"{name}/{key}", key_table, where, ("hash", "class", "administers")),
        )
        managed = {"": "", "team": name, "org": org}
        administers = str(key_table.get("administers", ""))
        if administers not in managed:
            raise self._wrong(f"{where}.administers", f"must be team or org, got {administers!r}")
        tenant = Tenant(
            **self._team(team_table, f"orgs.{org}.teams.{team}"),
            name=name,
            levels=levels,
            administers=managed[administers],
        )
        own = self._class(key_table, where)
        return replace(tenant, request_class=own) if own else tenant

    def teams(self) -> Iterator[Tenant]:
        """Yield the tenant of each team, without levels."""
        for org, org_table in self.orgs.items():
            for team, table in org_table.get("teams", {}).items():
                yield Tenant(**self._team(table, f"orgs.{org}.teams.{team}"), name=f"{org}/{team}")

    def has(self, org: str, team: str) -> bool:
        return team in self.orgs.get(org, {}).get("teams", {})

    def member(self, org: str, team: str, key: str, default_team: str) -> Tenant | None:
        """See KeyTable.member."""
        name = f"{org}/{team}"
        like = name if self.has(org, team) else default_team
        if not like:
            return None
        like_org, _, like_team = like.partition("/")
        table = self.orgs[like_org]["teams"][like_team]
        limits_of = org if org in self.orgs else like_org
        levels = self._levels(
            (org, self.orgs[limits_of], f"orgs.{limits_of}", ("teams",)),
            (name, table, f"orgs.{like_org}.teams.{like_team}", ("keys", *_TENANT)),
            (f"{name}/{key}", {}, "", ()),
        )
        return Tenant(**self._team(table, f"orgs.{like_org}.teams.{like_team}"), name=name, levels=levels)

    def _keys(self) -> Iterator[tuple[str, str, str, Mapping]]:
        for org in self.orgs:
            org_table = self._child(self.orgs, "orgs", org)
            self._level(org, org_table, f"orgs.{org}", "teams")
            teams = self._child(org_table, f"orgs.{org}", "teams")
            for team in teams:
                team_table = self._child(teams, f"orgs.{org}.teams", team)
                self._level(team, team_table, f"orgs.{org}.teams.{team}", "keys", *_TENANT)
                self._team(team_table, f"orgs.{org}.teams.{team}")
                keys = self._child(team_table, f"orgs.{org}.teams.{team}", "keys")
                for key in keys:
                    yield org, team, key, self._child(keys, f"orgs.{org}.teams.{team}.keys", key)

    def _levels(self, *places: tuple[str, Mapping, str, tuple[str, ...]]) -> tuple[Level, ...]:
        """Return the levels of a tenant: of each its name, table and place, and what it may have beside limits."""
        levels, around = [], self._periods(self._child(self.table, "", "budgets"), "budgets", _AROUND)
        for name, table, where, besides in places:
            levels.append(self._level(name, table, where, *besides, around=around))
            around = self._periods(table, where, around)
        return tuple(levels)

    def _level(self, name: str, table: Mapping, where: str, *besides: str, around: _Around = _AROUND) -> Level:
        """Return a level. around: time zone and warning of the level above."""
        around, scopes = self._periods(table, where, around), table.get("limits", [])
        if not isinstance(scopes, list) or not all(isinstance(scope, Mapping) for scope in scopes):
            raise self._wrong(f"{where}.limits", "must be tables, [[…limits]], each with model or endpoint")
        limits = self._limits(table, where, around, ("limits", "max_in_flight", *besides))
        made = [self._scope(scope, f"{where}.limits[{number}]", around) for number, scope in enumerate(scopes)]
        names = [scope.name for scope in made]
        if twice := next((scope for scope in names if names.count(scope) > 1), ""):
            raise self._wrong(f"{where}.limits", f"must have one table for{twice}, got two")
        level = Level(name, limits, tuple(made))
        if level.quotas:
            self.with_quotas[where] = level
        return level

    def _scope(self, table: Mapping, where: str, around: _Around) -> Scope:
        model, endpoint, endpoints = table.get("model", ""), table.get("endpoint", ""), get_args(Operation)
        if not isinstance(model, str) or " " in model:
            raise self._wrong(f"{where}.model", f"must be the name of a model, got {model!r}")
        if endpoint not in ("", *endpoints):
            raise self._wrong(f"{where}.endpoint", f"must be one of {', '.join(endpoints)}, got {endpoint!r}")
        if not model and not endpoint:
            raise self._wrong(where, "must have model or endpoint, or both")
        around = self._periods(table, where, around)
        return Scope(model, endpoint, self._limits(table, where, around, ("model", "endpoint")))

    def _periods(self, table: Mapping, where: str, around: _Around) -> dict[str, Any]:
        """Return the time zone and the warning of a level, where it has none of its own those of the level above."""
        zone, warn_at = (table.get(name, around[name]) for name in ("time_zone", "warn_at"))
        try:
            check_zone(zone)
        except ValueError as exc:
            raise self._wrong(f"{where}.time_zone", str(exc)) from None
        if isinstance(warn_at, bool) or not isinstance(warn_at, (int, float)) or not 0 < warn_at <= 1:
            raise self._wrong(f"{where}.warn_at", f"must be a number above 0, 1 at most, got {warn_at!r}")
        return {"time_zone": zone, "warn_at": warn_at}

    def _quotas(self, table: Mapping, where: str, around: _Around) -> tuple[Quota, ...]:
        found = []
        for name, kind in _QUOTAS.items():
            if (value := table.get(name)) is None:
                continue
            if kind.money:
                most, allowed = _micros(value), f"a sum above 0, {_MOST_MONEY} at most, with at most 6 decimals"
            else:
                most, allowed = value if type(value) is int and 1 <= value < 2**53 else 0, "an integer from 1"
            if not most:
                raise self._wrong(f"{where}.{name}", f"must be {allowed}, got {value!r}")
            found.append(replace(kind, most=most, **around))
        return tuple(found)

    def _limits(self, table: Mapping, where: str, around: _Around, besides: tuple[str, ...]) -> Limits:
        names = [name for name in _LIMITS if name != "max_in_flight"]
        self._only(table, where, (*names, *_QUOTA_FIELDS, *besides))
        for name in _LIMITS:
            value = table.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise self._wrong(f"{where}.{name}", f"must be an integer from 1, got {value!r}")
        for burst, rate in (("burst_tokens", "tokens_per_minute"), ("burst_requests", "requests_per_minute")):
            if burst in table and rate not in table:
                raise self._wrong(f"{where}.{burst}", f"is allowed only together with {rate}")
        return Limits(**{name: table.get(name) for name in _LIMITS}, quotas=self._quotas(table, where, around))

    def _team(self, table: Mapping, where: str) -> dict:
        models, pool = table.get("models", []), table.get("pool", "")
        priority, weight = table.get("priority", 1), table.get("weight", 1.0)
        samples = table.get("samples", False)
        if not isinstance(models, list) or not all(isinstance(model, str) and model for model in models):
            raise self._wrong(f"{where}.models", f"must be a list of model names, got {models!r}")
        if not isinstance(pool, str):
            raise self._wrong(f"{where}.pool", f"must be the name of a pool, got {pool!r}")
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= LOWEST_PRIORITY:
            raise self._wrong(f"{where}.priority", f"must be an integer from 0 to {LOWEST_PRIORITY}, got {priority!r}")
        if not isinstance(samples, bool):
            raise self._wrong(f"{where}.samples", f"must be true or false, got {samples!r}")
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not 0.001 <= weight <= 1000:
            raise self._wrong(f"{where}.weight", f"must be a number from 0.001 to 1000, got {weight!r}")
        own = self._class(table, where)
        if own and "priority" in table:
            raise self._wrong(f"{where}.priority", "is allowed only without class, which has a priority")
        classes = table.get("classes", [])
        if not isinstance(classes, list) or not all(name in self.classes for name in classes):
            raise self._wrong(f"{where}.classes", f"must be a list of {self._class_names}, got {classes!r}")
        return {
            "models": tuple(models),
            "pool": pool,
            "priority": priority,
            "weight": float(weight),
            "request_class": own,
            "classes": tuple(classes),
            "samples": samples,
        }

    def _class(self, table: Mapping, where: str) -> str:
        """Return the class in a table; "" for none."""
        name = table.get("class", "")
        if name != "" and name not in self.classes:
            raise self._wrong(f"{where}.class", f"must be one of {self._class_names}, got {name!r}")
        return str(name)

    @property
    def classes(self) -> list[str]:
        return list(self.table.get("classes", {}))

    @property
    def _class_names(self) -> str:
        return ", ".join(self.classes) or "the classes, there is no [classes.NAME]"

    def _child(self, table: Mapping, where: str, name: str) -> Mapping:
        place = f"{where}.{name}" if where else name
        if where.endswith(("orgs", ".teams", ".keys")) and not _NAME.fullmatch(name):
            raise self._wrong(place, "allowed in a name are letters, digits, dot, underscore and hyphen, 64 at most")
        child = table.get(name, {})
        if not isinstance(child, Mapping):
            raise self._wrong(place, "is not a table")
        return child

    def _only(self, table: Mapping, where: str, allowed: tuple[str, ...]) -> None:
        for name in table:
            if name not in allowed:
                raise self._wrong(
                    f"{where}.{name}" if where else name, f"is not known: must be one of {', '.join(allowed)}"
                )

    def _wrong(self, where: str, problem: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path}: {where}", problem)
