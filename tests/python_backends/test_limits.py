import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument, PromptTooLong
from contract.scheduling import BLOCK_TOKENS
from python_backends.limits import EngineLimits, check_end_id, check_fits, check_ids
from tests.fakes import manifests

LIMITS = EngineLimits(vocab_size=100, max_seq_len=200, max_batch_size=4, kv_cache_blocks=5)


def manifest(**changes):
    return manifests.manifest(**{"vocab_size": 100, "max_batch_size": 4} | changes)


def test_a_request_that_fills_the_length_exactly_fits():
    check_fits(100, 60, LIMITS)


def test_a_request_over_the_length_is_refused_with_every_number():
    with pytest.raises(PromptTooLong) as caught:
        check_fits(150, 51, LIMITS)
    assert caught.value.field == "max_tokens"
    for number in ("150 tokens", "got 51", "200 (max_seq_len)", "at most 50"):
        assert number in str(caught.value)


def test_a_prompt_that_leaves_no_room_for_output_is_refused_as_the_prompt():
    check_fits(199 - 40, 1, LIMITS)  # 160 tokens, which is all the cache holds
    with pytest.raises(PromptTooLong, match="must have at most 199 tokens") as caught:
        check_fits(200, 1, LIMITS)
    assert caught.value.field == "text_input"


def test_a_request_over_the_whole_cache_is_refused_in_blocks():
    with pytest.raises(
        PromptTooLong,
        match="at most 5 KV cache blocks of 32 tokens together with the prompt, got 161 tokens, which need 6",
    ):
        check_fits(100, 61, LIMITS)


def test_what_does_not_fit_is_an_invalid_argument_for_every_client():
    assert issubclass(PromptTooLong, InvalidArgument)


def test_a_given_pool_is_counted_in_whole_blocks():
    assert EngineLimits.from_manifest(manifest(max_seq_len=200, kv_cache_tokens=1000)).kv_cache_blocks == 31


@given(st.integers(1, 64), st.integers(2, 5000))
def test_a_pool_of_the_engines_own_size_holds_its_whole_batch_at_full_length(max_batch_size, max_seq_len):
    limits = EngineLimits.from_manifest(
        manifest(max_batch_size=max_batch_size, max_seq_len=max_seq_len, kv_cache_tokens=None)
    )
    blocks_of_one = -(-max_seq_len // BLOCK_TOKENS)
    assert limits.kv_cache_blocks >= max_batch_size * blocks_of_one
    check_fits(max_seq_len - 1, 1, limits)


@pytest.mark.parametrize("ids", [(), [0, 9], np.array([[3], [9]])])
def test_ids_of_the_vocabulary_pass(ids):
    check_ids("ids", ids, 10)


@pytest.mark.parametrize(("ids", "wrong"), [([1, 10, 11], 10), (np.array([[4, -1]], np.int32), -1)])
def test_the_first_id_that_the_vocabulary_lacks_is_named(ids, wrong):
    with pytest.raises(InvalidArgument, match=f"ids: must hold ids from 0 to 9, got {wrong}"):
        check_ids("ids", ids, 10)


def test_an_end_id_is_one_of_the_vocabulary_or_none():
    for id in (-1, 0, 9):
        check_end_id(id, 10)
    for id in (-2, 10):
        with pytest.raises(InvalidArgument, match="end_id: must be 0 to 9, or -1 for none"):
            check_end_id(id, 10)
