"""Which sequences are drafted for, and their texts beside those of plain decoding."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openvino_genai as genai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract import manifest as manifests
from contract.generation import Guide, SamplingParams
from contract.scheduling import (
    BLOCK_TOKENS,
    LONG_UNDRAFTED_FROM,
    RESUME_TOKENS,
    RESUME_UP_TO,
    RETRY_AFTER,
    SHARED_DRAFT,
    UNDRAFTED_FROM,
    WHOLE_PROMPT_TOKENS,
)
from python_backends.adapters import AdapterIds
from python_backends.cpu_engine.drafting import Drafting, PromptLookup
from python_backends.cpu_engine.link import WorkerLink
from python_backends.cpu_engine.prefix_cache import PartialBlocks
from python_backends.cpu_engine.top_log_probs import TopLogProbsModel
from python_backends.cpu_engine.worker import StepLoop, open_drafting, open_pipeline
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, StepReport
from python_backends.limits import EngineLimits
from tests.python_backends.cpu_engine.test_draft_length import known

SPECULATION = {"mode": "prompt_lookup", "max_draft_len": 6, "ngram_size": 3}


LIMITS = EngineLimits(vocab_size=300, max_seq_len=320, max_batch_size=8, kv_cache_blocks=64, max_draft_len=6)


def started(_: int) -> bool:
    return False


def ready(limits: EngineLimits = LIMITS, pipeline: object = None, ngram_size: int = 3) -> Drafting:
    """Return a rule whose steps are timed; drafts take no time."""
    drafting = Drafting(limits, ngram_size)
    drafting.pipeline = pipeline
    drafting._length = known(limits.max_draft_len)
    return drafting


def command(id: int, tokens: int = 10, guide: Guide | None = None, max_tokens: int = 20, **sampling) -> AddSequence:
    params = SamplingParams(**{"top_k": 1} | sampling)
    return AddSequence(id, np.arange(tokens), max_tokens, params, frozenset({0}), guide=guide)


def test_a_long_prompt_is_drafted_for_beside_few():
    drafting = ready(dataclasses.replace(LIMITS, max_seq_len=2048, kv_cache_blocks=1024))
    long, short = (command(100, tokens=WHOLE_PROMPT_TOKENS + more) for more in (1, 0))
    for id in range(LONG_UNDRAFTED_FROM - 1):
        assert drafting.admit(command(id), genai.GenerationConfig(), running=id)
    assert not drafting.admit(long, genai.GenerationConfig(), running=len(drafting), behind=1)
    assert drafting.admit(command(3), genai.GenerationConfig(), running=len(drafting))
    assert not drafting.admit(long, genai.GenerationConfig(), running=len(drafting))
    assert drafting.admit(short, genai.GenerationConfig(), running=len(drafting))


def test_a_sequence_is_admitted_with_its_length_while_the_plain_pipeline_is_empty():
    drafting, config = ready(), genai.GenerationConfig()
    assert drafting.admit(command(1), config, running=0)
    assert (config.num_assistant_tokens, config.max_ngram_size) == (6, 3)
    assert drafting.admit(command(2), config, running=1) and config.num_assistant_tokens == SHARED_DRAFT
    plain = genai.GenerationConfig()
    assert not drafting.admit(command(3), plain, running=3)  # one of the three is in the plain pipeline
    assert not plain.num_assistant_tokens and not plain.max_ngram_size
    assert len(drafting) == 2 and 1 in drafting and 3 not in drafting


@given(st.integers(1, 12))
def test_of_more_that_come_together_than_are_drafted_for_none_is(count):
    drafting = ready()
    taken = [
        drafting.admit(command(id), genai.GenerationConfig(), running=id, behind=count - id - 1) for id in range(count)
    ]
    assert taken == [count <= UNDRAFTED_FROM] * count and len(drafting) == sum(taken)


def test_a_probe_is_no_try_of_whether_drafts_of_a_model_gain():
    drafting = ready(ngram_size=0)
    drafting.admit(command(1), genai.GenerationConfig(), running=0)
    for _ in range(400):
        drafting.observe(1, [1])
    drafting.end(1)
    for id in range(RETRY_AFTER):
        assert not drafting.admit(command(id), genai.GenerationConfig(), running=0)
        probe = genai.GenerationConfig()
        assert drafting.admit(command(100, max_tokens=1), probe, running=0)
        assert probe.num_assistant_tokens == SHARED_DRAFT
        drafting.end(100)
    assert drafting.admit(command(1), genai.GenerationConfig(), running=0)


def test_steps_are_to_be_timed_once_the_pipeline_is_loaded_until_they_are_known():
    drafting = Drafting(dataclasses.replace(LIMITS, kv_cache_blocks=1024), 3)
    assert not drafting.learns
    drafting.load_with(lambda: "pipeline")
    for _ in range(8):
        drafting.timed(1, 0.02, drafts=False, idle=True)  # beside the loading
    assert drafting.learns and drafting.untimed is None
    drafting.load()
    for step in [(n, drafts) for n in (1, UNDRAFTED_FROM, 2, 4) for drafts in (False, True)]:
        assert drafting.learns and drafting.untimed == step
        for _ in range(8):
            drafting.timed(step[0], 0.02, drafts=step[1], idle=True)
    assert not drafting.learns and drafting.untimed is None


def test_no_more_sequences_are_timed_than_run_together_or_fit_into_the_second_kv_cache():
    large = dataclasses.replace(LIMITS, kv_cache_blocks=1024)
    for limits, most in [
        (large, UNDRAFTED_FROM),
        (dataclasses.replace(large, max_batch_size=2), 2),
        (dataclasses.replace(large, kv_cache_blocks=60), 3),
        (dataclasses.replace(large, kv_cache_blocks=40), 2),  # one longest sequence: 11 blocks
    ]:
        drafting = Drafting(limits, 3)
        drafting.pipeline = "pipeline"
        for drafts in (False, True):
            for _ in range(8):
                drafting.timed(1, 0.02, drafts=drafts, idle=True)
        assert drafting.untimed == (most, False), limits


def test_where_the_second_pipeline_cannot_be_loaded_nothing_is_learned_and_none_admitted():
    def load():
        raise RuntimeError("no memory")

    drafting = Drafting(LIMITS, 3)
    drafting.load_with(load)
    with pytest.raises(RuntimeError):
        drafting.load()
    assert not drafting.learns and not drafting.admit(command(1), genai.GenerationConfig(), running=0)


@pytest.mark.parametrize("drafts", [True, False])
def test_a_step_that_reads_a_prompt_is_not_timed_also_of_a_sequence_that_was_moved(drafts):
    drafting, timed = Drafting(LIMITS, 3), []
    drafting.pipeline = "pipeline"
    drafting._length.timed = lambda sequences, taken_s, *, drafts, idle: timed.append((taken_s, drafts))
    drafting.follow(command(1, max_tokens=100))
    if drafts:
        drafting.observe(1, [7, 8])
        moved = drafting.back()
        drafting.take_back(moved, genai.GenerationConfig())
    drafting.timed(1, 0.5, drafts=drafts)  # its prompt, and what it had made
    drafting.observe(1, [9])
    drafting.timed(1, 0.02, drafts=drafts)
    assert timed == [(0.02, drafts)]


def test_an_engine_without_drafts_admits_none():
    drafting = Drafting(dataclasses.replace(LIMITS, max_draft_len=0))
    for max_tokens in (1, 20):
        assert not drafting.admit(command(1, max_tokens=max_tokens), genai.GenerationConfig(), running=0)
    assert drafting.leave(started) is None and len(drafting) == 0 and drafting.take_counts() == (0, 0)


def test_the_second_kv_cache_is_not_overcommitted():
    drafting, config = ready(), genai.GenerationConfig()
    assert LIMITS.draft_pool_blocks == 16  # a quarter; one longest sequence with its drafts takes 11
    assert drafting.admit(command(1, tokens=300), config, running=0)
    assert not drafting.admit(command(2, tokens=160), config, running=1)
    assert drafting.admit(command(3, tokens=100), config, running=1)
    drafting.end(1)
    assert drafting.admit(command(2, tokens=160), config, running=1)


def test_sequences_leave_with_what_they_have_generated():
    drafting = ready()
    stay = {"guide": Guide("regex", "a"), "presence_penalty": 1.0, "frequency_penalty": 1.0}
    drafting.admit(command(1, min_tokens=4), genai.GenerationConfig(), running=0)
    drafting.observe(1, [7])
    drafting.observe(1, [8, 9])
    for id, (key, value) in enumerate(stay.items(), 2):
        drafting.admit(command(id, **{key: value}), genai.GenerationConfig(), running=id - 1)
    assert drafting.leave(lambda id: id == 1) is None and len(drafting) == 4
    moved = drafting.leave(started)
    assert (moved.id, moved.input_ids.tolist(), moved.max_tokens) == (1, [*range(10), 7, 8, 9], 17)
    assert moved.sampling.min_tokens == 1 and moved.stop_ids == frozenset({0})
    assert len(drafting) == 3 and drafting.leave(started) is None
    sampled = ready()
    sampled.admit(command(1, top_k=0, seed=5), genai.GenerationConfig(), running=0)
    sampled.admit(command(2, top_k=0), genai.GenerationConfig(), running=1)
    assert sampled.leave(started).id == 2 and sampled.leave(started) is None


def test_of_several_the_one_that_may_make_the_most_tokens_leaves_first():
    drafting = ready()
    for id, most in enumerate((20, 40, 30)):
        drafting.admit(command(id, max_tokens=most), genai.GenerationConfig(), running=id)
        drafting.observe(id, [7] * (15 if id == 1 else 1))
    assert [drafting.leave(started).id for _ in range(3)] == [2, 1, 0] and drafting.leave(started) is None


def test_one_whose_text_is_longer_than_may_be_read_stays():
    drafting = ready()
    for id, tokens in enumerate((30, 10)):
        drafting.admit(command(id, tokens=tokens, max_tokens=40 - id), genai.GenerationConfig(), running=id)
        drafting.observe(id, [7])
    assert drafting.leave(started, 10) is None
    assert drafting.leave(started, 30).id == 1 and drafting.leave(started, 30) is None
    assert drafting.leave(started, 31).id == 0


def test_drafts_lose_where_those_that_have_them_would_end_sooner_without_although_they_are_read_again():
    def lose(accepted: int, *drafted: AddSequence, cost: float = 1.0) -> bool:
        drafting = ready()
        for running, each in enumerate(drafted):
            assert drafting.admit(each, genai.GenerationConfig(), running=running)
        drafting._length = known(LIMITS.max_draft_len, cost)
        for _ in range(1000):
            drafting._length.observe(accepted, 16)
        return drafting.loses()

    long = command(1, max_tokens=200)
    assert lose(0, long) and lose(0, long, command(2, max_tokens=100))
    assert not lose(2, long) and not lose(0, long, cost=0.0)
    assert not lose(0, command(1, tokens=250, max_tokens=8))
    assert not lose(0, long, command(2, presence_penalty=1.0)) and not lose(0)


def test_counts_are_of_the_sequences_that_draft():
    drafting = ready()
    drafting.admit(command(1), genai.GenerationConfig(), running=0)
    drafting.observe(1, [1])
    drafting.observe(1, [2, 3, 4])
    drafting.observe(1, [5])
    drafting.observe(1, [])
    drafting.observe(2, [6, 7])  # unknown
    assert drafting.take_counts() == (2, 2)
    assert drafting.take_counts() == (0, 0)


def taken_back(drafting: Drafting, configs: list[genai.GenerationConfig] | None = None) -> list[AddSequence]:
    """Take all sequences back that go over to the pipeline that drafts, one in each step."""
    taken = []
    while (one := drafting.back()) is not None:
        config = genai.GenerationConfig()
        drafting.take_back(one, config)
        taken.append(one)
        if configs is not None:
            configs.append(config)
    return taken


def test_sequences_come_back_when_few_are_left():
    pipeline, most = object(), RESUME_TOKENS + 5

    def followed(*commands: AddSequence, tokens: int = 3) -> Drafting:
        drafting = ready(pipeline=pipeline)
        for each in commands:
            drafting.follow(each)
            drafting.observe(each.id, list(range(tokens)))
        return drafting

    few = [command(id, max_tokens=most) for id in range(RESUME_UP_TO)]
    drafting = followed(*few)
    configs: list[genai.GenerationConfig] = []
    back = taken_back(drafting, configs)
    assert [each.input_ids.tolist() for each in back] == [[*range(10), 0, 1, 2]] * RESUME_UP_TO
    assert [config.num_assistant_tokens for config in configs] == [LIMITS.max_draft_len, SHARED_DRAFT]
    assert len(drafting) == RESUME_UP_TO and not drafting.back()
    drafting.observe(0, [7])  # the first tokens after a move are of no draft
    assert drafting.take_counts() == (0, 0)
    drafting.observe(0, [8, 9])
    assert drafting.take_counts() == (1, 1)
    # None does where one has to stay, has too little left or no token yet, or at once where there are more of them.
    assert not followed(*few, command(RESUME_UP_TO, max_tokens=most)).back()
    assert not followed(few[0], command(1, max_tokens=most, presence_penalty=1.0)).back()
    assert not followed(few[0], command(1, max_tokens=most - 3)).back()
    assert not followed(*few, tokens=1).back()
    ended = followed(*few)
    ended.end(0)
    assert [each.id for each in taken_back(ended)] == [1]
    # Nor where drafts are rejected, or one is drafted for.
    rejected = followed(command(1, max_tokens=most), tokens=2)
    rejected.admit(command(2), genai.GenerationConfig(), running=0)
    assert not rejected.back()
    for _ in range(400):
        rejected.observe(2, [1])
    rejected.end(2)
    assert not rejected.back()


def test_more_come_back_when_plain_steps_have_lost_the_time_that_it_takes():
    limits = dataclasses.replace(LIMITS, kv_cache_blocks=1024)
    drafting, count = ready(limits, pipeline=object()), UNDRAFTED_FROM - 1

    def steps(number: int) -> None:
        for _ in range(number):
            drafting.timed(count, 0.02, drafts=False)

    for id in range(count):
        drafting.follow(command(id, max_tokens=100))
        drafting.observe(id, [0, 1])
    steps(1)
    assert not drafting.back()
    steps(200)
    # Not beside one with a long prompt, which only the plain pipeline reads in pieces.
    drafting.follow(command(count, tokens=WHOLE_PROMPT_TOKENS + 1))
    drafting.observe(count, [0, 1])
    assert not drafting.back()
    drafting.end(count)
    # One that comes meanwhile begins there, and they go on if one ends.
    drafting.take_back(drafting.back(), genai.GenerationConfig())
    assert drafting.returning and drafting.admit(command(count + 1), genai.GenerationConfig(), running=count)
    drafting.end(1)
    assert len(taken_back(drafting)) == count - 2
    assert not drafting.returning


def test_sequences_whose_texts_have_grown_long_come_back_too():
    """Their prompts and answers together are the prompts of the pipeline that drafts."""
    limits = dataclasses.replace(LIMITS, kv_cache_blocks=1024, max_seq_len=2048)
    drafting, count = ready(limits, pipeline=object()), LONG_UNDRAFTED_FROM + 2
    for id in range(count):
        drafting.follow(command(id, tokens=WHOLE_PROMPT_TOKENS, max_tokens=100))
        drafting.observe(id, [0, 1])
    for _ in range(2000):
        drafting.timed(count, 0.02, drafts=False)
    assert len(taken_back(drafting)) == count


def test_sequences_do_not_go_on_coming_back_when_one_too_many_runs():
    limits = dataclasses.replace(LIMITS, kv_cache_blocks=1024)
    drafting, count = ready(limits, pipeline=object()), UNDRAFTED_FROM
    for id in range(count):
        drafting.follow(command(id, max_tokens=100))
        drafting.observe(id, [0, 1])
    for _ in range(200):
        drafting.timed(count, 0.02, drafts=False)
    drafting.take_back(drafting.back(), genai.GenerationConfig())
    assert not drafting.admit(command(count), genai.GenerationConfig(), running=count)
    drafting.follow(command(count))
    assert drafting.back() is None and not drafting.returning
    assert drafting.leave(started) is not None


def test_plain_answers_tell_whether_drafts_would_gain():
    """Prompt lookup: of as many as could be drafted for, without a trial."""
    drafting = ready(pipeline=object())
    drafting.admit(command(0), genai.GenerationConfig(), running=0)
    for _ in range(400):
        drafting.observe(0, [1])
    drafting.end(0)
    many = range(1, UNDRAFTED_FROM + 3)
    for id in many:
        assert not drafting.admit(command(id), genai.GenerationConfig(), running=0)
        drafting.follow(command(id, max_tokens=400))
    assert sum(one.lookup is not None for one in drafting._plain.values()) == 0
    for nth in range(100):
        for id in many:
            drafting.observe(id, [100 + nth % 5])
    assert sum(one.lookup is not None for one in drafting._plain.values()) == UNDRAFTED_FROM
    for id in many:
        drafting.end(id)
    assert drafting.admit(command(1), genai.GenerationConfig(), running=0)
    assert drafting.take_counts() == (399, 0)  # only of real drafts


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


def begun(listener: Listener) -> set[int]:
    return {o.id for report in listener.reports for o in report.outputs if o.token_ids}


def begin_drafting(link: WorkerLink, listener: Listener) -> None:
    """Send short requests, one after the other, until one drafts; the first does not."""
    for id in range(1000, 1200):
        link.send(AddSequence(id, np.arange(8), SHARED_DRAFT, SamplingParams(top_k=1), frozenset()))
        listener.wait(lambda id=id: listener.dead or id in ended(listener))
        assert not listener.dead
        if any(report.drafting for report in listener.reports):
            break
        time.sleep(0.1)
    assert id > 1000
    listener.reports.clear()


def generated(
    engine_dir, requests, beside: int = 0, lengths: dict[int, int] | None = None, *, apart: bool = False
) -> tuple[list[list[int]], Listener]:
    """Send requests to a worker of the engine, the next when ``beside`` others run; return the ids of each.

    lengths: of answers, by request, in place of 60 tokens. apart: each is sent when the one before has tokens.
    """
    listener = Listener()
    link = WorkerLink(engine_dir, listener)
    listener.wait(lambda: listener.ready or listener.dead)
    assert listener.ready, listener.dead
    if manifests.load(engine_dir).draft_tokens:
        begin_drafting(link, listener)

    def room(id):
        return listener.dead or len(ended(listener)) >= id - 1 - beside

    try:
        for id, (prompt, sampling, guide) in enumerate(requests, 1):
            stops = frozenset({256})
            listener.wait(lambda id=id: room(id) and (not apart or id - 1 in {0, *begun(listener)}))
            tokens = (lengths or {}).get(id, 60)
            link.send(AddSequence(id, np.array(prompt, np.int64), tokens, sampling, stops, guide=guide))
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


@pytest.fixture
def gaining_drafts(monkeypatch):
    """Workers that take drafts for a gain: which sequences draft depends on no time and no text."""
    code = (
        "from python_backends.cpu_engine import draft_length, worker\n"
        "draft_length.DraftLength.speedup = lambda self, sequences: 2.0\n"
        "worker.main()"
    )

    def start(command: list[str], **options) -> subprocess.Popen:
        assert command[1:3] == ["-m", "python_backends.cpu_engine.worker"]
        return subprocess.Popen([command[0], "-c", code, *command[3:]], **options)

    monkeypatch.setattr(
        "python_backends.cpu_engine.link.subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start})
    )


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
def test_greedy_texts_are_those_of_plain_decoding(triton_types, tiny_engine, engine, gaining_drafts, request):
    drafting_engine = request.getfixturevalue(engine)
    repeating = [5, 6, 7, 8] * 6
    requests = [
        (repeating, SamplingParams(top_k=1), Guide("ebnf_grammar", 'root ::= ("abc")* "d"')),
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
@given(st.lists(st.sampled_from([5, 6, 7, 8]), min_size=1, max_size=40))
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_plain_answers_tell_of_drafts_is_what_they_give(triton_types, drafting_engine, gaining_drafts, prompt):
    [made], listener = generated(drafting_engine, [(prompt, SamplingParams(top_k=1), None)])
    steps = [o.token_ids for report in listener.reports for o in report.outputs if o.id == 1 and o.token_ids]
    lookup = PromptLookup(np.array(prompt + made[:1]), SPECULATION["ngram_size"], SPECULATION["max_draft_len"])
    told = [accepted for accepted in map(lookup.add, made[1:]) if accepted is not None]
    assert len(steps) > 2 and told[: len(steps) - 2] == [len(step) - 1 for step in steps[1:-1]]


@pytest.mark.slow
def test_a_long_text_is_drafted_for_again_when_the_others_have_ended(
    triton_types, tiny_engine, drafting_engine, gaining_drafts
):
    requests = [([9, 9, 9, 9 + n], SamplingParams(top_k=1, log_probs=True), None) for n in range(UNDRAFTED_FROM + 1)]
    long = {1: 200}
    plain, undrafted = generated(tiny_engine, requests, len(requests), long)
    drafted, listener = generated(drafting_engine, requests, len(requests), long)
    assert drafted == plain and listener.log_probs == pytest.approx(undrafted.log_probs, abs=1e-4)
    alone = [report for report in listener.reports if [output.id for output in report.outputs] == [1]]
    assert sum(report.drafting for report in alone[-10:]) >= 8


@pytest.mark.slow
def test_sequences_go_over_to_plain_decoding_and_get_a_token_of_each_step(
    triton_types, tiny_engine, drafting_engine, gaining_drafts
):
    requests = [([9, 9, 9, 9 + n], SamplingParams(top_k=1), None) for n in range(UNDRAFTED_FROM + 1)]
    lengths = dict.fromkeys(range(1, len(requests) + 1), 90)  # four of them fit into the cache for drafts
    plain, _ = generated(tiny_engine, requests, len(requests), lengths)
    for _ in range(5):  # until the last one comes while the others run, which on a busy machine it may not
        drafted, listener = generated(drafting_engine, requests, len(requests), lengths, apart=True)
        assert drafted == plain
        reports = listener.reports
        until = next(n for n, report in enumerate(reports) if any(o.event.last for o in report.outputs))
        began = next(n for n, report in enumerate(reports) if any(o.id == len(requests) for o in report.outputs))
        if until - began > len(requests):
            break
    counts = [report.drafting for report in reports[:until]]
    assert max(counts) >= 2 and counts[-1] == 0
    # Several may go over in a step (test_worker.py). No stream waits for another one to be read again.
    for before, after in itertools.pairwise(reports[:until]):
        assert {o.id for o in before.outputs if o.token_ids} <= {o.id for o in after.outputs if o.token_ids}


@pytest.mark.slow
def test_an_engine_whose_second_pipeline_cannot_be_loaded_serves_without_drafts(
    triton_types, drafting_engine, tmp_path, monkeypatch
):
    folder = shutil.copytree(drafting_engine, tmp_path / "engine")
    table = json.loads((folder / "manifest.json").read_text())
    table["recipe"]["speculative_decoding"] = {"mode": "draft_model", "max_draft_len": 4}
    (folder / "manifest.json").write_text(json.dumps(table))  # and no folder draft/
    monkeypatch.setattr(f"{__name__}.begin_drafting", lambda link, listener: None)
    found, listener = generated(folder, [([5, 6, 7, 8], SamplingParams(top_k=1), None)] * 5)
    assert found == found[:1] * 5 and found[0]
    assert not any(report.drafting for report in listener.reports)


def test_nothing_drafts_until_the_pipeline_is_loaded_and_what_runs_then_goes_over_to_it():
    drafting = Drafting(LIMITS, 3)
    drafting.load_with(lambda: "pipeline")
    config = genai.GenerationConfig()
    assert not drafting.admit(command(1, max_tokens=100), config, running=0) and not config.num_assistant_tokens
    drafting.follow(command(1, max_tokens=100))
    drafting.observe(1, [7])
    drafting.observe(1, [8])
    assert not drafting.back() and drafting.pipeline is None
    drafting.load()
    assert drafting.pipeline == "pipeline"
    assert drafting.back().input_ids.tolist() == [*range(10), 7, 8]
    drafting.end(1)
    assert drafting.admit(command(2), config, running=0)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["drafting_engine", "draft_model_engine"])
def test_cancelled_and_moved_sequences_free_their_blocks(triton_types, engine, request):
    drafting_engine = request.getfixturevalue(engine)
    listener = Listener()
    link = WorkerLink(drafting_engine, listener)

    def add(id, max_tokens=100):
        link.send(AddSequence(id, np.arange(100) % 50, max_tokens, SamplingParams(top_k=1), frozenset()))

    try:
        listener.wait(lambda: listener.ready or listener.dead)
        begin_drafting(link, listener)
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


@contextmanager
def looping(engine_dir: Path, *commands: AddSequence) -> Iterator[tuple[Connection, Drafting, threading.Thread]]:
    """Run a step loop in this process, with its second pipeline loaded; all commands come before its first step."""
    manifest = manifests.load(engine_dir)
    drafting, limits = open_drafting(engine_dir, manifest), EngineLimits.from_manifest(manifest)
    ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
    scores = TopLogProbsModel(engine_dir / "openvino_model.xml", manifest.properties)
    blocks = PartialBlocks(limits.kv_cache_blocks)
    loop = StepLoop(open_pipeline(engine_dir, manifest), scores, theirs, drafting, blocks, None)

    def run() -> None:
        with suppress(EOFError):
            loop.run()

    drafting.load()
    drafting.load = None
    for one in commands:
        ours.send(one)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ours, drafting, thread
    finally:
        ours.close()
        thread.join()


def reports_until_all_ended(connection: Connection, count: int) -> list[StepReport]:
    reports = []
    while sum(output.event.last for report in reports for output in report.outputs) < count:
        assert connection.poll(60)
        reports.append(connection.recv())
    return reports


@pytest.mark.slow
def test_several_are_drafted_for_again_one_in_a_step(triton_types, tiny_engine, drafting_engine, monkeypatch):
    monkeypatch.setattr("python_backends.cpu_engine.draft_length.DraftLength.speedup", lambda self, sequences: 2.0)
    requests = [([9, 9, 9, 9 + n], SamplingParams(top_k=1), None) for n in range(UNDRAFTED_FROM + 1)]
    long = RESUME_UP_TO + 1
    lengths = {id: 84 if id <= long else 20 for id in range(1, len(requests) + 1)}  # the cache for drafts takes three
    plain, _ = generated(tiny_engine, requests, len(requests), lengths)
    commands = [
        AddSequence(id, np.array(prompt, np.int64), lengths[id], sampling, frozenset({256}))
        for id, (prompt, sampling, _) in enumerate(requests, 1)
    ]
    with looping(drafting_engine, *commands) as (connection, *_):
        reports = reports_until_all_ended(connection, len(commands))
    made = [o for report in reports for o in report.outputs]
    assert [[token for o in made if o.id == id for token in o.token_ids] for id in lengths] == plain
    counts = [report.drafting for report in reports]
    assert max(counts) == long and not any(counts[:30])
    rise = counts[: counts.index(long) + 1]
    assert all(0 <= after - before <= 1 for before, after in itertools.pairwise(rise))
    # No stream waits for another one to be read again.
    for report in reports[len(rise) - long : len(rise)]:
        assert {o.id for o in report.outputs if o.token_ids} == set(range(1, long + 1))


@pytest.mark.slow
def test_an_idle_engine_times_its_steps_and_then_generates_as_before(triton_types, tiny_engine, drafting_engine):
    request = AddSequence(1, np.zeros(BLOCK_TOKENS + 1, np.int64), 40, SamplingParams(top_k=1), frozenset())
    (plain,), _ = generated(tiny_engine, [(request.input_ids, request.sampling, None)], lengths={1: 40})
    with looping(drafting_engine) as (connection, drafting, thread):
        while drafting.learns:
            assert thread.is_alive() and not connection.poll(0.1)
        connection.send(request)
        outputs = [output for report in reports_until_all_ended(connection, 1) for output in report.outputs]
    assert [token for output in outputs for token in output.token_ids] == plain


# --- prompt lookup ----


def looked_up(ids: list[int], ngram_size: int, length: int) -> list[int]:
    for size in range(ngram_size, 0, -1):
        for end in range(size, len(ids) - size + 1):
            if ids[end - size : end] == ids[-size:]:
                return ids[end : end + length]
    return []


def accepted(prompt: list[int], made: list[int], ngram_size: int, length: int) -> list[int]:
    """Return what each step that verifies drafts accepts, of an answer whose first token made no step."""
    ids, left, counts = prompt + made[:1], made[1:], []
    while left:
        count = 0
        for draft, token in zip(looked_up(ids, ngram_size, length), left, strict=False):
            if draft != token:
                break
            count += 1
        if count == len(left):  # it may accept further ones
            break
        counts.append(count)
        ids, left = ids + left[: count + 1], left[count + 1 :]
    return counts


LOOKED_UP = st.integers(0, 3) | st.integers(0, 200_000)


@given(
    st.lists(LOOKED_UP, min_size=1, max_size=30), st.lists(LOOKED_UP, min_size=1), st.integers(1, 4), st.integers(1, 8)
)
def test_it_counts_what_steps_would_have_accepted(prompt, made, ngram_size, length):
    lookup = PromptLookup(np.array(prompt + made[:1]), ngram_size, length)
    counts = [count for count in map(lookup.add, made[1:]) if count is not None]
    assert counts == accepted(prompt, made, ngram_size, length)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3), min_size=1))
def test_the_first_id_of_a_prompt_under_an_adapter_is_like_no_other(prompt, made):
    marked = int(AdapterIds(tuple("abcdefgh"), 151_936, -1).mark(np.array([9707]), 8)[0])
    assert marked == 1_225_259 > sys.maxunicode
    lookup = PromptLookup(np.array([marked, *prompt, *made[:1]]), 3, 8)
    counts = [count for count in map(lookup.add, made[1:]) if count is not None]
    assert counts == accepted([marked, *prompt], made, 3, 8)
