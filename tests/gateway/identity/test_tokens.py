"""Tokens: whose are accepted, as whom, and which are refused."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from joserfc import jwk, jwt

from contract.errors import PermissionDenied, Unauthenticated, Unavailable
from gateway.config.identity import IdentityRules
from gateway.config.tenant import Level, Tenant
from gateway.identity import issuer_keys
from gateway.identity.tokens import Tokens
from tests.gateway.identity.issuer import Issuer, issuer, key
from tests.gateway.running import until


def member(org: str, team: str, name: str) -> Tenant | None:
    path = f"{org}/{team}"
    return Tenant(path, levels=(Level(org), Level(path), Level(f"{path}/{name}"))) if team == "research" else None


def rules(served: Issuer, more: dict[str, Any] | None = None, **issuer_rules: Any) -> IdentityRules:
    one = {
        "issuer": served.url,
        "audience": "trident",
        "algorithms": ["RS256", "ES256", "EdDSA"],
        "org": "acme",
        "team": {"claim": "groups", "prefix": "/trident/"},
        "operators": {"claim": "realm_access.roles", "equals": "boss"},
        "team_admins": {"claim": "groups", "equals": "/admins"},
        "org_admins": {"claim": "scope", "equals": "trident.admin"},
        **issuer_rules,
    }
    return IdentityRules.model_validate({"issuers": {"corp": one}, "refetch_s": 1000.0, **(more or {})})


@contextlib.asynccontextmanager
async def tokens(
    served: Issuer, more: dict[str, Any] | None = None, clock: Callable[[], float] = time.time, **issuer_rules: Any
) -> AsyncIterator[Tokens]:
    made = Tokens(member, clock)
    made.change(rules(served, more, **issuer_rules))
    try:
        yield made
    finally:
        await made.close()


def test_the_rules_of_the_documentation_find_the_roles_and_the_team():
    text = (Path(__file__).parents[3] / "docs" / "identity.md").read_text("utf-8")
    [shown] = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    corp = IdentityRules.model_validate(tomlkit.parse(shown).unwrap()["identity"]).issuers["corp"]
    claims = {
        "groups": ["/trident/R&D", "/trident-admins"],
        "realm_access": {"roles": ["trident-operator"]},
        "scope": "openid trident.admin",
    }
    assert corp.team is not None and corp.team.first(claims) == "research"
    for rule in (corp.operators, corp.org_admins, corp.team_admins):
        assert rule is not None and rule.find(claims) and not rule.find({"groups": ["/trident/R&D"]})


async def test_a_key_is_found_among_those_that_its_algorithm_can_use():
    async with issuer() as served:
        shared, ours = key("one"), key("one", "RSA")  # RFC 7517: keys of different types may have one id
        served.keys = [ours, shared, jwk.ECKey.generate_key("P-384", {"kid": "one"})]
        async with tokens(served) as made:
            for signer in (ours, shared):
                assert (await made.principal(served.token(signer))).tenant is not None
                assert (await made.principal(served.token(signer, {"kid": None}, sub="bob"))).tenant is not None


def part(fields: Any) -> str:
    data = fields if isinstance(fields, bytes) else orjson.dumps(fields)
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


async def test_a_token_is_of_its_team_and_its_roles():
    async with issuer() as served, tokens(served) as made:
        found = await made.principal(served.token())
        assert [level.name for level in found.levels] == ["acme", "acme/research", "acme/research/corp:alice"]
        assert (found.role, found.name) == ("caller", "token acme/research/corp:alice")
        admin = await made.principal(served.token(groups=["/admins", "/trident/research"]))
        assert (admin.role, admin.administers) == ("tenant_admin", "acme/research")
        assert (await made.principal(served.token(scope="openid trident.admin"))).administers == "acme"
        boss = await made.principal(served.token(realm_access={"roles": ["x", "boss"]}, groups=[]))
        assert (boss.role, boss.tenant) == ("operator", None)
        assert (
            (await made.principal(served.token(sub="auth0|a/b")))
            .levels[-1]
            .name.startswith("acme/research/corp:auth0_a_b~")
        )
        for groups in ([], ["/trident/unknown"], ["/trident/a/b"], "/trident/", None, 7, [["/trident/research"]]):
            with pytest.raises(PermissionDenied, match="belongs to no team"):
                await made.principal(served.token(groups=groups))
        assert served.fetches == 1


@pytest.mark.parametrize("kind", ["RSA", "OKP"])
async def test_other_kinds_of_keys_sign_too(kind):
    async with issuer() as served, tokens(served) as made:
        served.keys = [key("one"), key(kind, kind)]
        assert (await made.principal(served.token(served.keys[1]))).tenant


async def refused(made: Tokens, token: str, match: str = "not accepted here") -> None:
    with pytest.raises(Unauthenticated, match=match) as caught:
        await made.principal(token)
    assert caught.value.headers["www-authenticate"].startswith('Bearer error="invalid_token"')


async def test_tokens_of_another_time_audience_issuer_or_signer_are_refused():
    now = int(time.time())
    async with issuer() as served, tokens(served) as made:
        assert (await made.principal(served.token(exp=now - 30))).tenant  # within the skew of clocks
        await refused(made, served.token(exp=now - 90), "has expired")
        for claims in (
            {"nbf": now + 90},
            {"iat": now + 90},
            {"exp": None},
            {"exp": "never"},
            {"aud": None},
            {"aud": "other"},
            {"aud": ["other", "third"]},
            {"aud": 7},
            {"iss": None},
            {"iss": served.url + "/"},
            {"iss": ["x"]},
        ):
            await refused(made, served.token(**claims))
        assert (await made.principal(served.token(aud=["other", "trident"], nbf=now + 30))).tenant
        await refused(made, served.token(jwk.ECKey.generate_key("P-256", {"kid": "one"})))  # forged under a known id
        valid = served.token()
        head, body, signature = valid.split(".")
        await refused(made, f"{head}.{part({**served.claims(), 'sub': 'bob'})}.{signature}")
        await refused(made, f"{head}.{body}.")
        await refused(made, f"{valid}x" * 5000)
        assert served.fetches == 1


async def test_a_token_cannot_choose_how_it_is_verified():
    """Algorithm confusion: none, the public key as a shared secret, and keys that the token brings."""
    async with issuer() as served, tokens(served) as made:
        served.keys = [key("rsa", "RSA")]
        public = served.keys[0].as_pem(private=False)
        body = part(served.claims())
        for algorithm in ("none", "None", "nOnE", "", None, "HS256", "ES256K", ["RS256"], {"a": 1}):
            await refused(made, f"{part({'alg': algorithm, 'kid': 'rsa'})}.{body}.")
        import hashlib
        import hmac

        head = part({"alg": "HS256", "kid": "rsa"})
        for secret in (public, public.strip(), orjson.dumps(served.jwks()["keys"][0])):
            mac = hmac.new(secret, f"{head}.{body}".encode(), hashlib.sha256).digest()
            await refused(made, f"{head}.{body}.{part(mac)}")
        own = key("own")
        for header in (
            {"jwk": own.as_dict(private=False)},
            {"jku": f"{served.url}/keys"},
            {"x5u": f"{served.url}/cert"},
            {"x5c": ["AA=="]},
            {"crit": ["exp"], "exp": 1},
            {"b64": True},
            {"typ": "logout+jwt"},
            {"typ": 7},
            {"kid": 7},
        ):
            signed = jwt.encode({"alg": "ES256", "kid": "own"}, served.claims(), own)
            _, body, signature = signed.split(".")
            await refused(made, f"{part({'alg': 'ES256', 'kid': 'own', **header})}.{body}.{signature}")
        good = served.token(header={"typ": "at+JWT", "nonce": "unknown headers are ignored"})
        assert (await made.principal(good)).tenant
        await refused(made, served.token(key("rsa"), {"kid": "rsa"}))  # ES256 by the id of an RSA key


@settings(suppress_health_check=list(HealthCheck))
@given(
    st.one_of(
        st.text(max_size=80),
        st.tuples(
            *[st.one_of(st.binary(max_size=30), st.just(b"[" * 3000), st.just(b'["alg"]'), st.just(b'{"alg":1}'))] * 3
        ).map(lambda parts: ".".join(base64.urlsafe_b64encode(one).decode() for one in parts)),
    )
)
def test_no_text_is_a_token_or_an_error_of_another_kind(text: str) -> None:
    async def check() -> None:
        with pytest.raises(Unauthenticated):
            await Tokens(member).principal(text)

    asyncio.run(check())


async def test_an_unknown_key_id_causes_one_request_to_the_issuer():
    async with issuer() as served, tokens(served) as made:
        await made.principal(served.token())
        stranger = key("two")
        await asyncio.gather(*(refused(made, served.token(stranger)) for _ in range(20)))
        for number in range(5):
            await refused(made, served.token(stranger, {"kid": f"k{number}"}))
        assert served.fetches == 2


async def test_rotated_keys_hold_at_once_and_removed_ones_no_more():
    async with issuer() as served, tokens(served, {"refetch_s": 0.001}) as made:
        old = served.token()
        assert (await made.principal(old)).tenant
        served.keys = [key("two"), *served.keys]
        assert (await made.principal(served.token())).tenant
        assert (await made.principal(old)).tenant  # both hold while both are published
        served.keys = [key("three"), served.keys[0]]
        assert (await made.principal(served.token())).tenant
        await refused(made, old)


async def test_keys_last_through_an_outage_up_to_their_age(monkeypatch, caplog):
    monkeypatch.setattr(issuer_keys, "RETRY_S", 0.02)
    async with issuer() as served, tokens(served, {"refresh_s": 0.02, "max_age_s": 600, "cache_s": 0.0}) as made:
        assert (await made.principal(served.token())).tenant
        served.down = True
        fetches = served.fetches
        await until(lambda: "must give status 200, got 503" in caplog.text)
        assert (await made.principal(served.token())).tenant and served.fetches == fetches  # not even its document
        await asyncio.sleep(0.1)
        [issuer_of_all] = made._issuers.values()
        issuer_of_all._read_s -= 601
        assert caplog.text.count("must give status 200, got 503") == 1
        with pytest.raises(Unavailable, match="cannot be reached"):
            await made.principal(served.token())
        served.down = False
        await until(lambda: served.fetches > fetches)
        await until(lambda: time.monotonic() - issuer_of_all._read_s < 600)
        assert (await made.principal(served.token())).tenant


async def test_an_issuer_that_is_down_at_first_is_no_reason_to_call_tokens_invalid():
    async with issuer() as served:
        served.down = True
        async with tokens(served) as made:
            with pytest.raises(Unavailable):
                await made.principal(served.token())


async def test_a_verified_token_costs_one_look_until_it_expires(monkeypatch):
    now_s = 1.9e9
    async with issuer() as served, tokens(served, {"leeway_s": 2.0}, clock=lambda: now_s) as made:
        token = served.token(exp=int(now_s) + 10, iat=int(now_s))
        first = await made.principal(token)
        with monkeypatch.context() as unverified:
            unverified.setattr(made, "_verified", None)
            now_s += 11.9
            assert await made.principal(token) is first
        now_s += 0.2
        await refused(made, token, "has expired")


async def test_other_rules_hold_at_once():
    async with issuer() as served, tokens(served) as made:
        token = served.token()
        assert (await made.principal(token)).role == "caller"
        made.change(rules(served, team_admins={"claim": "sub"}))
        assert (await made.principal(token)).role == "tenant_admin"
        made.change(IdentityRules())
        assert not made.takes(token)
