"""Who sends a request."""

from __future__ import annotations

import pytest

from contract.errors import Unauthenticated, Unavailable
from gateway.config.configuration import Configuration
from gateway.config.pools import Pools
from gateway.config.settings import Settings
from gateway.config.tenant import Tenant
from gateway.identity.authentication import Authentication, bearer_token
from gateway.identity.stored_keys import StoredKeys
from tests.gateway.identity.test_stored_keys import ALICE, Memory
from tests.gateway.identity.test_tokens import member

TOKEN = "an-operators-token-0123"


class Keys:
    def tenant(self, api_key: str) -> Tenant:
        if api_key != "k":
            raise Unauthenticated("this API key is not known here")
        return Tenant("acme/research")

    def named(self, tenant: str, key: str) -> Tenant | None:
        return Tenant(tenant) if key.endswith("/of-the-file") else None


def with_keys() -> Configuration:
    configuration = Configuration(None, {}, Pools({}))
    configuration.tenant, configuration.named = Keys().tenant, Keys().named
    return configuration


def headers(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_the_operators_token_makes_an_operator_and_a_key_a_caller(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN)
    authentication = Authentication(Settings(admin_token_file=path), with_keys())
    assert (await authentication.principal(headers(TOKEN))).role == "operator"
    found = await authentication.principal(headers("k"))
    assert (found.role, found.tenant) == ("caller", Tenant("acme/research"))
    for token in ("", "wrong", TOKEN[:-1], "é" * 20):
        with pytest.raises(Unauthenticated):
            await authentication.principal(headers(token))
    path.write_text("another-token-456789")  # the mounted file was replaced
    with pytest.raises(Unauthenticated):
        await authentication.principal(headers(TOKEN))
    assert (await authentication.principal(headers("another-token-456789"))).role == "operator"
    path.write_text("")  # while it is replaced
    assert (await authentication.principal(headers("another-token-456789"))).role == "operator"


async def test_without_a_token_file_nobody_is_an_operator():
    authentication = Authentication(Settings(), with_keys())
    assert not authentication.administered
    with pytest.raises(Unauthenticated):
        await authentication.principal({})


async def test_a_stored_key_that_cannot_be_read_yet_is_not_one_that_is_gone(clock):
    """Who owns a batch is looked up after a restart, when the store may be away."""
    authentication, memory = Authentication(Settings(), with_keys()), Memory()
    authentication.stored = StoredKeys(memory, member, clock)
    memory.away = True
    await authentication.start()
    with pytest.raises(Unavailable, match="cannot be read now"):
        authentication.named("acme/research", ALICE)
    assert authentication.named("acme/research", "") is None  # no stored key has this name
    assert authentication.named("acme/research", "acme/research/of-the-file") == Tenant("acme/research")
    memory.away = False
    await authentication.stored.make(ALICE, "a", "caller", None)
    found = authentication.named("acme/research", ALICE)
    assert found is not None and found.name == "acme/research"
    await authentication.stored.revoke(ALICE)
    memory.away = True
    assert authentication.named("acme/research", ALICE) is None
    await authentication.close()


@pytest.mark.parametrize(
    ("header", "token"),
    [("", ""), ("Bearer k", "k"), ("bearer  k ", "k"), ("Basic k", ""), ("Bearer", ""), ("k", "")],
)
def test_the_token_of_the_bearer_scheme_counts(header: str, token: str) -> None:
    assert bearer_token(header) == token
