"""The labelled questions, and the line about answers."""

from __future__ import annotations

import json
from pathlib import Path

from examples.rag.citations import check
from examples.rag.evaluate import hit, summary
from examples.rag.index import Passage, passages
from examples.rag.orchestrator import Answer, Branch

ROOT = Path(__file__).resolve().parents[3]
LABELS = [json.loads(line) for line in (ROOT / "examples" / "rag" / "questions.jsonl").read_text().splitlines()]


def test_every_labelled_question_has_a_passage_that_answers_it():
    found = passages(ROOT / "docs")
    for label in LABELS:
        assert any(hit(label, passage) for passage in found), label


def test_answers_are_summed_up():
    source = Passage("environment.md", "x", "TRIDENT_GATEWAY_MAX_IN_FLIGHT sets requests in flight")
    made = Answer("q", check(source.text, [source.text]), "m", [source], [Branch("b", "late")], "t", 1.5)
    line = summary([made], LABELS)
    assert "cited 1/1   from a right source 1/1" in line and "partial 1" in line and "p50 1.5 s" in line
