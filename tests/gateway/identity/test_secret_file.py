"""A secret that is replaced while it is used."""

from __future__ import annotations

import pytest

from contract.errors import InvalidArgument
from gateway.identity import secret_file
from gateway.identity.secret_file import SecretFile


def test_a_new_secret_holds_and_an_unreadable_one_does_not(monkeypatch, caplog):
    monkeypatch.setattr(secret_file, "CHECK_S", 0.0)
    found: list[bytes | None] = [b"first"]

    def read() -> bytes:
        if found[0] is None:
            raise InvalidArgument("TOKEN", "cannot be read")
        return found[0]

    kept = SecretFile(read)
    assert kept.secret == b"first"
    found[0] = None
    assert kept.secret == kept.secret == b"first" and caplog.text.count("cannot be read") == 1
    found[0] = b"second"
    assert kept.secret == b"second"
    found[0] = None
    with pytest.raises(InvalidArgument):
        SecretFile(read)
