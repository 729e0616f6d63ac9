"""The drafts that prompt lookup would have had accepted."""

from __future__ import annotations

import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from python_backends.adapter_ids import AdapterIds
from python_backends.cpu_engine.prompt_lookup import PromptLookup


def drafts(ids: list[int], ngram_size: int, length: int) -> list[int]:
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
        for draft, token in zip(drafts(ids, ngram_size, length), left, strict=False):
            if draft != token:
                break
            count += 1
        if count == len(left):  # it may accept further ones
            break
        counts.append(count)
        ids, left = ids + left[: count + 1], left[count + 1 :]
    return counts


TOKENS = st.integers(0, 3) | st.integers(0, 200_000)


@given(st.lists(TOKENS, min_size=1, max_size=30), st.lists(TOKENS, min_size=1), st.integers(1, 4), st.integers(1, 8))
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
