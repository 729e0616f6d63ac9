"""Callers with tokens at a whole gateway: every protocol, limits, roles, reloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from clients.async_client import AsyncClient
from contract.errors import Unauthenticated
from tests.fakes.replica import FakeReplica
from tests.gateway.identity.issuer import SECTION, issuer, key
from tests.gateway.running import gateway

REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 3}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_tokens_are_callers_with_the_limits_of_their_team():
    async with issuer() as served, FakeReplica() as replica:
        config = SECTION.format(url=served.url, refetch_s=1000.0)
        async with gateway(replica, config=config) as running:
            for path in ("/v1/completions", "/v1/responses"):
                status, headers, answer = await running.post(path, REQUEST)
                assert (status, headers["www-authenticate"]) == (401, "Bearer")
            status, headers, answer = await running.post("/v1/completions", REQUEST, **bearer("eyJ.x.y"))
            assert status == 401 and 'error="invalid_token"' in headers["www-authenticate"]
            assert answer["error"]["message"] == "this token is not accepted here"
            status, _, answer = await running.post("/v1/completions", REQUEST, **bearer(served.token(groups=[])))
            assert (status, answer["error"]["code"]) == (403, "permission_denied")
            alice, bob = served.token(), served.token(sub="bob")
            assert (await running.get("/v1/models", **bearer(alice)))[0] == 200
            codes = [(await running.post("/v1/completions", REQUEST, **bearer(one)))[0] for one in (alice, bob) * 3]
            assert codes == [200] * 5 + [429]  # requests of the team, whoever sends them
            path = running.service.configuration.path
            path.write_text(path.read_text().replace("requests_per_minute = 5", 'models = ["other"]'))
            await running.service.configuration.reload()  # holds for tokens that are verified already
            assert (await running.post("/v1/completions", REQUEST, **bearer(alice)))[0] == 404


async def test_tokens_are_callers_of_kserve_too():
    async with issuer() as served, FakeReplica() as replica:
        async with gateway(replica, config=SECTION.format(url=served.url, refetch_s=1000.0)) as running:
            async with AsyncClient(running.grpc_url, api_key=served.token()) as client:
                assert (await client.generate("one", max_tokens=1).complete()).text == " one"
            async with AsyncClient(running.grpc_url, api_key=served.token(key("two"))) as client:
                with pytest.raises(Unauthenticated, match="not accepted here"):
                    await client.generate("one", max_tokens=1).complete()


async def test_roles_of_claims_hold_under_admin(tmp_path: Path):
    async with issuer() as served, FakeReplica() as replica:
        async with gateway(replica, config=SECTION.format(url=served.url, refetch_s=1000.0)) as running:
            operator = served.token(realm_access={"roles": ["trident-operator"]}, groups=None)
            assert (await running.get("/admin/replicas", **bearer(operator)))[0] == 200
            assert (await running.get("/console"))[0] == 200
            assert (await running.post("/v1/completions", REQUEST, **bearer(operator)))[0] == 403
            for token, status in ((served.token(), 403), (served.token(groups=["/admins/research"]), 403), ("", 401)):
                assert (await running.get("/admin/replicas", **bearer(token)))[0] == status


async def test_work_that_outlives_its_request_finds_its_tenant_again():
    async with issuer() as served, FakeReplica() as replica:
        async with gateway(replica, config=SECTION.format(url=served.url, refetch_s=1000.0)) as running:
            named = running.service.authentication.named
            tenant = await running.service.tenant(bearer(served.token()))
            assert named(tenant.name, tenant.levels[-1].name) == tenant
            for name, key_name in (
                ("acme/research", "acme/research/gone:alice"),
                ("acme/research", "acme/other/corp:alice"),
                ("acme/other", "acme/other/corp:alice"),
                ("acme/research", "acme/research/alice"),
            ):
                assert named(name, key_name) is None
