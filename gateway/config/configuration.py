"""The configuration file as it stands now: tenants with their keys, and the rules of ``gateway.config.policy``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from contract import toml_table
from contract.errors import InvalidArgument
from gateway.config import policy, release, tenants
from gateway.config.identity import expanded
from gateway.config.policy import Policy
from gateway.config.pools import Pools
from gateway.config.settings import variable
from gateway.config.tenant import Tenant
from gateway.config.tenants import KeyTable

POLL_S = 0.5  # a release that is rolled back has no new requests within a second
_ANYBODY = Tenant()
_Status = tuple[int, int, int]  # of a file: time of the last change, size, inode
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """One reading of the file and the environment."""

    keys: KeyTable
    policy: Policy
    pools: Pools

    @cached_property
    def keyed(self) -> bool:
        """Whether callers need a key or a token."""
        return bool(self.keys) or bool(self.policy.identity.issuers)


def read(path: Path | None, environ: Mapping[str, str], pools: Pools) -> Reading:
    """Read keys, rules and pools. pools: those of the environment.

    Raises InvalidArgument that names the file, the place in it and what is allowed there.
    """
    return reading(str(path), toml_table.read(path) if path is not None else {}, environ, pools)


def reading(path: str, found: Mapping[str, Any], environ: Mapping[str, str], pools: Pools) -> Reading:
    """Return the reading of a file's table. Raises: as ``read``."""
    rules = policy.read(path, found, environ)
    there = pools.changed(path, rules.pools, frozenset(rule.candidate for rule in rules.releases.values()))
    keys, default_team = tenants.read(path, found, environ, rules), rules.identity.default_team
    policy.check_named(path, rules.pools_used + keys.pools_used, there.sources, "pools")
    release.check(path, rules.releases, there.weights or {}, there.encoders)
    release.check_gates(path, rules.releases)
    if default_team and not keys.orgs.has(default_team):
        raise InvalidArgument(f"{path}: identity.default_team", f"must be a team of the file, got {default_team!r}")
    others = bool(rules.identity.issuers) or bool(environ.get(variable("key_store")))
    for field, name in rules.tenants_named:
        if not default_team and not keys.may_have(name, others):
            raise InvalidArgument(f"{path}: {field}", f"must be organisations, teams or keys of the file, got {name!r}")
    if keys.quotas and not (rules.budgets.redis or environ.get(variable("usage_db"))):
        problem = f"days and months need {variable('usage_db')}, or [budgets] redis, where they outlive a restart"
        raise InvalidArgument(f"{path}: {next(iter(keys.quotas))}", problem)
    if rules.models:
        scoped = [
            (place, scope.model.partition(":")[0]) for place, level in keys.quotas.items() for scope in level.scopes
        ]
        used = [(f"{place}.limits.model", model) for place, model in scoped if model]
        policy.check_named(path, used, [*rules.models, *filter(None, there.sources)], "models")
    free = [name for name, model in rules.models.items() if model.price is None and not model.router]
    if any(quota.money for level in keys.quotas.values() for quota in level.quotas) and (free or not rules.models):
        _LOG.warning("%s: money is limited, and %s have no price", path, ", ".join(free) or "all models")
    return Reading(keys, rules, there)


class Configuration:
    """Keys and rules, read at once and again whenever the file at ``path``, if there is one, changes (``watch``).

    A reading that fails changes nothing: the last good one stays, the reason is logged once and stands in ``problem``.
    The first one raises it. ``changed`` is called after every good reading but the first, ``prepare`` before it takes
    effect, in another thread; it may raise InvalidArgument. ``noted`` is called with the problem of a reading, or ""
    and the sections that changed.
    """

    def __init__(self, path: Path | None, environ: Mapping[str, str], pools: Pools) -> None:
        self.path, self._environ, self._pools = path, environ, pools
        self._seen: dict[Path, _Status | None] = {path: _status(path)} if path is not None else {}
        found = toml_table.read(path) if path is not None else {}
        self._watch(found)
        self._reading = reading(str(path), found, environ, pools)
        self.changed: Callable[[], None] = lambda: None
        self.prepare: Callable[[Policy], None] = lambda policy: None
        self.noted: Callable[[str, list[str]], None] = lambda problem, sections: None
        self.problem = ""
        self.stored_keys = False  # whether there are keys that the file does not have
        self._reloading = asyncio.Lock()

    @property
    def policy(self) -> Policy:
        return self._reading.policy

    @property
    def pools(self) -> Pools:
        return self._reading.pools

    def check(self, found: Mapping[str, Any]) -> None:
        """Raises InvalidArgument if the file could not hold this table."""
        reading(str(self.path), found, self._environ, self._pools)

    @property
    def keyless(self) -> bool:
        """Whether there are no API keys and no issuers; then all callers are one tenant, for private networks."""
        return not self._reading.keyed and not self.stored_keys

    @property
    def has_roles(self) -> bool:
        """Whether a caller can be more than a caller."""
        return self._others or any(tenant.administers for tenant in self._reading.keys.tenants())

    @property
    def _others(self) -> bool:
        return self.stored_keys or bool(self.policy.identity.issuers)

    def tenant(self, api_key: str) -> Tenant:
        """Return the tenant of the key, "" if none was sent. Raises Unauthenticated."""
        return _ANYBODY if self.keyless else self._reading.keys.tenant(api_key)

    def member(self, org: str, team: str, key: str) -> Tenant | None:
        """Return the tenant of a caller whose key is not in the file; None for an unknown team."""
        return self._reading.keys.orgs.member(org, team, key, self.policy.identity.default_team)

    def pinned_pools(self) -> set[str]:
        return {tenant.pool for tenant in self._reading.keys.tenants(self._others) if tenant.pool}

    def sampled(self) -> set[str]:
        """Return the tenants whose prompts and answers may be kept, as the log names them."""
        found = {tenant.name for tenant in self._reading.keys.tenants(self._others) if tenant.samples}
        like_default = self._others and self.policy.identity.default_team in found
        return found | ({"teams that are not in the file"} if like_default else set())

    def named(self, tenant: str, key: str) -> Tenant | None:
        """Return a tenant as its key sees it now, for work that outlives its request; None if the key is gone.

        key: name of the key's level; "" without keys.
        """
        found = _ANYBODY if self.keyless and not key else self._reading.keys.named(key)
        return found if found is not None and found.name == tenant else None

    async def watch(self) -> None:
        """Read the file whenever it or a file with a secret of it changes, until cancelled."""
        while self._seen:
            await asyncio.sleep(POLL_S)
            # Whatever goes wrong with one change, later ones must still be seen.
            [error] = await asyncio.gather(self.poll(), return_exceptions=True)
            if error is not None:
                _LOG.error("a change of the configuration was not taken over completely", exc_info=error)

    async def poll(self) -> None:
        """Read the file if it changed since the last poll."""
        if any(_status(path) != seen for path, seen in self._seen.items()):
            await self.reload()

    async def reload(self) -> None:
        """Read the file, changed or not. One that cannot be used changes nothing and is logged once."""
        if not self._seen:
            return
        async with self._reloading:
            self._seen = {path: _status(path) for path in self._seen}
            try:
                found = await asyncio.to_thread(toml_table.read, self.path) if self.path is not None else {}
                self._watch(found)
                # Thousands of keys take a while to read, and streams must not stand still meanwhile.
                new = await asyncio.to_thread(reading, str(self.path), found, self._environ, self._pools)
                if not new.keyed and not self.keyless and not self.stored_keys:
                    problem = "has no keys and issuers any more; a restart opens the gateway to everybody"
                    raise InvalidArgument(str(self.path), problem)
                await asyncio.to_thread(self.prepare, new.policy)
            except InvalidArgument as exc:
                if str(exc) != self.problem:
                    _LOG.error("the configuration stays as it was: %s", exc)
                    self.noted(str(exc), [])
                self.problem = str(exc)
                return
            except Exception as exc:  # not foreseen; operators are told all the same
                self.problem = f"{type(exc).__name__}: {exc}"
                raise
            self._take(new)

    def _take(self, reading: Reading) -> None:
        keys, old, self._reading, self.problem = self._reading.keys, self.policy, reading, ""
        changed = [name for name in policy.SECTIONS if getattr(old, name) != getattr(reading.policy, name)]
        self.noted("", changed + (["orgs"] if keys.orgs.table != reading.keys.orgs.table else []))
        for place, before, after in (
            ("[budgets] redis", old.budgets.redis, reading.policy.budgets.redis),
            ("[reuse]", old.reuse, reading.policy.reuse),
        ):
            if before != after:
                _LOG.warning("%s: %s changed and holds from the next start on", self.path, place)
        _LOG.info("the configuration was read again")
        self.changed()

    def _watch(self, found: Mapping[str, Any]) -> None:
        """Watch the file and those with secrets that its table names, also those that are not there yet."""
        watched = [self.path] if self.path is not None else []
        keys_file = self._environ.get(tenants.API_KEYS_FILE)
        for name in (*policy.secret_files(found), *([keys_file] if keys_file else [])):
            with contextlib.suppress(ValueError):  # a path that no file can have, which the reading refuses
                watched.append(expanded(name))
        # As they were before this reading: what changes meanwhile is read once more.
        self._seen = {path: self._seen[path] if path in self._seen else _status(path) for path in watched}


def _status(path: Path) -> _Status | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
