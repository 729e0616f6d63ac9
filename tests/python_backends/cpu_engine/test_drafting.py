"""Prompt lookup: the choice of the draft length, and its texts beside those of plain decoding."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading

import numpy as np
import openvino_genai as genai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import manifest as manifests
from contract.generation import Guide, SamplingParams
from python_backends.cpu_engine.drafting import BUSY, RETRY, SHORT, Drafting, DraftLength
from python_backends.cpu_engine.link import WorkerLink
from python_backends.ensemble.worker_messages import AddSequence
from python_backends.limits import EngineLimits

SPECULATION = {"mode": "prompt_lookup", "max_draft_len": 6, "ngram_size": 3}


def test_the_length_follows_the_load():
    length = DraftLength(8)
    assert [length.choose(running) for running in (0, 1, BUSY - 1, BUSY, 64)] == [8, SHORT, SHORT, 1, 1]
    assert DraftLength(2).choose(1) == 2


def test_rejected_drafts_become_short_and_long_ones_are_tried_again():
    length = DraftLength(8)
    for _ in range(100):
        length.observe(8, 0)
    assert [length.choose(0) for _ in range(RETRY)] == [1] * (RETRY - 1) + [8]
    for _ in range(100):
        length.observe(8, 3)
    assert length.choose(0) == 8


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 8)), max_size=50), st.integers(1, 16))
def test_every_length_is_one_that_the_pipeline_takes(history: list[tuple[int, int]], most: int):
    length = DraftLength(most)
    for running, accepted in history:
        chosen = length.choose(running)
        assert 1 <= chosen <= most
        length.observe(chosen, min(chosen, accepted))


def test_counts_are_of_the_sequences_that_live():
    drafting = Drafting(4, 3)
    config = genai.GenerationConfig()
    drafting.configure(config, 1, running=0)
    assert (config.num_assistant_tokens, config.max_ngram_size) == (4, 3)
    drafting.observe(1, 3)
    drafting.observe(1, 1)
    drafting.end(1)
    assert drafting.take_counts() == (2, 2)
    assert drafting.take_counts() == (0, 0)


class Listener:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.reports, self.log_probs, self.ready, self.dead = [], [], False, ""

    def on_ready(self) -> None:
        with self.changed:
            self.ready = True
            self.changed.notify_all()

    def on_report(self, report) -> None:
        with self.changed:
            self.reports.append(report)
            self.changed.notify_all()

    def on_death(self, reason: str) -> None:
        with self.changed:
            self.dead = reason
            self.changed.notify_all()

    def wait(self, condition) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=60), self.dead


def generated(engine_dir, requests) -> tuple[list[list[int]], Listener]:
    """Send all requests at once to a worker of the engine; return the ids of each."""
    listener = Listener()
    link = WorkerLink(engine_dir, listener)
    listener.wait(lambda: listener.ready or listener.dead)
    assert listener.ready, listener.dead

    def ended():
        return {o.id for report in listener.reports for o in report.outputs if o.event.last}

    try:
        for id, (prompt, sampling, guide) in enumerate(requests, 1):
            stops = frozenset({256})
            link.send(AddSequence(id, np.array(prompt, np.int64), 60, sampling, stops, guide=guide))
        listener.wait(lambda: len(ended()) == len(requests) or listener.dead)
        assert not listener.dead
    finally:
        link.close()
        listener.wait(lambda: listener.dead)
    outputs = [o for report in listener.reports for o in report.outputs]
    for output in outputs:
        assert len(output.log_probs) in (0, len(output.token_ids))
    ids = [[token for o in outputs if o.id == id for token in o.token_ids] for id in range(1, len(requests) + 1)]
    listener.log_probs = [value for o in sorted(outputs, key=lambda o: o.id) for value in o.log_probs]
    return ids, listener


@pytest.fixture(scope="module")
def drafting_engine(tiny_engine, tmp_path_factory):
    folder = shutil.copytree(tiny_engine, tmp_path_factory.mktemp("drafting") / "engine")
    table = json.loads((folder / "manifest.json").read_text())
    table["recipe"]["speculative_decoding"] = SPECULATION
    (folder / "manifest.json").write_text(json.dumps(table))
    return folder


def test_the_limits_leave_blocks_for_drafts(tiny_engine):
    manifest = manifests.load(tiny_engine)
    plain = EngineLimits.from_manifest(manifest)
    drafting = EngineLimits.from_manifest(
        dataclasses.replace(manifest, recipe={**manifest.recipe, "speculative_decoding": SPECULATION})
    )
    assert (plain.blocks(32), drafting.blocks(26), drafting.blocks(27)) == (1, 1, 2)
    assert drafting.kv_cache_tokens == plain.kv_cache_tokens - 6


@pytest.mark.slow
def test_greedy_texts_are_those_of_plain_decoding(triton_types, tiny_engine, drafting_engine):
    repeating = [5, 6, 7, 8] * 6
    requests = [
        (repeating, SamplingParams(top_k=1, log_probs=True), None),
        (list(range(40)), SamplingParams(top_k=1), None),
        (repeating, SamplingParams(top_k=1, repetition_penalty=1.3, frequency_penalty=0.5), None),
        ([9, 9, 9, 9], SamplingParams(top_k=1, log_probs=True, top_log_probs=3), None),
        (repeating, SamplingParams(top_k=1, min_tokens=5), None),
        (repeating, SamplingParams(top_k=1), Guide("regex", "(abc)*d")),
    ]
    plain, undrafted = generated(tiny_engine, requests)
    drafted, listener = generated(drafting_engine, requests)
    assert drafted == plain
    assert listener.log_probs == pytest.approx(undrafted.log_probs, abs=1e-4)
    accepted = sum(report.accepted for report in listener.reports)
    assert accepted > 0 and sum(report.drafting for report in listener.reports) > 0
    # Drafts give some tokens two or more to a step, so that there are fewer steps of sequences than tokens.
    assert sum(report.drafting for report in listener.reports) + accepted + len(requests) == sum(map(len, drafted))
