import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from python_backends.cpu_engine.prefix_cache_estimate import PrefixCacheEstimate

prompts = st.lists(st.integers(0, 3), min_size=1, max_size=40).map(lambda ids: np.array(ids, np.int64))


def ids(*values):
    return np.array(values, np.int64)


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
