"""Check the tokens of issuers and say whose they are."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from cachetools import TLRUCache, TTLCache
from joserfc import jws
from joserfc.errors import ExpiredTokenError, JoseError
from joserfc.jwt import JWTClaimsRegistry

from contract.background import Background
from contract.errors import PermissionDenied, Unauthenticated
from gateway.config.identity import IdentityRules, IssuerRules, level_name
from gateway.config.tenant import Tenant
from gateway.identity.issuer_keys import IssuerKeys
from gateway.identity.principal import Principal, Role

MAX_TOKEN_BYTES = 16 * 1024
MAX_KEPT = 10_000  # tokens that were verified
LOG_EVERY_S = 10.0  # the same reason of a refusal
TYPES = ("", "jwt", "at+jwt", "application/jwt", "application/at+jwt")  # not those of logouts and events
# With these a token brings its own key, or asks for rules that this gateway does not have.
REFUSED_HEADERS = frozenset({"jwk", "jku", "x5u", "x5c", "crit", "b64"})
_LOG = logging.getLogger(__name__)
TenantOf = Callable[[str, str, str], Tenant | None]  # of organisation, team and key; None for an unknown team


class _Registry(jws.JWSRegistry):
    """joserfc's, without a warning for EdDSA, which many issuers still call so."""

    max_header_length = 2048

    def get_alg(self, name: str) -> Any:
        assert self.allowed and name in self.allowed, "is checked before"
        return self.algorithms[name]


class Tokens:
    """The issuers of one gateway. tenant_of: finds the tenant of a caller's levels. clock: seconds since 1970."""

    def __init__(self, tenant_of: TenantOf, clock: Callable[[], float] = time.time) -> None:
        self._rules, self._tenant_of, self._clock = IdentityRules(), tenant_of, clock
        self._issuers: dict[str, IssuerKeys] = {}  # by the iss of their tokens
        self._kept: TLRUCache[bytes, tuple[float, IssuerKeys, Any, Principal]]
        self._kept = TLRUCache(MAX_KEPT, lambda key, kept, now_s: kept[0], timer=clock)
        self._logged: TTLCache[str, bool] = TTLCache(100, LOG_EVERY_S)
        self._stopping = Background()

    def change(self, rules: IdentityRules) -> None:
        """Take other rules, and find the tenants of all tokens again. Keys of an issuer that did not change stay."""
        self._kept.clear()
        old, self._rules, self._issuers = self._issuers, rules, {}
        for name, issuer in rules.issuers.items():
            known = old.get(issuer.issuer)
            if known is not None and (known.name, known.rules) == (name, issuer):
                known.identity = rules
                self._issuers[issuer.issuer] = old.pop(issuer.issuer)
            else:
                self._issuers[issuer.issuer] = made = IssuerKeys(name, issuer, rules)
                made.start()
        for gone in old.values():
            self._stopping.start(gone.close())

    async def close(self) -> None:
        await asyncio.gather(*(keys.close() for keys in self._issuers.values()), self._stopping.done())

    def takes(self, bearer: str) -> bool:
        """Return whether a bearer token looks like one of an issuer, and there are issuers."""
        return bool(self._issuers) and bearer.startswith("eyJ") and bearer.count(".") == 2

    async def principal(self, token: str) -> Principal:
        """Return whose a token is. Raises: Unauthenticated for one that is not valid, PermissionDenied for one of no
        tenant, Unavailable."""
        place = hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        known = self._kept.get(place)
        if known is not None and known[2] is known[1].keys:  # else the issuer has changed its keys
            return known[3]
        try:
            issuer, claims = await self._verified(token)
        except (JoseError, ValueError, TypeError, AttributeError, RecursionError) as exc:  # of what is no token at all
            self._log(str(exc))
            expired = isinstance(exc, ExpiredTokenError)
            error = Unauthenticated("this token has expired" if expired else "this token is not accepted here")
            error.headers = {"www-authenticate": f'Bearer error="invalid_token", error_description="{error.message}"'}
            raise error from None
        found = self._of(issuer, claims)
        until_s = min(float(claims["exp"]) + self._rules.leeway_s, self._clock() + self._rules.cache_s)
        if self._issuers.get(issuer.rules.issuer) is issuer:  # not removed while its keys were read
            self._kept[place] = until_s, issuer, issuer.keys, found
        return found

    async def _verified(self, token: str) -> tuple[IssuerKeys, Mapping[str, Any]]:
        """Return the issuer and the claims of a token. Raises: what ``principal`` catches, and Unavailable."""
        if len(token) > MAX_TOKEN_BYTES:
            raise ValueError(f"it has more than {MAX_TOKEN_BYTES} bytes")
        signed = jws.extract_compact(token.encode("ascii"), registry=_Registry())
        header, claims = signed.headers(), orjson.loads(signed.payload)
        if not isinstance(claims, dict) or not isinstance(claims.get("iss"), str):
            raise ValueError("it names no issuer")
        issuer = self._issuers.get(claims["iss"])
        if issuer is None:
            raise ValueError(f"its issuer {claims['iss']!r:.200} is not known")
        algorithm, kid, kind = header.get("alg"), header.get("kid"), header.get("typ", "")
        if algorithm not in issuer.rules.algorithms:
            raise ValueError(f"its algorithm {algorithm!r:.50} is not one of {', '.join(issuer.rules.algorithms)}")
        if refused := sorted(REFUSED_HEADERS & header.keys()):
            raise ValueError(f"its header has {', '.join(refused)}")
        if not isinstance(kind, str) or kind.lower() not in TYPES:
            raise ValueError(f"it is of type {kind!r:.50}")
        if kid is not None and not isinstance(kid, str):
            raise ValueError("its key id is no text")
        self._check(issuer.rules, claims)  # before the key: an expired token must not cause a request to the issuer
        key = await issuer.key(kid, algorithm)
        if key is None:
            raise ValueError(f"issuer {issuer.name} has no key {kid!r:.100} for {algorithm}")
        registry = _Registry(algorithms=[algorithm], strict_check_header=False)
        if not jws.validate_compact(signed, key, registry=registry):
            raise ValueError("its signature is wrong")
        return issuer, claims

    def _check(self, rules: IssuerRules, claims: dict[str, Any]) -> None:
        """Raises: JoseError for a token of another audience or time."""
        registry = JWTClaimsRegistry(
            now=math.ceil(self._clock()),
            leeway=int(self._rules.leeway_s),
            exp={"essential": True},
            aud={"essential": True, "values": list(rules.audience)},
        )
        registry.validate(claims)

    def _of(self, issuer: IssuerKeys, claims: Mapping[str, Any]) -> Principal:
        """Return the principal of claims. Raises: PermissionDenied."""
        rules = issuer.rules
        subject = rules.key.first(claims)
        key = f"{issuer.name}:{_safe(subject)}"
        operator = rules.operators is not None and bool(rules.operators.find(claims))
        tenant = None
        if subject and rules.team is not None:
            org, team = (rules.org.first(claims) if rules.org else ""), rules.team.first(claims)
            if rules.org is None:
                org, _, team = team.partition("/")
            if level_name(org) and level_name(team):
                tenant = self._tenant_of(org, team, key)
        if tenant is None and not operator:
            self._log(f"issuer {issuer.name}: the claims lead to no team of this gateway")
            raise PermissionDenied("this token belongs to no team that may use this gateway")
        administers = ""
        if tenant is not None:
            for rule, level in ((rules.team_admins, tenant.name), (rules.org_admins, tenant.levels[0].name)):
                administers = level if rule is not None and rule.find(claims) else administers
        role: Role = "operator" if operator else "tenant_admin" if administers else "caller"
        return Principal(role, f"token {tenant.levels[-1].name if tenant else key}", tenant, administers)

    def _log(self, reason: str) -> None:
        """Say why a token was refused; each reason once in a while, since anybody can cause it."""
        if reason not in self._logged and self._logged.currsize < self._logged.maxsize:
            self._logged[reason] = True
            _LOG.warning("a token was refused: %s", reason)


def _safe(text: str) -> str:
    """Return a text of a claim as the end of a level's name: different for different texts."""
    if re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", text):
        return text
    return f"{re.sub(r'[^A-Za-z0-9._@-]', '_', text)[:40]}~{hashlib.sha256(text.encode()).hexdigest()[:16]}"
