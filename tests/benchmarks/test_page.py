"""The page of the kept runs: its tables, plots, goals and words."""

import pytest

from benchmarks import page
from benchmarks.suite import PARTS


def figure(*values, better="lower"):
    return {"better": better, "values": list(values)}


def test_every_part_has_a_title_and_an_explanation_and_nothing_else_has():
    assert page.WORDS.keys() - {"head", "short", "goals"} == {part.name for part in PARTS}
    assert all(title and about for title, about in (page._words(part.name) for part in PARTS))


def test_labels_of_a_row_and_a_column_become_a_table_and_the_best_is_marked():
    rows = {f"{name}, {at}": figure(*values) for name, at, values in (("a", 1, (1.0, 3.0)), ("b", 1, (1.5,)))}
    assert page.table(rows | {"b, 8": figure(12_345.0)}, best=True) == [
        *("| streams at once | 1 | 8 |", "|---|--:|--:|"),
        *("| a | 2 (1 to 3) |  |", "| b | **1.5** | **12,345** |"),
    ]
    loads = {f"a, {load}": figure(1.0) for load in ("16 paced", "8 unpaced", "2 paced")}
    assert page.table(loads)[0] == "|  | 2 paced | 16 paced | 8 unpaced |"
    assert page.table({"p50": figure(2.0)})[2:] == ["| p50 | 2 |"]


def test_the_page_tells_losses_conditions_and_missed_goals(tmp_path):
    pytest.importorskip("matplotlib")
    speeds = {"Trident, gRPC": figure(50.0, 70.0, better="higher"), "vLLM": figure(100.0, better="higher")}
    entry = {"when": "2026-11-23", "commit": "abc", "others": 0.2, "command": "python -m benchmarks peers"}
    entry |= {"figures": {f"tokens/s: {name}, 8": of for name, of in speeds.items()}}
    entry["figures"] |= {"start, s: Trident, gRPC": figure(4.0), "start, s: vLLM": figure(80.0)}
    entry |= {"goals": [["speed, at least", 0.6, 1.1, False], ["x", 1.0, 2.0, True]], "notes": ["vLLM: as it comes"]}
    page.write("a machine", {"peers-bf16": entry}, tmp_path / "performance.md")
    text = (tmp_path / "performance.md").read_text()
    plots = sorted(path.name for path in (tmp_path / "performance").iterdir())
    assert all(f"performance/{name}" in text for name in plots) and len(plots) == 2
    assert (tmp_path / "performance" / plots[0]).stat().st_size < 40_000
    for told in (
        "**a machine**",
        "bf16 weights: tokens/s | **0.6** |",
        "from start to first token |  | 0.05 |",
        "other processes used 20%",
        "speed, at least 1.1: 0.6",
        "- vLLM: as it comes",
    ):
        assert told in text
    assert "from start to first token |  | 0.05 | 20%: disturbed |" in text
    assert "| bf16 weights: Trident, vLLM and llama.cpp | 1 | 1 | 20%: disturbed |" in text
    assert "Goals missed here (1 of 2)" in text and "`python -m benchmarks peers` on 2026-11-23, commit abc" in text


def test_what_failed_is_told_and_not_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    never, at_once = figure(None), figure(0.0)
    entry = {"when": "2026-11-23", "commit": "abc", "others": 0.0, "notes": []}
    entry["figures"] = {"recovery, s: http": never, "recovery, s: grpc": at_once, "TTFT p50, ms: http": never}
    entry["goals"] = [["recovery, s, at most", None, 5.0, False]]
    speeds = {"Trident, gRPC": figure(None, better="higher"), "vLLM": figure(100.0, better="higher")}
    peers = entry | {"figures": {f"tokens/s: {name}, 8": of for name, of in speeds.items()}, "goals": []}
    peers["figures"] |= {"start, s: Trident, gRPC": figure(None), "start, s: vLLM": never, "start, s: x": figure(8.0)}
    page.write("a machine", {"peers-bf16": peers, "limits": entry}, tmp_path / "performance.md")
    text = (tmp_path / "performance.md").read_text()
    assert "| http | failed |" in text and "| grpc | 0 |" in text and "- recovery, s, at most 5: failed" in text
    assert "bf16 weights: tokens/s | **0** |" in text and "first token |  | **failed** | 0% |" in text
    assert sorted(path.name for path in (tmp_path / "performance").iterdir()) == [
        *("limits-recovery--s.svg", "peers-bf16-start--s.svg", "peers-bf16-tokens-s.svg")
    ]
