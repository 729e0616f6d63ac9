"""The worker as a real process around a real pipeline, and what it makes of sampling parameters."""

import contextlib
import dataclasses
import itertools
import re
import shutil
import threading
import time
from collections import Counter
from types import SimpleNamespace
from weakref import WeakSet

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract import manifest as manifests
from contract.generation import Guide, SamplingParams
from contract.scheduling import BLOCK_TOKENS
from python_backends.cpu_engine import top_log_probs
from python_backends.cpu_engine.drafting import TIMED_STEPS
from python_backends.cpu_engine.link import WorkerLink
from python_backends.cpu_engine.prefix_cache import PartialBlocks
from python_backends.cpu_engine.step_budget import StepBudget
from python_backends.cpu_engine.top_log_probs import TopLogProbsModel
from python_backends.cpu_engine.worker import StepLoop, fold_seed, generation_config, open_pipeline
from python_backends.ensemble.token_increment import StreamEvent
from python_backends.ensemble.worker_messages import AddSequence, EndSequence
from python_backends.limits import EngineLimits
from tests.python_backends.cpu_engine.test_drafting import LIMITS, ready
from tests.python_backends.cpu_engine.test_prefix_cache import Schedule, sequence, undisturbed
from tests.python_backends.cpu_engine.test_step_budget import OneBlock

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(top_k=1, log_probs=True)
END = 256
VOCABULARY = 331


class Worker:
    """A worker's link with everything it said, gathered per sequence."""

    def __init__(self, engine_dir):
        self._changed = threading.Condition()
        self.ready, self.deaths, self.reports = False, [], []
        self.next_id = 0
        self.link = WorkerLink(engine_dir, self)

    def on_ready(self):
        with self._changed:
            self.ready = True
            self._changed.notify_all()

    def on_report(self, report):
        with self._changed:
            self.reports.append(report)
            self._changed.notify_all()

    def on_death(self, reason):
        with self._changed:
            self.deaths.append(reason)
            self._changed.notify_all()

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, timeout=30), (self.deaths, self.reports[-3:])

    def add(self, prompt, max_tokens, sampling=GREEDY, stop_ids=frozenset({END}), guide=None):
        self.next_id += 1
        ids = np.array(prompt, np.int64)
        self.link.send(AddSequence(self.next_id, ids, max_tokens, sampling, frozenset(stop_ids), guide=guide))
        return self.next_id

    def outputs(self, id):
        return [output for report in self.reports for output in report.outputs if output.id == id]

    def ended(self, id):
        outputs = self.outputs(id)
        return bool(outputs) and outputs[-1].event.last

    def result(self, id):
        """(ids, log_probs, event) of a sequence, once it has ended."""
        self.wait(lambda: self.ended(id))
        outputs = self.outputs(id)
        assert [output.event.last for output in outputs] == [False] * (len(outputs) - 1) + [True]
        ids = [token for output in outputs for token in output.token_ids]
        return ids, [value for output in outputs for value in output.log_probs], outputs[-1].event

    def generate(self, *request, **options):
        return self.result(self.add(*request, **options))


@pytest.fixture(scope="module")
def worker(triton_types, tiny_engine):
    worker = Worker(tiny_engine)
    worker.wait(lambda: worker.ready or worker.deaths)
    assert worker.ready, worker.deaths
    yield worker
    worker.link.close()
    worker.wait(lambda: worker.deaths)


@pytest.fixture(scope="module")
def direct(tiny_engine):
    """``direct(prompt, max_tokens, sampling, stop_ids)``: ids from the pipeline called without any of our machinery."""
    pipeline = open_pipeline(tiny_engine, manifests.load(tiny_engine))
    numbers = iter(range(1_000_000))

    def generate(prompt, max_tokens, sampling=GREEDY, stop_ids=frozenset({END})):
        config = generation_config(max_tokens, sampling, frozenset(stop_ids))
        handle = pipeline.add_request(next(numbers), ov.Tensor(np.array([prompt], np.int64)), config)
        ids = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            while handle.can_read():
                for output in handle.read().values():
                    ids += output.generated_ids
        return ids

    return generate


@pytest.fixture(scope="module")
def prompts():
    chance = np.random.default_rng(3)
    return [chance.integers(0, VOCABULARY, size).tolist() for size in (1, 5, 31, 32, 33, 100)]


def test_greedy_tokens_are_the_pipelines_own(worker, direct, prompts):
    for prompt in prompts:
        ids, log_probs, event = worker.generate(prompt, 20)
        assert ids == direct(prompt, 20)
        assert event is (StreamEvent.STOP if ids[-1] == END else StreamEvent.LENGTH)
        assert len(log_probs) == len(ids) and all(value <= 0 for value in log_probs)
    for sampling in (SamplingParams(top_k=1), SamplingParams(temperature=1e-39), SamplingParams(seed=3)):
        found, none, _ = worker.generate(prompt, 20, sampling=sampling)
        assert not none  # nobody asked for them
        assert sampling.seed or found == ids


SCORED = dataclasses.replace(GREEDY, prompt_log_probs=True, top_log_probs=2)


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompts_log_probabilities_come_before_its_first_token(worker, prompts, max_tokens):
    for sampling in (SCORED, dataclasses.replace(SCORED, top_log_probs=0)):
        for prompt in [prompts[0], prompts[-1] * 2]:
            id = worker.add(prompt, max_tokens, sampling)
            ids, log_probs, event = worker.result(id)
            first = worker.outputs(id)[0]
            assert not first.token_ids and first.prompt_log_probs[0] == 0 and len(first.prompt_log_probs) == len(prompt)
            assert all(value < 0 for value in first.prompt_log_probs[1:])
            assert len(first.prompt_top_log_probs) == (len(prompt) if sampling.top_log_probs else 0)
            assert ids == (worker.generate(prompt, max_tokens)[0] if max_tokens else [])
            assert len(log_probs) == len(ids) and event in (StreamEvent.LENGTH, StreamEvent.STOP)
            assert not any(output.prompt_log_probs for output in worker.outputs(id)[1:])


def test_a_prompt_that_is_scored_holds_nobody_up_and_can_be_cancelled(worker, prompts):
    running = worker.add(prompts[1], 60, stop_ids=())
    scored = [worker.add(prompts[-1] * 2, 5, SCORED) for _ in range(4)]
    worker.link.send(EndSequence(scored[2]))
    worker.link.send(EndSequence(scored[0]))
    assert len(worker.result(running)[0]) == 60
    events = [worker.result(id)[2] for id in scored]
    assert events[2] is StreamEvent.CANCELLED and StreamEvent.CANCELLED not in (events[1], events[3])
    alone = worker.add(prompts[-1] * 2, 0, SCORED)
    worker.link.send(EndSequence(alone))  # with nothing else to step
    assert worker.result(alone)[2] in (StreamEvent.CANCELLED, StreamEvent.LENGTH)


def test_sequences_run_together_and_get_what_they_get_alone(worker, direct, prompts):
    alone = [direct(prompt, 25) for prompt in prompts]
    for _ in range(20):  # a test that is kept from a core adds them too late to meet; then it tries again
        before = len(worker.reports)
        ids = [worker.add(prompt, 25) for prompt in prompts]
        assert [worker.result(id)[0] for id in ids] == alone
        if max(report.scheduled for report in worker.reports[before:]) == len(prompts):
            return
    pytest.fail("they never ran together")


def test_one_that_comes_later_gets_its_first_token_before_the_first_one_ends(worker):
    # The test may be kept from a core while the worker is not, so that it comes too late to be second: it tries again.
    for _ in range(10):
        first = worker.add([1, 2, 3], 200, stop_ids=())
        worker.wait(lambda first=first: worker.outputs(first))
        second = worker.add([4, 5, 6], 3, stop_ids=())
        assert len(worker.result(second)[0]) == 3
        assert len(worker.result(first)[0]) == 200
        order = [output.id for report in worker.reports for output in report.outputs if output.id in (first, second)]
        if order.index(second) < len(order) - 1 and order[-1] == first:
            return
    pytest.fail("the second never ran beside the first")


def test_long_prompts_beside_running_sequences_are_read_in_pieces_and_their_texts_are_the_same(worker, direct):
    chance = np.random.default_rng(11)
    shared = chance.integers(0, VOCABULARY, 70).tolist()
    prompts = [shared + chance.integers(0, VOCABULARY, size).tolist() for size in (1, 26, 100, 130)]
    alone = [direct(prompt, 10, stop_ids=()) for prompt in prompts]
    # The test may be kept from a core while the worker is not, so that what is to meet does not: it tries again.
    for _ in range(10):
        running = [worker.add([n], 120, stop_ids=()) for n in (1, 2)]
        worker.wait(lambda running=running: all(worker.outputs(id) for id in running))
        before = len(worker.reports)
        ids = [worker.add(prompt, 10, stop_ids=()) for prompt in prompts]
        gone = worker.add(shared[::-1] * 2, 60, stop_ids=())
        worker.link.send(EndSequence(gone))
        assert [worker.result(id)[0] for id in ids] == alone
        cancelled = worker.result(gone)[2] is StreamEvent.CANCELLED
        assert [len(worker.result(id)[0]) for id in running] == [120] * 2
        first = next(n for n, report in enumerate(worker.reports) if any(out.id == ids[-1] for out in report.outputs))
        beside = [out.id for report in worker.reports[before:first] for out in report.outputs]
        if cancelled and beside.count(running[0]) >= 4:  # 500 tokens to read, at most 64 in a step
            return
    pytest.fail(
        "the running sequences never got tokens while a prompt was read, or the one that was ended ran to its length"
    )


def test_a_stop_id_ends_a_sequence_and_is_its_last(worker, direct, prompts):
    free = direct(prompts[1], 20, stop_ids=())
    stop = free[7]
    ids, _, event = worker.generate(prompts[1], 20, stop_ids={stop, 3})
    assert (ids, event) == (free[: free.index(stop) + 1], StreamEvent.STOP)


def test_without_stop_ids_only_the_length_ends_it(worker):
    biased_to_end = worker.generate([END] * 5, 60, SamplingParams(temperature=5.0, seed=1), stop_ids=())
    assert len(biased_to_end[0]) == 60 and biased_to_end[2] is StreamEvent.LENGTH


def test_a_stop_id_as_the_last_token_allowed_is_a_stop(worker, direct, prompts):
    free = direct(prompts[2], 20, stop_ids=())
    length = free.index(free[5]) + 1
    assert worker.generate(prompts[2], length, stop_ids={free[5]})[2] is StreamEvent.STOP


def test_min_tokens_keeps_stop_ids_away_so_long(worker, direct, prompts):
    stop = direct(prompts[3], 20, stop_ids=())[1]
    ids, _, _ = worker.generate(prompts[3], 20, SamplingParams(top_k=1, min_tokens=10), stop_ids={stop})
    assert len(ids) >= 10 and stop not in ids[:9]
    assert len(worker.generate([1], 5, SamplingParams(top_k=1, min_tokens=100))[0]) == 5


def test_equal_seeds_give_equal_ids_and_others_do_not(worker):
    def sampled(seed):
        return worker.generate([1, 2, 3], 30, SamplingParams(temperature=2.0, seed=seed), stop_ids=())[0]

    texts = {seed: sampled(seed) for seed in (0, 1, 2**32 + 1, 2**63 + 1)}
    assert texts[1] == sampled(1)
    assert len({tuple(text) for text in texts.values()}) == len(texts)
    assert sampled(None) != sampled(None)


def test_an_ended_sequences_blocks_are_free_when_its_end_is_told(worker):
    for _ in range(3):
        running = [worker.add([n] * 100, 156, stop_ids=()) for n in range(4)]  # 4 x 8 blocks: all 32
        worker.wait(lambda running=running: all(worker.outputs(id) for id in running))
        for id in running[:2]:
            worker.link.send(EndSequence(id))
            # On a starved machine it may have come to its length before the word to end.
            assert worker.result(id)[2] in (StreamEvent.CANCELLED, StreamEvent.LENGTH)
        others = [worker.add([n] * 100, 156, stop_ids=()) for n in (7, 8)]  # they fit only into what was freed
        for id in running[2:] + others:
            ids, _, event = worker.result(id)
            assert (len(ids), event) == (156, StreamEvent.LENGTH)


def test_when_the_only_sequence_is_ended_the_pool_is_empty_without_another_request(worker):
    id = worker.add([1] * 50, 200, stop_ids=())
    worker.wait(lambda: worker.outputs(id))
    worker.link.send(EndSequence(id))
    worker.result(id)
    full = [worker.add([n] * 100, 156, stop_ids=()) for n in range(4)]
    assert [len(worker.result(id)[0]) for id in full] == [156] * 4


def test_a_sequence_that_held_the_whole_pool_leaves_it_to_the_next_one(triton_types, tiny_engine, tmp_path):
    small = tmp_path / "small"
    shutil.copytree(tiny_engine, small)
    dataclasses.replace(manifests.load(tiny_engine), kv_cache_tokens=256).save(small)
    worker = Worker(small)
    for token in range(3):
        id = worker.add([token] * 240, 16, stop_ids=())
        worker.wait(lambda id=id: worker.outputs(id))
        worker.link.send(EndSequence(id))
        worker.result(id)
        ids, _, event = worker.generate([token + 100] * 240, 16, stop_ids=())
        assert (len(ids), event) == (16, StreamEvent.LENGTH)
    worker.link.close()
    worker.wait(lambda: worker.deaths)


@pytest.mark.parametrize("others", [0, 2])
def test_a_sequence_ended_before_its_first_step_harms_no_other(worker, others):
    for _ in range(20):  # on a starved machine the sequence may end by itself before the word reaches it
        running = [worker.add([n] * 60, 100, stop_ids=()) for n in range(others)]
        id = worker.add([9] * 90, 100, stop_ids=())
        worker.link.send(EndSequence(id))
        event = worker.result(id)[2]
        assert [len(worker.result(id)[0]) for id in running] == [100] * others
        if event is StreamEvent.CANCELLED:
            return
    pytest.fail("no sequence was ever ended")


def test_ending_what_is_not_there_is_nothing(worker):
    id = worker.add([1], 3, stop_ids=())
    worker.result(id)
    for unknown in (id, 10**9):
        worker.link.send(EndSequence(unknown))
    assert len(worker.generate([1], 3, stop_ids=())[0]) == 3


def test_a_request_the_pipeline_rejects_is_told_in_one_line_and_harms_no_other(worker):
    running = worker.add([1, 2], 50, stop_ids=())
    id = worker.add([], 5)
    worker.wait(lambda: worker.ended(id))
    [output] = worker.outputs(id)
    assert output.event is StreamEvent.ERROR and output.error and "\n" not in output.error
    assert len(worker.result(running)[0]) == 50


def test_steps_tell_their_load(worker):
    before = len(worker.reports)
    prompt = np.random.default_rng(8).integers(0, VOCABULARY, 200)  # 64 tokens per step: four steps until the first one
    worker.generate(prompt, 20, stop_ids=())
    reports = [report for report in worker.reports[before:] if report.end_ns]
    assert all(report.start_ns <= report.end_ns for report in reports)
    assert [report.context_tokens for report in reports[:3]] == [200] * 3 and reports[-1].context_tokens == 0
    assert 0 < max(report.cache_usage for report in reports) <= 1


def test_top_log_probs_agree_with_the_chosen_ones(worker):
    asked = SamplingParams(top_k=1, log_probs=True, top_log_probs=5)
    id = worker.add([1, 2, 3], 12, asked, stop_ids=())
    ids, log_probs, _ = worker.result(id)
    plain_ids, plain_log_probs, _ = worker.generate([1, 2, 3], 12, stop_ids=())
    top = [entry for output in worker.outputs(id) for entry in output.top_log_probs]
    assert ids == plain_ids and len(top) == 12
    np.testing.assert_allclose(log_probs, plain_log_probs, atol=1e-3)
    for token, value, entry in zip(ids, log_probs, top, strict=True):
        assert entry.ids[0] == token and entry.log_probs[0] == value  # greedy takes the likeliest
        assert entry.log_probs == sorted(entry.log_probs, reverse=True) and len(set(entry.ids)) == 5


def test_the_prompts_of_top_log_probs_are_read_a_chunk_in_a_step(triton_types, tiny_engine, monkeypatch):
    prompt, sampling = np.arange(240), SamplingParams(top_k=1, top_log_probs=2)
    scored = [AddSequence(id, prompt, 4, sampling, frozenset()) for id in (2, 3)]
    steps = iter([[sequence(1, [5, 6], 60)], scored])
    schedule, fed, logits = (
        Schedule(lambda schedule: next(steps, None)),
        Counter(),
        top_log_probs.ScoredSequence._logits,
    )

    def counted(self, feed):
        fed[len(schedule.reports)] += feed.size
        return logits(self, feed)

    monkeypatch.setattr(top_log_probs.ScoredSequence, "_logits", counted)
    schedule.run(tiny_engine)
    assert 32 <= max(fed.values()) < 44 and sum(fed.values()) >= 2 * prompt.size
    assert schedule.generated[2] == schedule.generated[3] == undisturbed(tiny_engine, prompt, 4)
    assert not any(output.prompt_log_probs for report in schedule.reports for output in report.outputs)


def test_the_second_model_reads_no_more_than_eight_sequences_at_once(triton_types, tiny_engine, monkeypatch):
    sampling, prompts = SamplingParams(top_k=1, top_log_probs=1), [np.arange(id, 60 + id) for id in range(12)]
    steps = iter([[AddSequence(id, prompts[id], 20, sampling, frozenset()) for id in range(12)], [EndSequence(0)]])
    schedule, opened, alive, sizes = Schedule(lambda schedule: next(steps, None)), TopLogProbsModel.open, WeakSet(), []

    def counted(self, *arguments):
        scored = opened(self, *arguments)
        alive.add(scored)
        sizes.append(len(alive))
        return scored

    monkeypatch.setattr(TopLogProbsModel, "open", counted)
    schedule.run(tiny_engine)
    assert len(sizes) == 12 and max(sizes) == 8
    assert all(schedule.generated[id] == undisturbed(tiny_engine, prompts[id], 20) for id in range(1, 12))


# ---- sampling parameters --------------------------------------------------------------------------------------------


def test_greedy_is_a_switch_and_not_a_small_temperature():
    for sampling in (SamplingParams(temperature=0.0), SamplingParams(top_k=1, temperature=3.0)):
        config = generation_config(7, sampling, frozenset({END}))
        assert not config.do_sample and config.max_new_tokens == 7


def test_every_sampling_value_reaches_its_field():
    sampling = SamplingParams(
        temperature=0.5,
        top_k=9,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=77,
        min_tokens=3,
        log_probs=True,
    )
    config = generation_config(7, sampling, frozenset({5, END}))
    assert config.do_sample
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (0.5, 9, 0.25, 0.125)
    assert (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) == (1.5, 0.5, -0.5)
    assert (config.rng_seed, config.min_new_tokens, config.logprobs) == (77, 3, 1)
    assert set(config.stop_token_ids) == {5, END} and config.eos_token_id in (5, END) and not config.ignore_eos


def test_neutral_values_are_the_librarys_own_defaults():
    config, plain = generation_config(7, SamplingParams(), frozenset()), genai.GenerationConfig()
    for name in (
        "temperature",
        "top_k",
        "top_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logprobs",
    ):
        assert getattr(config, name) == getattr(plain, name), name
    assert config.ignore_eos and config.min_new_tokens == 0


def test_seeds_that_differ_only_above_32_bits_differ_still():
    for low in (0, 1, 2**32 - 1):
        assert len({fold_seed(low + (high << 32)) for high in (0, 1, 2, 2**31, 2**32 - 1)}) == 5
    assert all(0 <= fold_seed(seed) < 2**32 for seed in (0, 2**64 - 1, 12345678901234567890))


float32 = {"width": 32, "allow_nan": False}


@settings(max_examples=50)
@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 100, **float32),
        top_k=st.integers(0, 2**31 - 1),
        top_p=st.floats(0, 1, exclude_min=True, **float32),
        min_p=st.floats(0, 1, exclude_max=True, **float32),
        repetition_penalty=st.floats(0, 100, exclude_min=True, **float32),
        presence_penalty=st.floats(-2, 2, **float32),
        frequency_penalty=st.floats(-2, 2, **float32),
        seed=st.none() | st.integers(0, 2**64 - 1),
        min_tokens=st.integers(0, 2**31 - 1),
        log_probs=st.booleans(),
    ),
    st.frozensets(st.integers(0, VOCABULARY - 1), max_size=4),
)
def test_whatever_is_accepted_the_pipeline_lives_through(worker, sampling, stop_ids):
    ids, log_probs, event = worker.generate([1, 2, 3], 4, sampling.validate(), stop_ids=stop_ids)
    assert event in (StreamEvent.STOP, StreamEvent.LENGTH) and 1 <= len(ids) <= 4
    assert all(0 <= token < VOCABULARY for token in ids) and len(log_probs) == len(ids) * sampling.log_probs
    assert not worker.deaths


def test_the_pool_is_as_large_as_the_limits_say(tiny_engine):
    assert EngineLimits.from_manifest(manifests.load(tiny_engine)).kv_cache_blocks == 32


def test_guided_and_free_sequences_share_a_batch(worker, direct, prompts):
    alphabet = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))  # ids are places in it

    def text(ids):
        return "".join(chr(alphabet[token]) for token in ids if token < len(alphabet))

    hot = SamplingParams(temperature=3.0)
    guides = [
        Guide("ebnf_grammar", 'root ::= [0-9]{3} "-" [a-f]{4}'),
        Guide("ebnf_grammar", 'root ::= "yes" | "no"'),
        None,
    ] * 2
    ids = [worker.add(prompts[2], 20, GREEDY if guide is None else hot, guide=guide) for guide in guides]
    results = [worker.result(id) for id in ids]
    for place, pattern in enumerate(["[0-9]{3}-[a-f]{4}", "yes|no"]):
        for written, _, event in (results[place], results[place + 3]):
            assert re.fullmatch(pattern, text(written)), text(written)
            assert written[-1] == END and event is StreamEvent.STOP
    assert results[2][0] == results[5][0] == direct(prompts[2], 20)


# ---- steps ----------------------------------------------------------------------------------------------------------


def begun(schedule):
    """(report, tokens found in the prefix cache) of the first report that has a sequence as begun, by sequence."""
    found = {}
    for nth, report in enumerate(schedule.reports):
        for id, cached in report.begun.items():
            found.setdefault(id, (nth, cached))
    return found


def first_tokens(schedule):
    """The report with the first token of each sequence."""
    found = {}
    for nth, report in enumerate(schedule.reports):
        for output in report.outputs:
            if output.token_ids:
                found.setdefault(output.id, nth)
    return found


def test_a_sequence_is_reported_in_the_first_step_that_reads_of_its_prompt(triton_types, tiny_engine):
    long, short = [7 * n % 256 for n in range(100)], [5 * n % 256 for n in range(30)]
    steps = iter([[sequence(1, long, 4)], [], [sequence(2, short, 4)]])
    schedule = Schedule(lambda schedule: next(steps, None)).run(tiny_engine, OneBlock(short=64))
    assert begun(schedule) == {1: (0, 0), 2: (2, 0)}
    assert first_tokens(schedule) == {1: 3, 2: 2}


def test_prompts_that_begin_alike_and_come_together_are_read_once(triton_types, tiny_engine):
    """The pipeline computed the blocks for each of them, in steps far longer than the budget counted."""
    prompt = [7 * n % 256 for n in range(100)]
    other = prompt[:70] + [1] * 20
    sent = [*(sequence(id, prompt, 4) for id in (1, 2, 3)), sequence(4, other, 4)]
    steps, budget = iter([sent]), OneBlock(short=64)
    schedule = Schedule(lambda schedule: next(steps, None)).run(tiny_engine, budget)
    for id in (1, 2, 3, 4):
        assert schedule.generated[id] == undisturbed(tiny_engine, prompt if id < 4 else other, 4)
    found, first = begun(schedule), first_tokens(schedule)
    assert {id: cached for id, (_, cached) in found.items()} == {1: 0, 2: 96, 3: 96, 4: 64}
    assert found[2][0] == found[3][0] == first[1] + 1  # it finds what the first has read
    assert found[4][0] == 2 < first[1]  # as soon as it has read the blocks that both have
    assert sum(tokens for tokens, _ in budget.read) == 100 + 2 * 4 + 26


def test_when_the_first_of_equal_prompts_is_cancelled_the_second_goes_on_where_it_was(triton_types, tiny_engine):
    prompt = [7 * n % 256 for n in range(100)]
    steps = iter([[sequence(id, prompt, 4) for id in (1, 2, 3)], [], [EndSequence(1)]])
    budget = OneBlock(short=64)
    schedule = Schedule(lambda schedule: next(steps, None)).run(tiny_engine, budget)
    assert not schedule.generated[1]
    assert schedule.generated[2] == schedule.generated[3] == undisturbed(tiny_engine, prompt, 4)
    assert {id: cached for id, (_, cached) in begun(schedule).items()} == {1: 0, 2: 64, 3: 96}
    assert sum(tokens for tokens, _ in budget.read) == 100 + 4


class Handle:
    """A sequence of SlowPipeline."""

    def __init__(self, prompt_tokens, max_tokens):
        self.unread, self.left, self.made = prompt_tokens, max_tokens, []

    def can_read(self):
        return bool(self.made)

    def read(self):
        made, self.made = self.made, []
        finish = genai.GenerationFinishReason.NONE if self.left else genai.GenerationFinishReason.LENGTH
        return {0: SimpleNamespace(generated_ids=made, generated_log_probs=[], finish_reason=finish)}

    def get_status(self):
        return genai.GenerationStatus.RUNNING if self.left else genai.GenerationStatus.FINISHED

    def cancel(self):
        self.left = 0


class SlowPipeline:
    """Reads a block of each prompt in a step, and then makes a token of each."""

    def __init__(self):
        self._handles = []

    def add_request(self, id, ids, config):
        self._handles.append(Handle(ids.shape[1], config.max_new_tokens))
        return self._handles[-1]

    def step(self):
        for handle in self._handles:
            handle.unread -= BLOCK_TOKENS
            if handle.unread <= 0 and handle.left:
                handle.made.append(7)
                handle.left -= 1

    def get_metrics(self):
        return SimpleNamespace(scheduled_requests=len(self._handles), cache_usage=0.0)


def test_a_piece_is_read_on_while_a_prompt_that_drafting_admits_is_kept_apart_from_it():
    """The steps that it waited for stepped the pipeline that drafts alone, without end."""

    class Reports(Schedule):
        def send(self, report):
            super().send(report)
            assert len(self.reports) < 50

    text = list(range(40))
    long, other = text + [1] * 400, text + [2] * 10
    more = LIMITS.draft_pool_blocks * BLOCK_TOKENS  # than the cache for drafts takes
    steps = iter([[sequence(1, text, 1)], [], [sequence(2, long, more)], [EndSequence(2), sequence(3, other, 8)]])
    schedule = Reports(lambda schedule: next(steps, None))
    drafting = ready(LIMITS, SlowPipeline())
    scores = SimpleNamespace(close=lambda id: None, score=lambda id, token_ids: ([], []))
    loop = StepLoop(SlowPipeline(), scores, schedule, drafting, PartialBlocks(64), StepBudget(512))
    with contextlib.suppress(EOFError):
        loop.run()
    assert schedule.generated == {1: [7], 2: [], 3: [7] * 8}


def test_steps_of_an_idle_engine_are_timed_by_their_cpu_time(monkeypatch):
    """Other processes hardly change it: by the clock steps took 2 to 5 times as long beside servers that started."""
    seconds, timed = itertools.count(), []
    monkeypatch.setattr(time, "process_time", lambda: next(seconds))
    drafting = ready(LIMITS, SlowPipeline())
    monkeypatch.setattr(drafting, "timed", lambda sequences, taken_s, **kind: timed.append((sequences, taken_s, kind)))
    idle = Schedule(lambda schedule: [])
    loop = StepLoop(SlowPipeline(), SimpleNamespace(), idle, drafting, PartialBlocks(64), StepBudget(512))
    loop._time_steps(2, drafts=False)
    assert timed == [(2, 1, {"drafts": False, "idle": True})] * TIMED_STEPS


class FullSteps(SlowPipeline):
    """Reads so many prompt tokens in a step, of one prompt after the other."""

    def __init__(self, tokens):
        super().__init__()
        self._tokens = tokens

    def step(self):
        room = self._tokens
        for handle in self._handles:
            read = min(room, max(0, handle.unread)) if handle.left else 0
            handle.unread -= read
            room -= read
            if handle.unread <= 0 and handle.left:
                handle.made.append(7)
                handle.left -= 1


@pytest.mark.parametrize(("prompt", "together"), [(40, 2), (100, 1)])
def test_sequences_that_were_drafted_for_are_read_before_the_prompts_of_a_burst(prompt, together):
    """They were read after all of them: their streams stopped for as long as those took. Of several, as many go over
    in a step as it may read the tokens of."""
    drafted, burst = range(1, 4), range(4, 14)
    sent = [[sequence(id, [id] * prompt, 60) for id in drafted], [], [], [sequence(id, [id] * 100, 20) for id in burst]]
    steps = iter(sent)
    schedule = Schedule(lambda schedule: next(steps, None))
    scores = SimpleNamespace(close=lambda id: None, score=lambda id, token_ids: ([], []))
    limits = dataclasses.replace(LIMITS, kv_cache_blocks=16 * LIMITS.kv_cache_blocks)
    loop = StepLoop(FullSteps(128), scores, schedule, ready(limits, FullSteps(512)), PartialBlocks(64), StepBudget(128))
    with contextlib.suppress(EOFError):
        loop.run()
    assert [len(schedule.generated[id]) for id in (*drafted, *burst)] == [60] * 3 + [20] * 10
    counts = [report.drafting for report in schedule.reports]
    falls = [before - after for before, after in itertools.pairwise(counts) if before != after and before]
    assert max(counts) == 3 and falls[0] == together
    for id in drafted:
        with_token = [n for n, report in enumerate(schedule.reports) if any(o.id == id for o in report.outputs)]
        assert max(after - before for before, after in itertools.pairwise(with_token)) <= 2


# ---- the pipelines of an engine folder -------------------------------------------------------------------------------


def steps_to_first_token(engine_dir, manifest, prompt):
    pipeline = open_pipeline(engine_dir, manifest)
    config = generation_config(5, SamplingParams(top_k=1), frozenset())
    handle = pipeline.add_request(0, ov.Tensor(np.array([prompt], np.int64)), config)
    steps = 0
    while not handle.can_read():
        pipeline.step()
        steps += 1
    return steps


@pytest.fixture
def manifest(tiny_engine):
    return manifests.load(tiny_engine)


@pytest.mark.slow
def test_a_long_prompt_is_read_in_pieces_of_max_num_tokens(tiny_engine, manifest):
    assert manifest.max_num_tokens == 64
    assert steps_to_first_token(tiny_engine, manifest, range(200)) == 4


def test_without_chunked_context_a_prompt_is_read_in_one_step_or_not_at_all(tiny_engine, manifest):
    whole = dataclasses.replace(manifest, recipe=manifest.recipe | {"chunked_context": False})
    assert steps_to_first_token(tiny_engine, whole, range(60)) == 1
    with pytest.raises(RuntimeError):
        steps_to_first_token(tiny_engine, whole, range(200))
