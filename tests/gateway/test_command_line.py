"""``python -m gateway``: its commands for keys and configurations."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from gateway import command_line
from gateway.config import tenants


def run(*arguments: str) -> None:
    parsed = command_line.parse(list(arguments))
    parsed.run(parsed)


def test_serving_is_the_default():
    assert command_line.parse([]).run is None and command_line.parse(["serve"]).run is None


def test_a_new_key_has_the_hash_that_the_file_keeps(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRIDENT_GATEWAY_CONFIG", raising=False)
    run("new-key")
    output = capsys.readouterr()
    salt, key, hashed = (line.split()[-1].strip('"') for line in output.out.splitlines())
    assert tenants.digest(bytes.fromhex(salt), key).hex() == hashed
    assert "gateway.toml" in output.err


def test_a_key_is_hashed_with_the_salt_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "gateway.toml"
    path.write_text(f'salt = "{"ab" * 16}"')
    monkeypatch.setattr("sys.stdin", io.StringIO("tri-0123456789abcdefghij\n"))
    run("hash-key", "--config", str(path))
    output = capsys.readouterr().out
    assert tenants.digest(bytes.fromhex("ab" * 16), "tri-0123456789abcdefghij").hex() in output and "salt" not in output


def test_a_short_key_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    with pytest.raises(InvalidArgument, match="API key"):
        run("hash-key")


def test_check_reads_settings_and_file(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "gateway.toml"
    path.write_text("[admission]\nmax_wait_s = 0.0")
    monkeypatch.setenv("TRIDENT_GATEWAY_CONFIG", str(path))
    monkeypatch.setenv("TRIDENT_GATEWAY_HTP_PORT", "1")
    with pytest.raises(InvalidArgument, match="max_wait_s"):
        run("check")
    path.write_text('[hooks.a]\nuse = "no.such:Hook"')
    with pytest.raises(InvalidArgument, match="hooks.a.use"):
        run("check")
    path.write_text('[models.a]\npools = [""]\ntokenizer = "/nowhere/tokenizer.json"')
    with pytest.raises(InvalidArgument, match="models.a.tokenizer"):
        run("check")
    path.write_text("[samples]\nfraction = 1.0")
    with pytest.raises(InvalidArgument, match="samples: keeps text and needs TRIDENT_GATEWAY_SAMPLES"):
        run("check")
    path.write_text("[admission]\nmax_wait_s = 1.0")
    with monkeypatch.context() as setting:
        setting.setenv("TRIDENT_GATEWAY_BATCH_DB", str(tmp_path / "batches"))
        setting.setenv("TRIDENT_GATEWAY_BATCH_WEBHOOK_ORIGINS", "https://[::1")
        with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_BATCH_WEBHOOK_ORIGINS"):
            run("check")
    assert not (tmp_path / "batches").exists()
    (tmp_path / "prompts" / "a").mkdir(parents=True)
    for file in ("prompts/a/1.0.0.toml", "junk"):
        (tmp_path / file).write_text("junk")
    monkeypatch.setenv("TRIDENT_GATEWAY_SAMPLES", str(tmp_path / "samples"))
    for name, wrong in (
        ("TOKENIZER", "junk"),
        ("PROMPTS", "prompts"),
        ("SAMPLES_KEYS", "junk"),
        ("AUDIT_LOG", "no/log"),
    ):
        with monkeypatch.context() as setting, pytest.raises(InvalidArgument, match=f"TRIDENT_GATEWAY_{name}: "):
            setting.setenv(f"TRIDENT_GATEWAY_{name}", str(tmp_path / wrong))
            run("check")
    monkeypatch.setenv("TRIDENT_GATEWAY_AUDIT_LOG", str(tmp_path / "log"))
    run("check")
    assert not (tmp_path / "samples").exists() and not (tmp_path / "log").exists()
    output = capsys.readouterr()
    assert "valid; 0 keys" in output.out and "did you mean TRIDENT_GATEWAY_HTTP_PORT" in output.err
