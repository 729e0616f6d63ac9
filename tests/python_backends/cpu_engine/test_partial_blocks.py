"""Prompts that OpenVINO GenAI's prefix cache would mix up never start in the same step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.generation import SamplingParams
from python_backends.cpu_engine.partial_blocks import PartialBlocks
from python_backends.ensemble.worker_messages import AddSequence
from python_backends.limits import BLOCK_TOKENS
from tests.python_backends.cpu_engine.test_drafting import Listener, WorkerLink, ended

ids_of = st.lists(st.integers(0, 1), max_size=3 * BLOCK_TOKENS).map(lambda found: np.array(found, np.int64))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_two_continuations_of_a_text_start_a_step_apart_and_equal_prompts_together():
    blocks = PartialBlocks(100)
    assert blocks.add(ids(1, 2, 3)) and blocks.add(ids(1, 2, 4))  # nothing is cached
    blocks.stepped()
    blocks.ended(ids(1, 2))
    assert blocks.add(ids(1, 2, 3)) and blocks.add(ids(1, 2, 3)) and blocks.add(ids(1, 5))
    assert not blocks.add(ids(1, 2, 4)) and not blocks.add(ids(1, 2))
    blocks.stepped()
    assert blocks.add(ids(1, 2, 4))


def test_prompts_that_begin_with_one_that_runs_start_a_step_apart():
    """Found by chaos: streams of one prompt that lost their replica went on at another one with wrong ids."""
    blocks = PartialBlocks(100)
    assert blocks.add(ids(1, 2)) and blocks.add(ids(1, 2, 3))
    blocks.stepped()
    assert blocks.add(ids(1, 2, 3, 4)) and not blocks.add(ids(1, 2, 3, 5)) and blocks.add(ids(1, 4))
    blocks.stepped()
    assert blocks.add(ids(1, 2, 3, 5))


def test_only_so_many_texts_are_remembered():
    blocks = PartialBlocks(2)
    for number in range(3):
        blocks.ended(ids(number))
    assert blocks.add(ids(0, 1)) and blocks.add(ids(0, 2))
    assert blocks.add(ids(2, 1)) and not blocks.add(ids(2, 2))
    none = PartialBlocks(0)
    none.ended(ids(1))
    assert none.add(ids(1, 2)) and none.add(ids(1, 3))


@given(st.lists(ids_of, max_size=4), ids_of, ids_of, ids_of)
def test_prompts_part_exactly_where_a_text_ends_in_the_block_in_which_they_begin_to_differ(texts, common, one, other):
    blocks = PartialBlocks(100)
    for text in texts:
        blocks.ended(text)
    first, second = np.concatenate([common, one]), np.concatenate([common, other])
    blocks.add(first)
    shared = next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    shared = min(len(first), len(second)) if shared is None else shared
    mixed_up = not np.array_equal(first, second) and any(
        len(text) % BLOCK_TOKENS
        and shared // BLOCK_TOKENS * BLOCK_TOKENS < len(text) <= shared
        and np.array_equal(text, first[: len(text)])
        for text in texts
    )
    assert blocks.add(second) is not mixed_up


def generated(listener, sent):
    """Wait until all of ``sent`` have ended; return the ids of each."""
    listener.wait(lambda: ended(listener).issuperset(sent) or listener.dead)
    assert not listener.dead
    outputs = [o for report in listener.reports for o in report.outputs]
    return [[token for o in outputs if o.id == id for token in o.token_ids] for id in sent]


@pytest.mark.slow
def test_continuations_of_one_text_sent_at_once_get_what_they_get_alone(triton_types, tiny_engine):
    text, tails = [7, 8, 9, 10, 11, 12], ([13, 14, 15], [16, 17], [18], [19, 20, 21, 22])
    greedy = SamplingParams(top_k=1)

    def texts(at_once: bool) -> list[list[int]]:
        listener = Listener()
        link = WorkerLink(tiny_engine, listener)
        listener.wait(lambda: listener.ready or listener.dead)
        try:
            number = 0
            found = []
            for start in range(3):
                begun = [*text, start]
                number += 1
                link.send(AddSequence(number, np.array(begun, np.int64), 3, greedy, frozenset()))
                listener.wait(lambda number=number: number in ended(listener) or listener.dead)
                begun += [token for r in listener.reports for o in r.outputs if o.id == number for token in o.token_ids]
                sent = []
                if at_once:  # beside a sequence that runs, so that all of them come during one step
                    number += 1
                    link.send(AddSequence(number, np.array([200 + start] * 40, np.int64), 200, greedy, frozenset()))
                    listener.wait(lambda n=number: any(o.id == n for r in listener.reports for o in r.outputs))
                for tail in tails:
                    number += 1
                    sent.append(number)
                    prompt = np.array([*begun, *tail], np.int64)
                    link.send(AddSequence(number, prompt, 12, greedy, frozenset()))
                    if not at_once:
                        listener.wait(lambda number=number: number in ended(listener) or listener.dead)
                found += generated(listener, sent)
            return found
        finally:
            link.close()
            listener.wait(lambda: listener.dead)

    assert texts(at_once=True) == texts(at_once=False)


@pytest.mark.slow
def test_continuations_of_a_prompt_that_runs_get_what_they_get_alone(triton_types, tiny_engine):
    greedy, tails = SamplingParams(top_k=1), ([13, 14, 15], [16, 17], [18], [19, 20, 21, 22], [13, 14, 16, 17, 18])

    def texts(at_once: bool) -> list[list[int]]:
        listener, found = Listener(), []
        link = WorkerLink(tiny_engine, listener)
        listener.wait(lambda: listener.ready or listener.dead)
        try:
            for start in range(4):
                begun, first = [7, 8, 9, 10, 11, 12, start], 100 * start + 1
                if at_once:
                    link.send(AddSequence(first, np.array(begun, np.int64), 200, greedy, frozenset()))
                    listener.wait(lambda id=first: any(o.id == id for r in listener.reports for o in r.outputs))
                sent = range(first + 1, first + 1 + len(tails))
                for number, tail in zip(sent, tails, strict=True):
                    link.send(AddSequence(number, np.array([*begun, *tail], np.int64), 12, greedy, frozenset()))
                    if not at_once:
                        listener.wait(lambda number=number: number in ended(listener) or listener.dead)
                found += generated(listener, sent)
            return found
        finally:
            link.close()
            listener.wait(lambda: listener.dead)

    assert texts(at_once=True) == texts(at_once=False)
