"""Prompts that OpenVINO GenAI's prefix cache would mix up never start in the same step."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import manifest as manifests
from contract.generation import SamplingParams
from contract.scheduling import BLOCK_TOKENS
from python_backends.cpu_engine.prefix_cache import PartialBlocks, PrefixCacheEstimate
from python_backends.cpu_engine.step_budget import StepBudget
from python_backends.cpu_engine.top_log_probs import TopLogProbsModel
from python_backends.cpu_engine.worker import StepLoop, open_drafting, open_pipeline
from python_backends.ensemble.worker_messages import AddSequence, EndSequence, StepReport
from python_backends.limits import EngineLimits
from tests.python_backends.cpu_engine.test_drafting import Listener, WorkerLink, ended

ids_of = st.lists(st.integers(0, 1), max_size=3 * BLOCK_TOKENS).map(lambda found: np.array(found, np.int64))
numbers = count(1)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def add(blocks: PartialBlocks, *values: int) -> int:
    """Add a sequence; return its id, 0 if it has to wait."""
    id = next(numbers)
    return id if blocks.add(id, ids(*values)) else 0


def ended_texts(blocks: PartialBlocks, *texts: np.ndarray) -> None:
    for text in texts:
        id = next(numbers)
        while not blocks.add(id, text):
            raise AssertionError("texts that ended one after the other do not wait")
        blocks.end(id)


def test_two_continuations_of_a_text_start_one_after_the_other_and_equal_prompts_together():
    blocks = PartialBlocks(100)
    first, second = add(blocks, 1, 2, 3), add(blocks, 1, 2, 4)
    assert first and second  # nothing is cached
    blocks.end(first), blocks.end(second)
    ended_texts(blocks, ids(1, 2))
    first = add(blocks, 1, 2, 3)
    assert first and add(blocks, 1, 2, 3) and add(blocks, 1, 5)
    assert not add(blocks, 1, 2, 4) and not add(blocks, 1, 2)


def test_a_prompt_waits_for_the_first_token_of_the_other_and_not_for_a_step():
    """Found by chaos: prompts with more tokens than a step reads start some steps after they were added."""
    blocks = PartialBlocks(100)
    ended_texts(blocks, ids(1, 2))
    first = add(blocks, 1, 2, 3)
    blocks.generated(first, [])
    assert blocks.starts(first) and not add(blocks, 1, 2, 4)
    blocks.generated(first, [9])
    assert not blocks.starts(first) and add(blocks, 1, 2, 4)
    whole = next(numbers)
    assert blocks.add(whole, ids(*range(BLOCK_TOKENS)))
    blocks.generated(whole, [9])
    assert blocks.starts(whole)  # the cache has its block under a part of it, until the next step
    blocks.generated(whole, [9])
    assert not blocks.starts(whole)


def test_continuations_of_what_a_running_sequence_has_computed_start_one_after_the_other():
    """Found by chaos: streams of one prompt that lost their replica went on at another one with wrong ids."""
    blocks = PartialBlocks(100)
    running = add(blocks, 1, 2)
    assert not add(blocks, 1, 2, 3)  # it would get a block that is not computed
    blocks.generated(running, [5])
    blocks.generated(running, [6])  # computed are 1, 2, 5
    first = add(blocks, 1, 2, 5, 6, 7)
    assert first and not add(blocks, 1, 2, 5, 6, 8) and add(blocks, 7, 2)
    blocks.generated(running, [7])
    assert not add(blocks, 1, 2, 5, 8)  # still under the text that the first one found
    blocks.generated(first, [1])
    assert add(blocks, 1, 2, 5, 8)


def test_only_so_many_texts_are_remembered():
    blocks = PartialBlocks(1)
    ended_texts(blocks, *(ids(number) for number in range(9)), ids(1))
    assert add(blocks, 0, 1) and add(blocks, 0, 2)
    assert add(blocks, 1, 1) and not add(blocks, 1, 2)
    none = PartialBlocks(0)
    ended_texts(none, ids(1))
    one = add(none, 1, 2)
    assert one and add(none, 1, 3) and not none.starts(one)


@given(st.lists(ids_of, max_size=4), ids_of, ids_of, ids_of)
def test_prompts_part_exactly_where_a_text_ends_in_the_block_in_which_they_begin_to_differ(texts, common, one, other):
    blocks = PartialBlocks(100)
    ended_texts(blocks, *texts)
    first, second = np.concatenate([common, one]), np.concatenate([common, other])
    blocks.add(1, first)
    shared = next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    shared = min(len(first), len(second)) if shared is None else shared
    mixed_up = not np.array_equal(first, second) and any(
        len(text) % BLOCK_TOKENS
        and shared // BLOCK_TOKENS * BLOCK_TOKENS < len(text) <= shared
        and np.array_equal(text, first[: len(text)])
        for text in (*texts, first)
    )
    assert blocks.add(2, second) is not mixed_up


class Schedule:
    """The connection of a StepLoop in this process: commands at exact steps.

    commands: returns what comes before the next step; None once all have been sent. generated: ids by sequence.
    """

    def __init__(self, commands: Callable[[Schedule], list | None]) -> None:
        self._commands, self._waiting = commands, None
        self.generated: dict[int, list[int]] = {}
        self.live: set[int] = set()
        self.reports: list[StepReport] = []

    def poll(self, timeout_s: float | None) -> bool:
        if self._waiting is None:
            self._waiting = self._commands(self)
            if self._waiting is None and not self.live:
                raise EOFError
            self._waiting = list(self._waiting or ())
        if self._waiting or timeout_s is None:
            return True
        self._waiting = None
        return False

    def recv(self):
        if not self._waiting:
            self._waiting = None
            return EndSequence(0)  # nothing to wait for: the next step has other commands
        command = self._waiting.pop(0)
        if isinstance(command, AddSequence):
            self.live.add(command.id)
            self.generated[command.id] = []
        return command

    def send(self, report) -> None:
        self.reports.append(report)
        for output in report.outputs:
            self.generated[output.id] += output.token_ids
            if output.event.last:
                self.live.discard(output.id)

    def run(self, folder, budget: StepBudget | None = None) -> Schedule:
        manifest = manifests.load(folder)
        pipeline, most = open_pipeline(folder, manifest), EngineLimits.from_manifest(manifest).kv_cache_blocks
        scores = TopLogProbsModel(folder / "openvino_model.xml", manifest.properties)
        drafting, budget = open_drafting(folder, manifest), budget or StepBudget(manifest.max_num_tokens)
        with contextlib.suppress(EOFError):
            StepLoop(pipeline, scores, self, drafting, PartialBlocks(most), budget).run()
        return self


def sequence(id: int, prompt: Sequence[int], tokens: int) -> AddSequence:
    return AddSequence(id, np.array(prompt, np.int64), tokens, SamplingParams(top_k=1), frozenset())


def undisturbed(folder, prompt: Sequence[int], tokens: int) -> list[int]:
    commands = iter([[sequence(1, prompt, tokens)]])
    return Schedule(lambda schedule: next(commands, None)).run(folder).generated[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", (7, 35, 38))
def test_continuations_that_come_and_leave_in_bursts_get_the_ids_of_the_whole_stream(triton_types, tiny_engine, seed):
    """Found by chaos: streams that moved to another replica together went on with wrong ids."""
    source, most = random.Random(seed), 128
    prompts = [[source.randrange(256) for _ in range(source.choice((17, 31, 33)))] for _ in range(2)]
    texts = [prompt + undisturbed(tiny_engine, prompt, most - len(prompt)) for prompt in prompts]
    expected: dict[int, list[int]] = {}

    def commands(schedule: Schedule) -> list | None:
        found: list = [EndSequence(id) for id in schedule.live if source.random() < 0.03]
        if len(expected) >= 150:
            return found if schedule.live else None
        for _ in range(source.choice((0, 0, 1, 8))):
            if len(schedule.live) + len(found) < 8:
                text = source.choice(texts)
                begun = source.randrange(33, most)
                id, tokens = len(expected) + 1, min(most - begun, source.choice((1, 4, 30)))
                expected[id] = text[begun : begun + tokens]
                found.append(sequence(id, text[:begun], tokens))
        return found

    generated = Schedule(commands).run(tiny_engine).generated
    wrong = {id: (found, expected[id]) for id, found in generated.items() if found != expected[id][: len(found)]}
    assert len(generated) >= 150 and wrong == {}


@pytest.mark.slow
def test_a_prompt_that_is_cancelled_while_it_is_read_leaves_no_block_that_was_not_computed(triton_types, tiny_engine):
    source = random.Random(1)
    prompt, filler = ([source.randrange(256) for _ in range(length)] for length in (60, 44))
    expected = undisturbed(tiny_engine, prompt, 16)
    steps = iter(
        [[sequence(1, filler, 2), sequence(2, prompt, 16)], [EndSequence(2)], *[[]] * 8, [sequence(3, prompt, 16)]]
    )
    assert Schedule(lambda schedule: next(steps, None)).run(tiny_engine).generated[3] == expected


@pytest.mark.slow
def test_a_sequence_that_leaves_before_the_step_in_which_it_came_is_ended(triton_types, tiny_engine):
    prompts = {id: [10 * id + nth for nth in range(20)] for id in (1, 2, 3)}
    steps = iter([[*(sequence(id, prompts[id], 6) for id in (1, 2)), EndSequence(2), sequence(3, prompts[3], 6)]])
    schedule = Schedule(lambda schedule: next(steps, None)).run(tiny_engine)
    assert not schedule.live and not schedule.generated[2]
    for id in (1, 3):
        assert schedule.generated[id] == undisturbed(tiny_engine, prompts[id], 6)


def generated(listener, sent):
    """Wait until all of ``sent`` have ended; return the ids of each."""
    listener.wait(lambda: ended(listener).issuperset(sent) or listener.dead)
    assert not listener.dead
    outputs = [o for report in listener.reports for o in report.outputs]
    return [[token for o in outputs if o.id == id for token in o.token_ids] for id in sent]


@contextlib.contextmanager
def worker(engine):
    """A worker that is ready, and what it says."""
    listener = Listener()
    link = WorkerLink(engine, listener)
    listener.wait(lambda: listener.ready or listener.dead)
    try:
        yield link, listener
    finally:
        link.close()
        listener.wait(lambda: listener.dead)


def send(link: WorkerLink, number: int, ids: list[int], most: int) -> None:
    link.send(AddSequence(number, np.array(ids, np.int64), most, SamplingParams(top_k=1), frozenset()))


def run(link: WorkerLink, listener: Listener, number: int, ids: list[int]) -> None:
    """Send a sequence of 200 tokens and wait for the first."""
    send(link, number, ids, 200)
    listener.wait(lambda: any(o.id == number for report in listener.reports for o in report.outputs))


def continued(link: WorkerLink, listener: Listener, prompts: dict[int, list[int]], at_once: bool) -> list[list[int]]:
    """Send 12 tokens of each prompt, together or one after the other; return what was generated."""
    for number, prompt in prompts.items():
        send(link, number, prompt, 12)
        if not at_once:
            listener.wait(lambda number=number: number in ended(listener) or listener.dead)
    return generated(listener, prompts)


@pytest.mark.slow
def test_continuations_of_one_text_sent_at_once_get_what_they_get_alone(triton_types, tiny_engine):
    text, tails = [7, 8, 9, 10, 11, 12], ([13, 14, 15], [16, 17], [18], [19, 20, 21, 22])

    def texts(at_once: bool) -> list[list[int]]:
        found = []
        with worker(tiny_engine) as (link, listener):
            for start in range(3):
                begun, first = [*text, start], 100 * start + 1
                send(link, first, begun, 3)
                listener.wait(lambda first=first: first in ended(listener) or listener.dead)
                begun += [token for r in listener.reports for o in r.outputs if o.id == first for token in o.token_ids]
                if at_once:  # beside a sequence that runs, so that all of them come during one step
                    run(link, listener, first + 1, [200 + start] * 40)
                prompts = {number: [*begun, *tail] for number, tail in enumerate(tails, first + 2)}
                found += continued(link, listener, prompts, at_once)
        return found

    assert texts(at_once=True) == texts(at_once=False)


@pytest.mark.slow
def test_continuations_of_a_prompt_that_runs_get_what_they_get_alone(triton_types, tiny_engine):
    tails = ([13, 14, 15], [16, 17], [18], [19, 20, 21, 22], [13, 14, 16, 17, 18])

    def texts(at_once: bool) -> list[list[int]]:
        found = []
        with worker(tiny_engine) as (link, listener):
            for start in range(4):
                begun, first = [7, 8, 9, 10, 11, 12, start], 100 * start + 1
                if at_once:
                    run(link, listener, first, begun)
                prompts = {number: [*begun, *tail] for number, tail in enumerate(tails, first + 1)}
                found += continued(link, listener, prompts, at_once)
        return found

    assert texts(at_once=True) == texts(at_once=False)


def test_the_cache_has_the_whole_blocks_with_which_both_prompts_begin_and_no_last_token():
    one, other = np.arange(3 * BLOCK_TOKENS), np.arange(2 * BLOCK_TOKENS + 1)
    assert PartialBlocks(1).shared(one, other) == PartialBlocks(1).shared(other, one) == 2 * BLOCK_TOKENS
    assert PartialBlocks(1).shared(one, one) == 2 * BLOCK_TOKENS
    assert PartialBlocks(1).shared(one, other[: 2 * BLOCK_TOKENS - 1]) == BLOCK_TOKENS
    assert PartialBlocks(1).shared(one, other[1:]) == PartialBlocks(0).shared(one, other) == 0


# ---- the estimate of what the cache holds ----------------------------------------------------------------------------


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=40).map(lambda ids: np.array(ids, np.int64))


def test_only_whole_blocks_count_and_the_last_token_is_always_computed():
    shadow = PrefixCacheEstimate(blocks=10, block_tokens=4)
    shadow.remember(ids(1, 2, 3, 4, 5, 6, 7, 8))
    assert shadow.cached_tokens(ids(1, 2, 3, 4, 5, 6, 7, 8)) == 4  # the second block ends with the last token
    assert shadow.cached_tokens(ids(1, 2, 3, 4, 5, 6, 7, 8, 9)) == 8
    assert shadow.cached_tokens(ids(1, 2, 3)) == 0


def test_a_block_counts_only_behind_the_same_blocks():
    shadow = PrefixCacheEstimate(blocks=10, block_tokens=2)
    shadow.remember(ids(1, 2, 3, 4))
    assert shadow.cached_tokens(ids(3, 4, 9)) == 0
    assert shadow.cached_tokens(ids(9, 9, 3, 4, 9)) == 0
    assert shadow.cached_tokens(ids(1, 2, 9, 9, 9)) == 2


def test_an_engine_without_prefix_reuse_has_cached_nothing():
    shadow = PrefixCacheEstimate(blocks=0, block_tokens=2)
    shadow.remember(ids(1, 2, 3, 4))
    assert shadow.cached_tokens(ids(1, 2, 3, 4, 5)) == 0


def test_the_least_recently_used_prompt_is_forgotten_first():
    shadow = PrefixCacheEstimate(blocks=2, block_tokens=2)
    shadow.remember(ids(1, 1))
    shadow.remember(ids(2, 2))
    shadow.remember(ids(1, 1))
    shadow.remember(ids(3, 3))
    assert [shadow.cached_tokens(ids(n, n, 0)) for n in (1, 2, 3)] == [2, 0, 2]


@given(st.lists(prompts, max_size=12), prompts, st.integers(1, 4), st.integers(0, 6))
def test_what_counts_as_cached_was_seen_as_the_start_of_an_earlier_prompt(seen, prompt, block_tokens, blocks):
    shadow = PrefixCacheEstimate(blocks, block_tokens)
    for earlier in seen:
        shadow.remember(earlier)
    cached = shadow.cached_tokens(prompt)
    assert cached % block_tokens == 0 and 0 <= cached < prompt.size and cached <= blocks * block_tokens
    start = prompt[:cached].tolist()
    assert not cached or any(earlier[:cached].tolist() == start for earlier in seen)
    if blocks == 6 and sum(earlier.size for earlier in seen) <= 6 * block_tokens:  # nothing was forgotten
        shared = (_shared(earlier, prompt[:-1]) // block_tokens * block_tokens for earlier in seen)
        assert cached == max(shared, default=0)


def _shared(one, other):
    length = min(one.size, other.size)
    different = np.nonzero(one[:length] != other[:length])[0]
    return int(different[0]) if different.size else length
