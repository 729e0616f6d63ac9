import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from python_backends.ensemble.word_list import decode_word_list, encode_word_list

ids = st.integers(0, 2**31 - 1)
words = st.lists(st.lists(ids, min_size=1, max_size=5).map(tuple), max_size=10)


def rows(ids, offsets):
    return np.array([[ids, offsets]], dtype=np.int32)


@given(words)
def test_decoding_undoes_encoding(words):
    assert decode_word_list("stop_words_list", encode_word_list(words)) == words


@given(words)
@example([])
@example([(1,), (2,), (3,)])
def test_an_encoded_list_is_what_the_backend_accepts(words):
    array = encode_word_list(words)
    total = sum(map(len, words))
    assert array.dtype == np.int32 and array.shape == (1, 2, total)
    offsets = array[0, 1].tolist()
    used = [offset for offset in offsets if offset != -1]
    assert offsets == used + [-1] * (total - len(used))  # nothing but -1 behind the first -1
    assert used == sorted(set(used)) and all(0 < offset <= total for offset in used)  # strictly growing
    assert len(used) == len(words)


def test_the_layout_is_the_one_tensorrt_llm_documents():
    assert encode_word_list([(5, 7, 3), (2,)]).tolist() == [[[5, 7, 3, 2], [3, 4, -1, -1]]]


@pytest.mark.parametrize("absent", [None, np.zeros((1, 2, 0), np.int32), np.zeros((1, 0), np.int32)])
def test_no_list_holds_no_words(absent):
    assert decode_word_list("stop_words_list", absent) == []


def test_a_list_of_padding_only_holds_no_words():
    assert decode_word_list("stop_words_list", rows([0, 0], [-1, -1])) == []


def test_a_list_without_the_batch_dimension_is_read_too():
    assert decode_word_list("stop_words_list", np.array([[4, 5], [1, 2]], np.int32)) == [(4,), (5,)]


def test_padding_behind_the_last_word_is_not_part_of_it():
    assert decode_word_list("stop_words_list", rows([9, 8, 0, 0], [1, 2, -1, -1])) == [(9,), (8,)]


@pytest.mark.parametrize(
    ("array", "problem"),
    [
        (np.zeros(3, np.int32), "must hold two rows of the same length, got 3 values"),
        (rows([1, 2], [3, -1]), "rising offsets up to 2, got 3"),
        (rows([1, 2], [0, -1]), "rising offsets up to 2, got 0"),
        (rows([1, 2, 3], [2, 2, -1]), "rising offsets up to 3, got 2 after 2"),
        (rows([1, 2, 3], [2, 1, -1]), "rising offsets up to 3, got 1 after 2"),
        (rows([1, 2], [-2, -1]), "got -2"),
        (rows([1, 2, 3], [1, -1, 3]), "-1 only at its end, got one at position 1"),
    ],
)
def test_what_the_backend_refuses_is_refused_by_name(array, problem):
    with pytest.raises(InvalidArgument, match=problem) as caught:
        decode_word_list("bad_words_list", array)
    assert caught.value.field == "bad_words_list"


@given(st.lists(st.integers(-3, 5), min_size=2, max_size=12).filter(lambda values: len(values) % 2 == 0))
def test_any_two_rows_are_words_or_a_named_refusal(values):
    array = np.array(values, np.int32).reshape(1, 2, -1)
    try:
        found = decode_word_list("stop_words_list", array)
    except InvalidArgument as refusal:
        assert refusal.field == "stop_words_list"
    else:
        joined = [token for word in found for token in word]
        assert all(found) and joined == array[0, 0, : len(joined)].tolist()


def test_an_empty_word_is_never_encoded():
    with pytest.raises(AssertionError, match="empty word"):
        encode_word_list([(1,), ()])
