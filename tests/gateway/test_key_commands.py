"""``python -m gateway key``: in the store itself, and through a gateway."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from contract.errors import InvalidArgument
from gateway import command_line
from gateway.identity.stored_keys import FileDocuments, StoredKeys
from tests.gateway.api.test_keys import CONFIG, NAME, TOKEN
from tests.gateway.identity.test_tokens import member
from tests.gateway.running import gateway


@pytest.fixture
def environ(tmp_path, monkeypatch):
    (tmp_path / "gateway.toml").write_text(CONFIG)
    (tmp_path / "token").write_text(TOKEN)
    for name, file in (
        ("CONFIG", "gateway.toml"),
        ("KEY_STORE", "keys"),
        ("AUDIT_LOG", "audit"),
        ("ADMIN_TOKEN_FILE", "token"),
    ):
        monkeypatch.setenv(f"TRIDENT_GATEWAY_{name}", str(tmp_path / file))
    return tmp_path


def command(capsys, *words: str) -> str:
    arguments = command_line.parse(["key", *words])
    arguments.run(arguments)
    return capsys.readouterr().out


def test_keys_are_managed_without_a_gateway(environ, capsys):
    key = json.loads(command(capsys, "create", NAME, "--role", "team_admin"))["key"]
    made = json.loads(command(capsys, "rotate", NAME, "--overlap-s", "5"))
    assert made["role"] == "team_admin"
    shown = command(capsys, "list")
    assert shown.count(NAME) == 2 and shown.count("active") == 2 and key not in shown

    async def found() -> list[bool]:
        keys = StoredKeys(FileDocuments(environ / "keys"), member)
        await keys._step()
        keys._documents.close()
        return [keys.find(one) is not None for one in (key, made["key"])]

    assert asyncio.run(found()) == [True, True]
    assert command(capsys, "revoke", NAME).count('"state": "revoked"') == 2
    assert asyncio.run(found()) == [False, False]
    lines = [json.loads(line) for line in (environ / "audit").read_text().splitlines()]
    assert [line["action"] for line in lines] == ["key.create", "key.rotate", "key.revoke"]
    assert [line.get("after") for line in lines] == [{"role": "team_admin"}, {"overlap_s": 5}, None]


def test_a_user_without_a_name_is_logged_by_its_number(environ, monkeypatch, capsys):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987_654)  # which has no entry in passwd
    command(capsys, "create", NAME)
    assert json.loads((environ / "audit").read_text())["who"] == "command line of uid 987654"


def test_no_key_is_made_where_the_audit_log_cannot_be_written(environ, monkeypatch, capsys):
    monkeypatch.setenv("TRIDENT_GATEWAY_AUDIT_LOG", str(environ / "missing" / "audit"))
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_AUDIT_LOG: cannot be written"):
        command(capsys, "create", NAME)
    assert command(capsys, "list") == ""


def test_without_a_store_the_command_says_what_is_missing(environ, monkeypatch, capsys):
    monkeypatch.delenv("TRIDENT_GATEWAY_KEY_STORE")
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_KEY_STORE: must be set, or --gateway"):
        command(capsys, "list")


async def test_keys_are_managed_through_a_gateway(environ, capsys):
    files = {"admin_token_file": environ / "token", "key_store": str(environ / "other")}
    async with gateway(config=CONFIG, replicas="registered", **files) as running:
        where = ("--gateway", running.base_url)
        made = await asyncio.to_thread(command, capsys, "create", NAME, "--expires-in-s", "60", *where)
        assert json.loads(made)["expires"] > json.loads(made)["created"]
        assert NAME in await asyncio.to_thread(command, capsys, "list", *where)
        with pytest.raises(InvalidArgument, match="refused with 400: name: must be new"):
            await asyncio.to_thread(command, capsys, "create", NAME, *where)
