"""``python -m gateway prompt``."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import InvalidArgument
from gateway import command_line

TEXT = '[variables.x]\ndefault = "a"\n[[messages]]\nrole = "system"\ncontent = "{} {{{{ x }}}}"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "support").mkdir()
    for version, words in (("1.0.0", "one"), ("1.1.0", "one two three four five six")):
        (tmp_path / "support" / f"{version}.toml").write_text(TEXT.format(words))
    monkeypatch.setenv("TRIDENT_GATEWAY_PROMPTS", str(tmp_path))
    monkeypatch.delenv("TRIDENT_GATEWAY_TOKENIZER", raising=False)
    return tmp_path


def run(*arguments: object) -> None:
    parsed = command_line.parse(["prompt", *map(str, arguments)])
    parsed.run(parsed)


def test_versions_are_listed_compared_and_rolled_back(folder: Path, capsys: pytest.CaptureFixture):
    run("list")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "support" and lines[1].split() == ["1.0.0", "0.0%"] and lines[2].split() == ["1.1.0", "100.0%"]
    run("diff", "support@1.0.0", "support@latest")
    table = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    before, after, change, _ = table["system"]
    assert int(after) - int(before) == int(change) > 0
    assert table["total"] == table["system"]
    run("rollback", "support")
    assert "serves 1.0.0 100%; withdrawn: 1.1.0" in capsys.readouterr().out
    run("list")
    assert "1.1.0            withdrawn" in capsys.readouterr().out


def test_a_check_tells_every_problem(folder: Path, capsys: pytest.CaptureFixture):
    (folder / "support" / "1.0.0.toml").write_text(TEXT.format("one two three") + "[budgets]\nsystem = 1")
    run("check")
    out = capsys.readouterr().out
    assert "support@1.1.0: " in out and "over its budget: system" in out
    (folder / "support" / "1.2.0.toml").write_text("messages = 1")
    (folder / "support" / "next.toml").write_text(TEXT)
    with pytest.raises(InvalidArgument, match="must hold no problem, got 2"):
        run("check")
    assert capsys.readouterr().err.count("error: ") == 2


def test_what_is_not_there_is_named(folder: Path, tmp_path: Path):
    for wrong, problem in (
        ("support@9", "of which none is served"),
        ("other@1.0.0", r"prompt\.id: must be one of support"),
    ):
        with pytest.raises(InvalidArgument, match=problem):
            run("diff", wrong, "support@1.0.0")
    with pytest.raises(InvalidArgument, match="--prompts: must be the folder"):
        run("list", "--prompts", tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match=r"must be a tokenizer\.json"):
        run("check", "--tokenizer", folder / "support" / "1.0.0.toml")
