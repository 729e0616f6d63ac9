"""Prompt lookup: the choice of the draft length, and its texts beside those of plain decoding."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import openvino_genai as genai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import manifest as manifests
from contract.generation import Guide, SamplingParams
from python_backends.cpu_engine.drafting import BUSY, RETRY, SHORT, Drafting, DraftLength
from python_backends.cpu_engine.link import WorkerLink
from python_backends.ensemble.worker_messages import AddSequence, EndSequence
from python_backends.limits import EngineLimits

SPECULATION = {"mode": "prompt_lookup", "max_draft_len": 6, "ngram_size": 3}


LIMITS = EngineLimits(vocab_size=300, max_seq_len=320, max_batch_size=8, kv_cache_blocks=64, max_draft_len=6)


def test_the_length_follows_the_load():
    length = DraftLength(8)
    assert [length.choose(running) for running in (0, 1, BUSY - 1, BUSY, 64)] == [8, SHORT, SHORT, 0, 0]
    assert DraftLength(2).choose(1) == 2


def test_rejected_drafts_end_drafting_and_it_is_tried_again():
    length = DraftLength(8)
    for _ in range(100):
        length.observe(8, 0)
    assert [length.choose(0) for _ in range(RETRY)] == [0] * (RETRY - 1) + [8]
    for _ in range(100):
        length.observe(8, 3)
    assert length.choose(0) == 8


def test_a_draft_model_has_to_earn_its_time():
    free, dear = DraftLength(4), DraftLength(4, cost=0.3)
    for length in (free, dear):
        for _ in range(200):
            length.observe(4, 1)
    assert (free.choose(0), dear.choose(0)) == (4, 0)


@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 8)), max_size=50), st.integers(1, 16))
def test_no_length_is_longer_than_the_recipe_allows(history: list[tuple[int, int]], most: int):
    length = DraftLength(most)
    for running, accepted in history:
        chosen = length.choose(running)
        assert 0 <= chosen <= most and (running < BUSY or not chosen)
        if chosen:
            length.observe(chosen, min(chosen, accepted))


def command(id: int, tokens: int = 10, guide: Guide | None = None, max_tokens: int = 20, **sampling) -> AddSequence:
    params = SamplingParams(**{"top_k": 1} | sampling)
    return AddSequence(id, np.arange(tokens), max_tokens, params, frozenset({0}), guide=guide)


def test_a_sequence_is_admitted_with_its_length_while_the_plain_pipeline_is_empty():
    drafting, config = Drafting(None, LIMITS, 3), genai.GenerationConfig()
    assert drafting.admit(command(1), config, running=0)
    assert (config.num_assistant_tokens, config.max_ngram_size) == (6, 3)
    assert drafting.admit(command(2), config, running=1) and config.num_assistant_tokens == SHORT
    plain = genai.GenerationConfig()
    assert not drafting.admit(command(3), plain, running=3)  # one of the three is in the plain pipeline
    assert not plain.num_assistant_tokens and not plain.max_ngram_size
    assert len(drafting) == 2 and 1 in drafting and 3 not in drafting


def test_a_probe_is_no_try_of_whether_drafts_gain():
    drafting = Drafting(None, LIMITS, 3)
    drafting.admit(command(1), genai.GenerationConfig(), running=0)
    for _ in range(200):
        drafting.observe(1, [1], first=False)
    drafting.end(1)
    for id in range(RETRY - 1):
        assert not drafting.admit(command(id), genai.GenerationConfig(), running=0)
        probe = genai.GenerationConfig()
        assert drafting.admit(command(100, max_tokens=1), probe, running=0) and probe.num_assistant_tokens == SHORT
        drafting.end(100)
    assert drafting.admit(command(1), genai.GenerationConfig(), running=0)


def test_an_engine_without_drafts_admits_none():
    drafting = Drafting(None, dataclasses.replace(LIMITS, max_draft_len=0))
    for max_tokens in (1, 20):
        assert not drafting.admit(command(1, max_tokens=max_tokens), genai.GenerationConfig(), running=0)
    assert not drafting.leave() and len(drafting) == 0 and drafting.take_counts() == (0, 0)


def test_the_second_kv_cache_is_not_overcommitted():
    drafting, config = Drafting(None, LIMITS, 3), genai.GenerationConfig()
    assert LIMITS.draft_pool_blocks == 16  # a quarter; one longest sequence with its drafts takes 11
    assert drafting.admit(command(1, tokens=300), config, running=0)
    assert not drafting.admit(command(2, tokens=160), config, running=1)
    assert drafting.admit(command(3, tokens=100), config, running=1)
    drafting.end(1)
    assert drafting.admit(command(2, tokens=160), config, running=1)


def test_sequences_leave_with_what_they_have_generated():
    drafting = Drafting(None, LIMITS, 3)
    stay = {"guide": Guide("regex", "a"), "presence_penalty": 1.0, "frequency_penalty": 1.0}
    drafting.admit(command(1, min_tokens=4), genai.GenerationConfig(), running=0)
    drafting.observe(1, [7], first=True)
    drafting.observe(1, [8, 9], first=False)
    for id, (key, value) in enumerate(stay.items(), 2):
        drafting.admit(command(id, **{key: value}), genai.GenerationConfig(), running=id - 1)
    (moved,) = drafting.leave()
    assert (moved.id, moved.input_ids.tolist(), moved.max_tokens) == (1, [*range(10), 7, 8, 9], 17)
    assert moved.sampling.min_tokens == 1 and moved.stop_ids == frozenset({0})
    assert len(drafting) == 3 and not drafting.leave()
    sampled = Drafting(None, LIMITS, 3)
    sampled.admit(command(1, top_k=0, seed=5), genai.GenerationConfig(), running=0)
    sampled.admit(command(2, top_k=0), genai.GenerationConfig(), running=1)
    assert [each.id for each in sampled.leave()] == [2]


def test_counts_are_of_the_sequences_that_draft():
    drafting = Drafting(None, LIMITS, 3)
    drafting.admit(command(1), genai.GenerationConfig(), running=0)
    drafting.observe(1, [1], first=True)
    drafting.observe(1, [2, 3, 4], first=False)
    drafting.observe(1, [5], first=False)
    drafting.observe(1, [], first=False)
    drafting.observe(2, [6, 7], first=False)  # a sequence of the plain pipeline
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


def ended(listener: Listener) -> set[int]:
    return {o.id for report in listener.reports for o in report.outputs if o.event.last}


def generated(engine_dir, requests, beside: int = 0) -> tuple[list[list[int]], Listener]:
    """Send requests to a worker of the engine, the next when ``beside`` others run; return the ids of each."""
    listener = Listener()
    link = WorkerLink(engine_dir, listener)
    listener.wait(lambda: listener.ready or listener.dead)
    assert listener.ready, listener.dead

    def room(id):
        return listener.dead or len(ended(listener)) >= id - 1 - beside

    try:
        for id, (prompt, sampling, guide) in enumerate(requests, 1):
            stops = frozenset({256})
            listener.wait(lambda id=id: room(id))
            link.send(AddSequence(id, np.array(prompt, np.int64), 60, sampling, stops, guide=guide))
        listener.wait(lambda: len(ended(listener)) == len(requests) or listener.dead)
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


@pytest.fixture(scope="module")
def draft_model_engine(tiny_engine, tmp_path_factory):
    """The tiny engine with its own checkpoint, in int8, as draft model."""
    from build import engine
    from build.recipe import recipe

    made = manifests.load(tiny_engine).recipe
    keys = ("kind", "model", "precision", "kv_cache_precision", "max_batch_size", "max_num_tokens", "max_seq_len")
    table = {key: made[key] for key in (*keys, "kv_cache_tokens")}
    table["speculative_decoding"] = {"mode": "draft_model", "draft": made["model"]}
    parsed = recipe.parse(table, Path("drafted.toml"))
    return engine.build(parsed, tmp_path_factory.mktemp("drafted"), print, accept="too small to gain")


def test_the_limits_have_a_second_kv_cache_for_drafts():
    assert (LIMITS.blocks(32), LIMITS.draft_blocks(26), LIMITS.draft_blocks(27)) == (1, 1, 2)
    long = dataclasses.replace(LIMITS, max_seq_len=2048)
    assert long.draft_pool_blocks == 65  # one longest sequence and its drafts
    assert dataclasses.replace(long, kv_cache_blocks=32).draft_pool_blocks == 33


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["drafting_engine", "draft_model_engine"])
def test_greedy_texts_are_those_of_plain_decoding(triton_types, tiny_engine, engine, request):
    drafting_engine = request.getfixturevalue(engine)
    repeating = [5, 6, 7, 8] * 6
    requests = [
        (repeating, SamplingParams(top_k=1), Guide("regex", "(abc)*d")),
        (repeating, SamplingParams(top_k=1, log_probs=True), None),
        (list(range(40)), SamplingParams(top_k=1), None),
        (repeating, SamplingParams(top_k=1, repetition_penalty=1.3, frequency_penalty=0.5), None),
        ([9, 9, 9, 9], SamplingParams(top_k=1, log_probs=True, top_log_probs=3), None),
        (repeating, SamplingParams(top_k=1, min_tokens=5), None),
    ]
    plain, undrafted = generated(tiny_engine, requests, len(requests))
    for beside in (
        0,
        3,
        len(requests),
    ):  # each alone; up to four, none moved; all at once, three of the first four moved
        drafted, listener = generated(drafting_engine, requests, beside)
        assert drafted == plain
        assert listener.log_probs == pytest.approx(undrafted.log_probs, abs=1e-4)
        accepted, steps = (sum(getattr(r, name) for r in listener.reports) for name in ("accepted", "drafting"))
        if beside == 0:
            assert accepted > 0 and steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["drafting_engine", "draft_model_engine"])
def test_cancelled_and_moved_sequences_free_their_blocks(triton_types, engine, request):
    drafting_engine = request.getfixturevalue(engine)
    listener = Listener()
    link = WorkerLink(drafting_engine, listener)

    def add(id, max_tokens=100):
        link.send(AddSequence(id, np.arange(100) % 50, max_tokens, SamplingParams(top_k=1), frozenset()))

    try:
        for round in range(30):
            for id in range(6 * round, 6 * round + (6 if round % 2 else 2)):
                add(id)
            count = len(listener.reports)
            listener.wait(lambda count=count: listener.dead or len(listener.reports) > count + 3)
            for id in range(6 * round, 6 * round + 6):
                link.send(EndSequence(id))
        listener.wait(lambda: listener.dead or len(ended(listener)) == 15 * 8)
        add(1000, 150)  # alone it takes the whole KV cache of the pipeline that drafts
        listener.wait(lambda: listener.dead or 1000 in ended(listener))
        for id in range(1001, 1006):  # and these, less the first, half of the other
            add(id)
        listener.wait(lambda: listener.dead or 1005 in ended(listener) and len(ended(listener)) == 15 * 8 + 6)
        assert not listener.dead
        assert not [o.error for report in listener.reports for o in report.outputs if o.error]
    finally:
        link.close()
        listener.wait(lambda: listener.dead)
