"""Change a release in the configuration file, which keeps its comments and its order."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from contract.errors import InvalidArgument, NotFound
from gateway.config import policy, release
from gateway.config.release import MAX_REASON, ReleaseRules


def apply(
    path: Path,
    action: str,
    name: str,
    fields: Mapping[str, Any],
    check: Callable[[Mapping[str, Any]], object] = lambda table: None,
    shares: Mapping[str, float] = MappingProxyType({}),
) -> ReleaseRules:
    """Change one release in the file, atomically, and return its rules.

    action: ``start``: a new release, or one that begins again, with ``fields``. ``shift``: to the weight ``to``.
        ``rollback``: no request to the candidate any more, for ``reason``; once, until it is started again.
        ``finish``: one that has all requests takes the stable pool's place everywhere in the file, and its table goes.
    shares: the weight of every pool with generating models; for ``finish``. check: as Configuration.check.
    Raises: NotFound for a release that is not there; InvalidArgument for a field, and a file that cannot be written.
    """
    path = Path(os.path.realpath(path))
    try:
        with _locked(path.parent):
            document = tomlkit.parse(path.read_bytes())
            found = document.unwrap().get("releases", {})
            policy.read(str(path), {"releases": found}, {})
            changed = _changed(found.get(name, {}), action, name, fields)
            rules = policy.read(str(path), {"releases": {**found, name: changed}}, {}).releases
            if found.get(name) == changed and action != "finish":
                return rules[name]
            release.check(str(path), rules, {}, frozenset())
            releases = document.setdefault("releases", tomlkit.table(is_super_table=True))
            if action == "finish":
                _finish(document, name, rules[name], shares)
            elif name in releases:
                releases[name].update(changed)
                for field in releases[name].keys() - changed.keys():
                    del releases[name][field]
            else:
                releases[name] = changed
            text = tomlkit.dumps(document)
            check(tomlkit.parse(text).unwrap())
            _replace(path, text)
    except OSError as exc:
        raise InvalidArgument(str(path), f"cannot be changed: {exc.strerror or exc}") from exc
    except (UnicodeDecodeError, TOMLKitError) as exc:
        raise InvalidArgument(str(path), f"cannot be read as TOML: {exc}") from exc
    return rules[name]


def rollback_reason(fields: Mapping[str, Any]) -> str:
    """Return why a release is rolled back. Raises InvalidArgument."""
    reason = fields.get("reason") or "by an operator"
    if not isinstance(reason, str) or len(reason) > MAX_REASON:
        raise InvalidArgument("reason", f"must be a text of at most {MAX_REASON} characters, got {reason!r:.50}")
    return reason


def _changed(table: dict[str, Any], action: str, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    startable = {*ReleaseRules.model_fields} - {"started", "rolled_back"}
    allowed = {"start": startable, "shift": {"to"}, "rollback": {"reason"}, "finish": set[str]()}
    if action not in allowed:
        raise InvalidArgument("action", f"must be one of {', '.join(allowed)}, got {action!r:.50}")
    for field in fields.keys() - allowed[action]:
        raise InvalidArgument(field, f"is not known: must be one of {', '.join(sorted(allowed[action]))}")
    if action == "start":
        if isinstance(limits := fields.get("rollback"), Mapping):  # the others stay
            fields = {**fields, "rollback": {**table.get("rollback", {}), **limits}}
        started = {**table, **fields, "started": datetime.now(timezone.utc)}
        return {field: value for field, value in started.items() if field != "rolled_back"}
    if not table:
        raise NotFound(f"there is no release {name!r:.100}; start it first")
    if action == "rollback":
        return {**table, "rolled_back": table.get("rolled_back") or rollback_reason(fields)}
    if action == "finish":
        if table.get("rolled_back") or table.get("weight") != 100 or table.get("kind") == "shadow":
            problem = "must have all requests at its candidate to be finished: shift it to 100 first"
            raise InvalidArgument(f"releases.{name}", problem)
        return table
    if table.get("rolled_back"):
        raise InvalidArgument(f"releases.{name}", f"was rolled back ({table['rolled_back']}); start it again first")
    return {**table, "weight": fields.get("to")}


def _finish(document: tomlkit.TOMLDocument, name: str, rules: ReleaseRules, shares: Mapping[str, float]) -> None:
    del document["releases"][name]
    if not document["releases"]:
        del document["releases"]
    _rename(document, rules.stable, rules.candidate)
    if not shares.get(rules.stable):  # callers reach it by its name only
        return
    pools = document.setdefault("pools", tomlkit.table())
    for pool, weight in {**shares, rules.candidate: shares[rules.stable], rules.stable: 0.0}.items():
        if isinstance(pools.get(pool), Mapping):
            pools[pool]["weight"] = weight
        else:
            pools[pool] = weight


def _rename(table: Any, old: str, new: str) -> None:
    """Replace a pool's name where models, tenants and targets name it."""
    for field, value in table.items():
        if field in ("pool", "pools") and value == old:
            table[field] = new
        elif field == "pools" and isinstance(value, list):
            table[field] = [new if pool == old else pool for pool in value if pool != new]
        elif isinstance(value, Mapping):
            _rename(value, old, new)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of all writers on this machine. The folder's, as the file itself is replaced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    # One name for each machine, whose writers hold the lock: what a killed one has left does not pile up.
    new = path.with_name(f".{path.name}.{socket.gethostname()}")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        old = path.stat()
        with contextlib.suppress(PermissionError):  # only root may give files away; a gateway must be able to read it
            os.chown(new, old.st_uid, old.st_gid)
        os.chmod(new, old.st_mode & 0o7777)
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise
