"""``python -m gateway usage``: the same figures as the endpoint's, from one database or several."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from gateway import command_line
from tests.gateway.usage.test_store import NOW_S, opened, record

SPAN = ["--from", "2033-05-18", "--to", "2033-05-19"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    database = opened(tmp_path)
    database.add([record(NOW_S, key, tokens) for key, tokens in (("acme/a/x", 1), ("acme/b/y", 2), ("other/a/z", 4))])
    database.close()
    return tmp_path / "usage"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    parsed = command_line.parse(["usage", *arguments])
    parsed.run(parsed)
    return capsys.readouterr().out


def test_it_prints_a_table_json_or_csv(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "--db", str(path), *SPAN, "--group-by", "org").splitlines()
    assert lines[0].split() == ["org", "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost"]
    assert lines[1].split() == ["acme", "2", "3", "0", "6", "0.000021"]
    (row,) = json.loads(run(capsys, "--db", str(path), *SPAN, "--tenant", "acme/b", "--format", "json"))
    assert row["micros"] == 14
    text = run(capsys, "--db", str(path), *SPAN, "--requests", "--format", "csv")
    assert [one["key"] for one in csv.DictReader(io.StringIO(text))] == ["acme/a/x", "acme/b/y", "other/a/z"]


def test_databases_are_added_up(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "--db", str(path), "--db", str(path), *SPAN, "--format", "json")
    assert json.loads(text)[0]["requests"] == 6


def test_the_database_is_the_environments_by_default(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIDENT_GATEWAY_USAGE_DB", str(path))
    assert "7" in run(capsys, *SPAN)
    monkeypatch.delenv("TRIDENT_GATEWAY_USAGE_DB")
    with pytest.raises(InvalidArgument, match="--db: must be usage databases, got none"):
        run(capsys)
    with pytest.raises(InvalidArgument, match="--db: must be usage databases, got /"):
        run(capsys, "--db", str(path) + "x")
