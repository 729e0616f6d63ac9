"""A real OpenID provider, npm's oidc-provider on Node: discovery, claims, roles, an outage, other keys."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.replica import FakeReplica
from tests.gateway.identity.test_callers import REQUEST, bearer
from tests.gateway.running import Running, gateway

pytestmark = pytest.mark.slow
CACHE = Path(__file__).resolve().parents[3] / ".cache" / "openid_provider"
PACKAGE = "oidc-provider@9.13.3"
SCRIPT = Path(__file__).parent / "openid_provider.mjs"
CONFIG = """
[identity]
cache_s = 0.0
refetch_s = 0.01
[identity.issuers.node]
issuer = "{issuer}"
audience = "trident"
org = "acme"
team = {{ claim = "groups", prefix = "/trident/" }}
operators = {{ claim = "roles.trident", equals = "operator" }}
org_admins = {{ claim = "scope", equals = "trident.admin" }}
[orgs.acme.teams.research]
requests_per_minute = 1000
"""


@pytest.fixture(scope="module")
def modules() -> Path:
    """The package, installed once into a folder that git does not see; skipped where that cannot be."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    if not (CACHE / "node_modules" / "oidc-provider").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(CACHE), "--no-audit", "--no-fund", "--loglevel=error", PACKAGE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip("npm took more than 120 s; is its registry within reach?")
        if done.returncode:
            pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr.strip()[-200:]}")
    return CACHE / "node_modules"


@contextlib.asynccontextmanager
async def provider(
    modules: Path, key: str, algorithm: str = "RS256", port: int = 0, ttl_s: int = 600
) -> AsyncIterator[str]:
    """The address of a provider with one key."""
    arguments = (str(SCRIPT), str(modules), str(port), key, algorithm, str(ttl_s))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("node", *arguments, stdout=pipe, stderr=pipe)
    try:
        assert process.stdout is not None and process.stderr is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        if not line:
            pytest.skip(f"this Node cannot run {PACKAGE}: {(await process.stderr.read()).decode()[-200:]}")
        yield line
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def token(issuer: str, client: str = "app", audience: str = "trident", scope: str = "infer") -> str:
    data = {"grant_type": "client_credentials", "resource": f"urn:{audience}", "scope": scope}
    basic = base64.b64encode(f"{client}:secret".encode()).decode()
    async with aiohttp.ClientSession(headers={"authorization": f"Basic {basic}"}) as http:
        async with http.post(f"{issuer}/token", data=data) as answer:
            return str((await answer.json())["access_token"])


async def status(running: Running, bearing: str) -> int:
    return (await running.post("/v1/completions", REQUEST, **bearer(bearing)))[0]


async def test_its_tokens_are_callers_and_operators(modules):
    async with provider(modules, "k1", "ES256") as issuer, FakeReplica() as replica:
        async with gateway(replica, config=CONFIG.format(issuer=issuer)) as running:
            mine = await token(issuer)
            assert await status(running, mine) == 200
            found = await running.service.authentication.principal(bearer(mine))
            assert (found.role, found.levels[-1].name) == ("caller", "acme/research/node:app")
            assert await status(running, await token(issuer, audience="other")) == 401
            lead = await running.service.authentication.principal(bearer(await token(issuer, scope="trident.admin")))
            assert (lead.role, lead.administers) == ("tenant_admin", "acme")
            assert (await running.get("/admin/replicas", **bearer(mine)))[0] == 403
            assert (await running.get("/admin/replicas", **bearer(await token(issuer, "admin"))))[0] == 200


async def test_an_outage_and_other_keys(modules):
    async with FakeReplica() as replica, contextlib.AsyncExitStack() as first:
        issuer = await first.enter_async_context(provider(modules, "k1"))
        async with gateway(replica, config=CONFIG.format(issuer=issuer)) as running:
            old = await token(issuer)
            assert await status(running, old) == 200
            await first.aclose()
            assert await status(running, old) == 200  # verified with the keys that are known
            port = int(issuer.rpartition(":")[2])
            async with provider(modules, "k2", port=port) as back:
                assert await status(running, await token(back)) == 200
                assert await status(running, old) == 401  # its key is not published any more
