"""API keys that are made, rotated and revoked while the gateway runs. Only their hashes are kept.

They are documents in a SQLite file, or in the Redis that gateways share, read and written whole. All raise Unavailable.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import orjson

from contract.background import Background
from contract.errors import InvalidArgument, NotFound, Unauthenticated, Unavailable
from gateway.admission.shared_state import SharedState
from gateway.config.identity import level_name
from gateway.config.tenant import Tenant
from gateway.config.tenants import digest, new_key
from gateway.database import Database
from gateway.identity.principal import Principal, Role

POLL_S = 0.4  # a key that is revoked is refused everywhere within a second
WRITE_S = 10.0  # between two writes of when keys were used
KEPT_S = 90 * 86_400.0  # keys that ended stay in the list for so long
MAX_KEYS = 10_000
KeyRole = Literal["caller", "team_admin", "org_admin", "operator"]
Result = TypeVar("Result")
_LOG = logging.getLogger(__name__)
Change = Callable[[bytes], tuple[bytes, Result]]  # from a document to another one, and what to return
_SCHEMA = "CREATE TABLE documents (name TEXT PRIMARY KEY, body BLOB NOT NULL)"


class FileDocuments(Database):
    """Documents in a SQLite file, for the processes of one machine. Raises: InvalidArgument if it cannot be used."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "database of keys", _SCHEMA, 1)

    async def read(self, name: str) -> bytes:
        return await asyncio.to_thread(self._changed, name, None)

    async def change(self, name: str, change: Change[Result]) -> Result:
        """Write what ``change`` makes of a document, as if no other process wrote. It may be called several times."""
        return await asyncio.to_thread(self._changed, name, change)

    def _changed(self, name: str, change: Change[Any] | None) -> Any:
        with self._transaction() as db:
            body = (db.execute("SELECT body FROM documents WHERE name = ?", (name,)).fetchone() or (b"",))[0]
            if change is None:
                return body
            made, result = change(body)
            db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?)", (name, made))
        return result


class RedisDocuments:
    """Documents in Redis; see FileDocuments. state: belongs to the caller, who closes it."""

    def __init__(self, state: SharedState) -> None:
        self._state = state

    async def read(self, name: str) -> bytes:
        return await self._state.call(lambda: self._state.redis.get(f"trident:{{identity}}:{name}")) or b""

    async def change(self, name: str, change: Change[Result]) -> Result:
        key = f"trident:{{identity}}:{name}"

        async def run(pipe: Any) -> Result:
            made, result = change(await pipe.get(key) or b"")
            pipe.multi()
            pipe.set(key, made)
            return result

        made: Result = await self._state.call(lambda: self._state.redis.transaction(run, key, value_from_callable=True))
        return made

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class StoredKey:
    """One key. name: ORG/TEAM/KEY; while keys are rotated several have one. hash: hexadecimal. Times: Unix seconds."""

    id: str
    name: str
    role: KeyRole
    hash: str
    created: float
    created_by: str
    expires: float | None = None
    revoked: float | None = None

    def described(self, now_s: float, used: float | None = None) -> dict[str, Any]:
        """Return what a list shows."""
        expired = self.expires is not None and self.expires <= now_s
        state = "revoked" if self.revoked is not None else "expired" if expired else "active"
        fields = {name: value for name, value in asdict(self).items() if name != "hash"}
        return {**fields, "last_used": used, "state": state}

    def active(self, now_s: float) -> bool:
        return self.revoked is None and (self.expires is None or self.expires > now_s)


class StoredKeys:
    """The keys in ``documents``. ``start`` and ``close`` it on the loop that serves. member: finds the tenant of
    organisation, team and key; None for an unknown team."""

    def __init__(
        self,
        documents: FileDocuments | RedisDocuments,
        member: Callable[[str, str, str], Tenant | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._documents, self._member, self._clock = documents, member, clock
        self.read = False  # whether the keys were read once
        self._stale = False  # whether they could not be read at the last poll
        self.principals: dict[str, Principal] = {}  # by id; cleared when teams change
        self._body, self._salt = b"", b""
        self._keys: dict[bytes, StoredKey] = {}
        self._ids: set[str] = set()  # of all keys, also of revoked ones
        self._used: dict[str, float] = {}  # not yet written
        self._written_s = 0.0
        self._polling = Background()

    async def start(self) -> None:
        await self._step()
        self._polling.start(self._poll())

    async def close(self) -> None:
        if len(self._polling):
            await self._polling.cancel()
            self._written_s = 0.0
            await self._step()
        self._documents.close()

    def find(self, api_key: str) -> Principal | None:
        """Return whose a key is; None for an unknown one, and one that has ended. Raises: Unauthenticated."""
        key, now_s = self._keys.get(digest(self._salt, api_key)), self._clock()
        if key is None or not key.active(now_s):
            return None
        found = self.principals.get(key.id)
        if found is None:
            org, team, name = key.name.split("/")
            tenant = self._member(org, team, name)
            if tenant is None:
                raise Unauthenticated("the team of this API key is not configured any more")
            managed = {"team_admin": tenant.name, "org_admin": org}.get(key.role, "")
            role: Role = "operator" if key.role == "operator" else "tenant_admin" if managed else "caller"
            found = self.principals[key.id] = Principal(role, f"key {key.name} {key.id}", tenant, managed)
        self._used[key.id] = now_s
        return found

    def named(self, name: str) -> Tenant | None:
        """Return the tenant of a name with an active key."""
        now_s = self._clock()
        if not any(key.name == name and key.active(now_s) for key in self._keys.values()):
            return None
        org, team, key = name.split("/")
        return self._member(org, team, key)

    async def make(
        self, name: str, by: str, role: KeyRole | None, lasts_s: float | None, overlap_s: float = 0.0
    ) -> dict[str, Any]:
        """Make a key; return it as in the list, and the key itself, which is kept nowhere, as ``key``.

        role: None for another key of a name that has one: that holds for ``overlap_s`` more, and gives role and
        duration where ``lasts_s`` is None. Raises: InvalidArgument, NotFound.
        """
        parts = name.split("/")
        if len(parts) != 3 or not all(map(level_name, parts)):
            raise InvalidArgument("name", f"must be ORG/TEAM/KEY, got {name!r:.200}")
        if self._member(parts[0], parts[1], parts[2]) is None:
            raise InvalidArgument("name", f"must be in a team of the configuration file, got {name}")
        now_s, secret = self._clock(), new_key()

        def change(salt: bytes, keys: list[StoredKey]) -> tuple[list[StoredKey], dict[str, Any]]:
            named = [key for key in keys if key.name == name]
            old = [key for key in named if key.active(now_s)]
            if role is not None and old:
                problem = f"must be new, got {name}, which has an active key; rotate it; a failed call may have made it"
                raise InvalidArgument("name", problem)
            if role is None and not old:
                raise NotFound(f"there is no active key {name}")
            lasts, ends_s = lasts_s, now_s + overlap_s
            if old and lasts is None and named[-1].expires is not None:  # the latest, which no overlap has shortened
                lasts = named[-1].expires - named[-1].created
            expires, hashed = None if lasts is None else now_s + lasts, digest(salt, secret).hex()
            made = StoredKey(secrets.token_hex(6), name, role or old[-1].role, hashed, now_s, by, expires)
            kept = [replace(key, expires=min(ends_s, key.expires or ends_s)) if key in old else key for key in keys]
            return [*kept, made], made.described(now_s) | {"key": secret}

        return await self._change(change)

    async def revoke(self, target: str) -> list[dict[str, Any]]:
        """Revoke the key of an id, or all of a name; return them. Raises: NotFound."""
        now_s = self._clock()

        def change(salt: bytes, keys: list[StoredKey]) -> tuple[list[StoredKey], list[dict[str, Any]]]:
            ended = {key for key in keys if target in (key.id, key.name) and key.active(now_s)}
            if not ended:
                raise NotFound(f"there is no active key {target}")
            changed = [replace(key, revoked=now_s) if key in ended else key for key in keys]
            return changed, [key.described(now_s) for key in changed if key.revoked == now_s]

        return await self._change(change)

    async def described(self) -> list[dict[str, Any]]:
        """Return all keys, the oldest first."""
        keys = _parsed(await self._documents.read("keys"))[1]
        used = orjson.loads(await self._documents.read("used") or b"{}") | self._used
        return [key.described(self._clock(), used.get(key.id)) for key in keys]

    async def _change(self, change: Callable[[bytes, list[StoredKey]], tuple[list[StoredKey], Result]]) -> Result:
        """Change the keys, here at once."""
        oldest_s = self._clock() - KEPT_S

        def run(body: bytes) -> tuple[bytes, Result]:
            salt, before = _parsed(body)
            keys, result = change(salt, before)
            kept = [asdict(key) for key in keys if (key.revoked or key.expires or oldest_s) >= oldest_s]
            if len(kept) > MAX_KEYS:
                raise InvalidArgument("name", f"must be one of at most {MAX_KEYS} keys, and there are so many")
            return orjson.dumps({"salt": salt.hex(), "keys": kept}), result

        result = await self._documents.change("keys", run)
        await self._step()
        return result

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self._step()

    async def _step(self) -> None:
        """Read the keys if they changed, and write when they were used. What fails is tried again."""
        try:
            body = await self._documents.read("keys")
            if not self.read or body != self._body:
                self._salt, keys = _parsed(body)
                self._ids = {key.id for key in keys}
                self._keys = {bytes.fromhex(key.hash): key for key in keys if key.revoked is None}
                self._body, self.read = body, True
                self.principals.clear()
            if self._used and time.monotonic() - self._written_s >= WRITE_S:
                self._written_s, used, known = time.monotonic(), dict(self._used), self._ids

                def later(body: bytes) -> tuple[bytes, None]:
                    latest: dict[str, float] = orjson.loads(body or b"{}")
                    latest |= {key: max(used_s, latest.get(key, 0.0)) for key, used_s in used.items()}
                    return orjson.dumps({key: used_s for key, used_s in latest.items() if key in known}), None

                await self._documents.change("used", later)
                self._used = {key: used_s for key, used_s in self._used.items() if used_s != used.get(key)}
            self._stale = False
        except (Unavailable, AttributeError, KeyError, TypeError, ValueError) as exc:  # all but one: of a document
            if not self._stale:  # once, until they can be read again
                _LOG.warning("the API keys stay as they were: %s", exc if isinstance(exc, Unavailable) else repr(exc))
            self._stale = True


def _parsed(body: bytes) -> tuple[bytes, list[StoredKey]]:
    """Return the salt and the keys of a document, which may have fields of a later version; a new salt for an empty
    one."""
    document: dict[str, Any] = orjson.loads(body) if body else {"salt": secrets.token_hex(16), "keys": []}
    known = {field.name for field in fields(StoredKey)}
    keys = [StoredKey(**{name: one[name] for name in one.keys() & known}) for one in document["keys"]]
    return bytes.fromhex(document["salt"]), keys
