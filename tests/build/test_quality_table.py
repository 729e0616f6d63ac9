"""The table of docs/quality.md: every promised precision, from figures that belong to it."""

import re

import pytest

from build import quality_table
from build.base import layout
from build.base.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow

DOCUMENT = (layout.ROOT / "docs" / "quality.md").read_text(encoding="utf-8")


def rows() -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in DOCUMENT.splitlines() if line.count("|") == 9]
    return {cells[0]: cells for cells in lines}


def test_the_document_has_every_precision():
    assert rows().keys() >= {*quality_table.CPU_ROWS, *quality_table.GPU_ROWS}
    assert "No GPU has run them" in DOCUMENT and "`make quality`" in DOCUMENT


def test_every_precision_of_the_demo_model_is_within_its_default_budget():
    assert all(rows()[name][-1] == "passed" for name in (*quality_table.CPU_ROWS, *quality_table.GPU_ROWS))


def test_calibrated_four_bits_are_nearer_than_rounded_ones():
    calibrated, nearest = (float(rows()[name][5]) for name in ("int4 (CPU)", "int4 to nearest (CPU)"))
    assert calibrated < 0.6 * nearest


def test_a_cpu_engine_is_measured_in_the_arithmetic_it_serves_with(tmp_path, monkeypatch):
    monkeypatch.setattr(quality_table, "CACHE", tmp_path)
    monkeypatch.setattr(quality_table, "GPU_ROWS", {})
    monkeypatch.setattr(quality_table, "CPU_ROWS", {"int8 (CPU)": ("int8", "u8")})
    monkeypatch.setattr(quality_table.evaluation, "MOST_BLOCKS", 2)
    table, replies, tokens = quality_table.measure(open_checkpoint(quality_table.MODEL))
    assert tokens == 2 * 255 and replies.keys() == {"reference", "int8 (CPU)"}
    assert re.search(r"\| int8 \(CPU\) \| 7\.\d \|", table)
    assert quality_table.document(table, replies, tokens).startswith("# Quality by precision\n")
    assert (tmp_path / "int8-(CPU)" / "openvino_model.bin").is_file()
