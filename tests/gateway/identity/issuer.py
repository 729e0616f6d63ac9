"""An issuer of tokens on loopback, which can go down, rotate its keys and lie."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

from aiohttp import web
from joserfc import jwk, jwt

AUDIENCE = "trident"
SECTION = """
[identity]
refetch_s = {refetch_s}
[identity.issuers.corp]
issuer = "{url}"
audience = "trident"
algorithms = ["RS256", "ES256", "EdDSA"]
org = "acme"
team = {{ claim = "groups", prefix = "/trident/" }}
operators = {{ claim = "realm_access.roles", equals = "trident-operator" }}
team_admins = {{ claim = "groups", equals = "/admins/research" }}
[orgs.acme]
tokens_per_minute = 100000
[orgs.acme.teams.research]
requests_per_minute = 5
"""


@cache
def key(kid: str, kind: str = "EC") -> jwk.Key:
    if kind == "RSA":
        return jwk.RSAKey.generate_key(2048, {"kid": kid, "use": "sig"})
    if kind == "OKP":
        return jwk.OKPKey.generate_key("Ed25519", {"kid": kid, "use": "sig"})
    return jwk.ECKey.generate_key("P-256", {"kid": kid, "use": "sig"})


class Issuer:
    def __init__(self) -> None:
        self.url, self.down, self.fetches = "", False, 0
        self.keys: list[Any] = [key("one")]
        self.document: dict[str, Any] = {}

    def jwks(self) -> dict[str, Any]:
        return {"keys": [one.as_dict(private=False) for one in self.keys]}

    def claims(self, **more: Any) -> dict[str, Any]:
        now = int(time.time())
        usual = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "exp": now + 300, "iat": now}
        return {**usual, "groups": ["/other", "/trident/research"], **more}

    def token(self, signer: Any = None, header: dict[str, Any] | None = None, **claims: Any) -> str:
        signer = signer or self.keys[0]
        algorithm = {"EC": "ES256", "RSA": "RS256", "OKP": "EdDSA"}[signer.key_type]
        fields, made = {"alg": algorithm, "kid": signer.kid, **(header or {})}, self.claims(**claims)
        fields, made = ({name: one[name] for name in one if one[name] is not None} for one in (fields, made))
        from gateway.identity.tokens import _Registry  # without joserfc's warning of EdDSA

        return jwt.encode(
            fields, made, signer, registry=_Registry(algorithms=[fields["alg"]], strict_check_header=False)
        )

    async def _document(self, request: web.Request) -> web.Response:
        if self.down:
            raise web.HTTPServiceUnavailable
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.document})

    async def _keys(self, request: web.Request) -> web.Response:
        self.fetches += 1
        if self.down:
            raise web.HTTPServiceUnavailable
        return web.json_response(self.jwks())


@contextlib.asynccontextmanager
async def issuer() -> AsyncIterator[Issuer]:
    made = Issuer()
    application = web.Application()
    application.router.add_get("/.well-known/openid-configuration", made._document)
    application.router.add_get("/keys", made._keys)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield made
    finally:
        await runner.cleanup()
