"""The commands beside a gateway: what they print, and that they name what is missing."""

from __future__ import annotations

import json
import time

import pytest
from cryptography.fernet import Fernet

from contract.errors import InvalidArgument, NotFound
from gateway import command_line
from gateway.samples.store import KEPT, SampleStore
from tests.gateway.samples.test_store import RULES, everything, rating, sample


def run(*words: str) -> None:
    arguments = command_line.parse(["samples", *words])
    arguments.run(arguments)


def test_samples_are_listed_exported_and_deleted(tmp_path, monkeypatch, capsys):
    run("new-key")
    key = capsys.readouterr().out.strip()
    Fernet(key)
    (tmp_path / "keys").write_text(key)
    monkeypatch.setenv("TRIDENT_GATEWAY_SAMPLES", str(tmp_path / "samples"))
    monkeypatch.setenv("TRIDENT_GATEWAY_SAMPLES_KEYS", str(tmp_path / "keys"))
    store = SampleStore(tmp_path / "samples", tmp_path / "keys")
    for tenant in ("acme/in", "acme/also"):
        store.append(tenant, KEPT, [sample("one", "grüße", time.time())], RULES)
    store.rate("acme/in", rating("one"), RULES)
    run("list")
    assert "acme/in: 1 samples since 20" in capsys.readouterr().out
    run("export", "--tenant", "acme/in")
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line)["output"] == "grüße" and json.loads(line)["feedback"]["rating"] == "down"
    (tmp_path / "keys").write_text(Fernet.generate_key().decode())
    run("list")
    shown = capsys.readouterr()
    assert "acme/in: 0 samples" in shown.out and "warning: 3 lines could not be read" in shown.err
    (tmp_path / "keys").write_text(key)
    run("export")
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setenv("TRIDENT_GATEWAY_CONFIG", str(tmp_path / "gateway.toml"))
    (tmp_path / "gateway.toml").write_text("[orgs.acme.teams.new]\n")
    for unknown in ("acme", "acme/none"):
        with pytest.raises(NotFound, match=f"'{unknown}' has no samples"):
            run("delete", "--tenant", unknown)
    run("delete", "--tenant", "acme/new")
    assert capsys.readouterr().out == "acme/new: 0 bytes deleted\n"
    (tmp_path / "gateway.toml").write_text("[broken")  # which a deletion of samples does not need
    run("delete", "--tenant", "acme/in")
    assert "bytes deleted" in capsys.readouterr().out
    assert [found["request_id"] for found in store.samples("acme/also")] == ["one"]
    assert list(store.samples("acme/in")) == [] and everything(tmp_path / "samples").count(b"gAAAA") == 1


def test_a_missing_folder_is_named(monkeypatch):
    monkeypatch.delenv("TRIDENT_GATEWAY_SAMPLES", raising=False)
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_SAMPLES: must be the folder"):
        run("list")
