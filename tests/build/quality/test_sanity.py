"""The sanity prompt."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from build.quality import sanity
from build.quality.sanity import Reply


def scripted(tokens, vocab=50):
    """An engine that says ``tokens`` whatever it is asked."""

    def next_logits(ids):
        logits = np.zeros(vocab, np.float32)
        logits[tokens[len(ids) - 2]] = 1  # the prompt has two ids
        return logits

    return next_logits


@given(st.lists(st.integers(1, 49), min_size=1, max_size=40), st.integers(1, 30))
def test_a_reply_is_the_greedy_tokens_up_to_the_limit(tokens, max_tokens):
    reply = sanity.speak(scripted([*tokens, 0]), [7, 8], max_tokens=max_tokens, eos_token_ids=[0])
    assert reply == Reply(tuple(tokens[:max_tokens]))


def test_a_reply_ends_when_its_time_is_over(monkeypatch):
    times = iter(range(0, 100, 4))
    monkeypatch.setattr(sanity, "time", SimpleNamespace(monotonic=lambda: next(times)))
    reply = sanity.speak(scripted(range(40)), [7, 8])
    assert len(reply.ids) == 3  # after 4, 8 and 12 seconds


def test_logits_that_are_not_numbers_end_the_reply_and_are_a_problem():
    def broken(ids):
        return np.full(4, np.nan if len(ids) > 4 else 1.0)

    reply = sanity.speak(broken, [1, 2])
    assert sanity.problem(reply, Reply((1, 2, 3))) == "logits are not finite after 3 tokens"


def test_an_engine_that_is_stuck_or_silent_is_a_problem_only_where_the_reference_is_not():
    stuck, silent, fine = Reply((9,) * 32), Reply(()), Reply(tuple(range(32)))
    assert sanity.problem(stuck, fine) == "the engine repeats token 9 where the reference does not"
    assert sanity.problem(silent, fine) == "the engine says nothing where the reference does"
    assert sanity.problem(stuck, stuck) is None
    assert sanity.problem(silent, silent) is None
    assert sanity.problem(fine, stuck) is None
