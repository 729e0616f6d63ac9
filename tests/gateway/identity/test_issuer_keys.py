"""The keys of an issuer: where they are read, and which count."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from joserfc import jwk

from contract.errors import InvalidArgument
from gateway.config.identity import IdentityRules, IssuerRules
from gateway.identity import issuer_keys
from gateway.identity.issuer_keys import IssuerKeys, imported
from tests.gateway.identity.issuer import issuer, key
from tests.gateway.running import until


def rules(**fields) -> IssuerRules:
    fields = {"issuer": "https://corp", "audience": "trident", "team": "research", "org": "acme", **fields}
    return IssuerRules.model_validate(fields)


def test_only_public_keys_for_signatures_are_taken():
    good = key("one").as_dict(private=False)
    weak = {"kty": "RSA", "n": jwk.RSAKey.generate_key(2048).as_dict(private=False)["n"][:170], "e": "AQAB"}
    bad = [
        {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "kid": "one"},
        {**good, "use": "enc"},
        {**good, "key_ops": ["encrypt"]},
        {**good, "x": "AA"},
        {"kty": "EC"},
        {"kty": "AKP", "pub": "x"},
        weak,
        "text",
        None,
    ]
    assert [one.kid for one in imported({"keys": [*bad, {**good, "x5u": "https://other"}]}, "here")] == ["one"]
    for document in ({"keys": bad}, {"keys": []}, {"keys": 7}, {}, [], None):
        with pytest.raises(InvalidArgument, match="here: must have a public key"):
            imported(document, "here")


async def test_a_file_is_read_again_when_it_is_replaced(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(issuer_keys, "FILE_S", 0.01)
    path = tmp_path / "jwks.json"
    path.write_bytes(orjson.dumps({"keys": [key("one").as_dict(private=False)]}))
    keys = IssuerKeys("corp", rules(jwks_file=str(path)), IdentityRules())
    keys.start()
    try:
        assert (found := await keys.key("one", "ES256")) is not None and found.kid == "one"
        assert await keys.key(None, "ES256") is found and keys._find("one", "RS256") is None
        path.write_text("{")
        await until(lambda: "stay as they were" in caplog.text)
        assert await keys.key("one", "ES256") is found
        path.write_bytes(orjson.dumps({"keys": [key(kid).as_dict(private=False) for kid in ("two", "three")]}))
        await until(lambda: len(keys.keys) == 2)
        assert await keys.key("one", "ES256") is None and await keys.key(None, "ES256") is None
    finally:
        await keys.close()


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"issuer": "https://other"}, "must be of issuer"),
        ({"jwks_uri": "file:///etc/passwd"}, "jwks_uri: must be"),
        ({"jwks_uri": None}, "jwks_uri: must be"),
        ({"x": "y" * issuer_keys.MAX_BYTES}, "at most"),
    ],
)
async def test_a_document_that_cannot_be_right_gives_no_keys(document, problem, caplog):
    async with issuer() as served:
        served.document = document
        keys = IssuerKeys("corp", rules(issuer=served.url), IdentityRules())
        keys.start()
        await until(lambda: problem in caplog.text)
        await asyncio.gather(keys.close())
        assert not keys.keys and served.fetches == 0
