"""The public keys of one issuer: read in the background, kept through its outages, read again for an unknown key id."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
from joserfc import jwk, jws
from joserfc.errors import JoseError

from contract.background import Background
from contract.errors import InvalidArgument, Unavailable
from gateway.config.identity import IdentityRules, IssuerRules

DISCOVERY = "/.well-known/openid-configuration"
MAX_BYTES = 1024 * 1024
TIMEOUT_S = 5.0
FILE_S = 0.5  # between two looks at a file
RETRY_S = 5.0  # after a failure, where refresh_s is not shorter
LEAST_RSA_DIGITS = 342  # of 2048 bits, in base64
_LOG = logging.getLogger(__name__)


class IssuerKeys:
    """The keys of an issuer. ``start`` and ``close`` it on the loop that serves. identity: the times of the section."""

    def __init__(self, name: str, rules: IssuerRules, identity: IdentityRules) -> None:
        self.name, self.rules, self.identity = name, rules, identity
        self.keys: tuple[jwk.Key, ...] = ()
        self._read_s = -math.inf  # when the keys were read last
        self._refetched_s = -math.inf  # when they were last read for an unknown id
        self._problem = ""
        self._document: Any = None  # with the keys
        self._tasks = Background()
        self._reading: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._read()
        self._tasks.start(self._refresh())

    async def close(self) -> None:
        await self._tasks.cancel()

    async def key(self, kid: str | None, algorithm: str) -> jwk.Key | None:
        """Return the key of an id, None if the issuer has none; ``kid`` None: its only key for the algorithm. Raises:
        Unavailable while there are no keys that may be used."""
        found = self._find(kid, algorithm)
        if found is None and self._reading is not None and not self._reading.done():
            await asyncio.wait([self._reading])  # all who wait share one reading, which no caller can cancel
            found = self._find(kid, algorithm)
        now_s = time.monotonic()
        if found is None and now_s - self._refetched_s >= self.identity.refetch_s:
            self._refetched_s = now_s
            await asyncio.wait([self._read()])
            found = self._find(kid, algorithm)
        if time.monotonic() - self._read_s > self.identity.max_age_s:
            raise Unavailable("the issuer of this token cannot be reached, and its keys are not known", RETRY_S)
        return found

    def _find(self, kid: str | None, algorithm: str) -> jwk.Key | None:
        usable = [key for key in self.keys if key.get("alg") in (None, algorithm) and _fits(key, algorithm)]
        if kid is not None:
            return next((key for key in usable if key.get("kid") == kid), None)
        return usable[0] if len(usable) == 1 else None

    def _read(self) -> asyncio.Task[None]:
        """Start reading the keys, where that has not begun."""
        if self._reading is None or self._reading.done():
            self._reading = self._tasks.start(self._take())
        return self._reading

    async def _refresh(self) -> None:
        """Read the keys again and again."""
        while True:
            await asyncio.wait([self._read()])
            usual_s = self.identity.refresh_s if self.rules.jwks_file is None else FILE_S
            await asyncio.sleep(min(RETRY_S, usual_s) if self._problem else usual_s)

    async def _take(self) -> None:
        """Read the keys once. What fails is logged once and changes nothing."""
        path = self.rules.jwks_file
        try:
            if path is None:
                document = await self._fetched()
            else:
                document = orjson.loads(await asyncio.to_thread(path.read_bytes))
            if document != self._document:
                self.keys = imported(document, str(path or self.rules.issuer))
                self._document = document
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, InvalidArgument) as exc:
            problem = str(exc) or type(exc).__name__
            if problem != self._problem:
                _LOG.error("the keys of issuer %s stay as they were: %s", self.name, problem)
            self._problem = problem
            return
        if self._problem:
            _LOG.info("the keys of issuer %s were read again", self.name)
        self._problem, self._read_s = "", time.monotonic()

    async def _fetched(self) -> Mapping[str, Any]:
        """Return the set of keys at the issuer's address. Raises: what ``_take`` catches."""
        rules, url = self.rules, self.rules.jwks_url
        secure: ssl.SSLContext | bool = True
        if rules.ca_file is not None:  # read again each time, since authorities are replaced too
            secure = await asyncio.to_thread(ssl.create_default_context, cafile=rules.ca_file)
        timeout, connector = aiohttp.ClientTimeout(total=TIMEOUT_S), aiohttp.TCPConnector(ssl=secure)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            if url is None:
                place = rules.issuer.rstrip("/") + DISCOVERY
                document = await _get(session, place)
                url = document.get("jwks_uri")
                if (issuer := document.get("issuer")) != rules.issuer:
                    raise InvalidArgument(place, f"must be of issuer {rules.issuer}, got {issuer!r:.200}")
                allowed = ("https://",) if rules.issuer.startswith("https") else ("https://", "http://")
                if not isinstance(url, str) or not url.startswith(allowed):
                    raise InvalidArgument(f"{place}: jwks_uri", f"must be {'… or '.join(allowed)}…, got {url!r:.200}")
            return await _get(session, url)


def _fits(key: jwk.Key, algorithm: str) -> bool:
    """Return whether a key has the type and curve of an algorithm; keys of different types may share an id."""
    with contextlib.suppress(JoseError):
        jws.JWSRegistry.algorithms[algorithm].check_key(key)
        return True
    return False


async def _get(session: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
    """Return a JSON object. A redirect is not followed: it could lead to keys of another host."""
    async with session.get(url, allow_redirects=False) as answer:
        if answer.status != 200:
            raise InvalidArgument(url, f"must give status 200, got {answer.status}")
        data = bytearray()
        async for part in answer.content.iter_any():
            data += part
            if len(data) > MAX_BYTES:
                raise InvalidArgument(url, f"must give at most {MAX_BYTES} bytes")
    found = orjson.loads(data)
    if not isinstance(found, dict):
        raise InvalidArgument(url, "must give a JSON object")
    return found


def imported(document: Any, place: str) -> tuple[jwk.Key, ...]:
    """Return the keys of a JSON Web Key Set that can check signatures. Raises: InvalidArgument if there is none."""
    listed = document.get("keys") if isinstance(document, dict) else None
    found: list[jwk.Key] = []
    for entry in listed if isinstance(listed, list) else []:
        if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC", "OKP"):
            continue
        operations = entry.get("key_ops", ["verify"])
        signs = entry.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations
        if not signs or (entry["kty"] == "RSA" and len(str(entry.get("n"))) < LEAST_RSA_DIGITS):
            continue
        with contextlib.suppress(JoseError, ValueError, TypeError, KeyError, OverflowError):
            found.append(jwk.import_key({name: entry[name] for name in entry if name not in ("x5c", "x5u")}))
    if not found:
        problem = "must have a public key for signatures, of type RSA (2048 bits or more), EC or OKP"
        raise InvalidArgument(place, problem)
    return tuple(found)
