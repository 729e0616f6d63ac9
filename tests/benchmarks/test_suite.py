"""The comparison of a run with the kept one, and the parts as processes of their own."""

import json

import pytest

from benchmarks import suite
from benchmarks.suite import PARTS, Figure, Part
from contract.errors import InvalidArgument


def test_a_figure_regresses_when_it_is_worse_by_more_than_the_rounds_differ():
    before = Figure("lower", [100.0, 104.0, 102.0])
    assert not Figure("lower", [103.0, 106.0, 105.0]).regressed(before)
    assert Figure("lower", [110.0, 113.0, 112.0]).regressed(before)
    assert not Figure("lower", [100.0, 140.0, 112.0]).regressed(before)  # within its own noise
    assert not Figure("lower", [50.0]).regressed(before)
    assert Figure("higher", [90.0]).regressed(Figure("higher", [100.0]))
    assert not Figure("higher", [96.0]).regressed(Figure("higher", [100.0]))


def test_all_parts_fit_into_an_hour_and_the_quick_ones_into_five_minutes():
    assert sum(part.limit_s for part in PARTS) <= 3600
    assert 0 < sum(part.quick[1] for part in PARTS if part.quick) <= 300
    assert len({part.name for part in PARTS}) == len(PARTS)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "BASELINE", tmp_path / "baseline.json")
    monkeypatch.setattr(suite, "draw", lambda kind, entry: None)
    return tmp_path / "baseline.json"


def _done(out, name, values, better="lower"):
    folder = out / name
    folder.mkdir(parents=True)
    (folder / "hops.json").write_text(json.dumps({"compared": {"µs: x": {"better": better, "values": values}}}))


def test_a_regression_is_told_and_fails_the_run(kept, tmp_path, capsys):
    parts = (Part("one", "hops", "", 5.0),)
    _done(tmp_path / "first", "one", [10.0, 10.5])
    assert suite.run([], False, True, tmp_path / "first", parts) == 0
    assert len(json.loads(kept.read_text())) == 1
    _done(tmp_path / "second", "one", [20.0, 20.5])
    assert suite.run([], False, False, tmp_path / "second", parts) == 3
    assert "WORSE" in capsys.readouterr().out
    written = json.loads((tmp_path / "second" / "all.json").read_text())
    assert written["regressed"] == ["one: µs: x"] and not written["failed"]


def test_an_unknown_part_is_refused_by_name(kept, tmp_path):
    with pytest.raises(InvalidArgument, match="only: must be of one, got 'two'"):
        suite.run(["two"], False, False, tmp_path, (Part("one", "hops", "", 5.0),))


@pytest.mark.slow
def test_a_part_that_fails_or_takes_too_long_is_told(kept, tmp_path, capsys):
    parts = (Part("wrong", "hops", "--engine none-such", 60.0), Part("late", "hops", "--engine demo", 0.3))
    assert suite.run([], False, False, tmp_path, parts) == 1
    failed = json.loads((tmp_path / "all.json").read_text())["failed"]
    assert failed["wrong"] == "ended with code 1" and failed["late"].startswith("took more than 0.3 s")


def test_the_page_has_a_plot_for_each_group(tmp_path):
    pytest.importorskip("matplotlib")
    figures = {"hops: CPU, µs: a": {"better": "lower", "values": [1.0, 2.0]}}
    figures["hops: CPU, µs: b"] = {"better": "lower", "values": [3.0]}
    entry = {"when": "2026-11-23", "commit": "abc", "load": "0.1", "figures": figures}
    suite.draw("a machine", entry, tmp_path / "performance.md")
    page = (tmp_path / "performance.md").read_text()
    [plot] = (tmp_path / "performance").iterdir()
    assert f"performance/{plot.name}" in page and plot.stat().st_size < 40_000
