import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from contract.generation import Guide
from python_backends.ensemble.request_tensors import StreamOptions, decode_word_list, encode_word_list, read_guide
from python_backends.triton_io import Inputs

options = st.builds(
    StreamOptions,
    stream=st.booleans(),
    echo=st.booleans(),
    stop=st.lists(st.text(max_size=20)).map(tuple),
    include_stop=st.booleans(),
    hidden_ids=st.lists(st.integers(0, 2**31 - 1)).map(tuple),
    skip_special_tokens=st.booleans(),
    min_tokens=st.integers(0, 2**31 - 1),
    timings=st.booleans(),
)


@given(options)
def test_options_survive_their_json(options):
    assert StreamOptions.from_json(options.to_json()) == options


def test_an_engine_asked_directly_sends_no_options_and_gets_the_neutral_ones():
    assert StreamOptions.from_json("") == StreamOptions()


# ---- guides ----------------------------------------------------------------------------------------------------------


def inputs(triton, kind="", text=""):
    given = {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}
    return Inputs(triton.incoming({name: ("BYTES", [[value]]) for name, value in given.items() if value}))


def test_a_guide_is_read_and_may_be_absent(triton):
    assert read_guide(inputs(triton, "regex", "[0-9]"), 0, True) == Guide("regex", "[0-9]")
    assert read_guide(inputs(triton), 3, False) is None


@pytest.mark.parametrize(
    ("given", "min_tokens", "ends", "field"),
    [
        (("", "{}"), 0, True, "guided_decoding_guide_type"),
        (("yaml", "{}"), 0, True, "guided_decoding_guide_type"),
        (("regex", ""), 0, True, "guided_decoding_guide"),
        (("json", ""), 1, True, "min_tokens"),
        (("json", ""), 0, False, "ignore_eos"),
    ],
)
def test_what_contradicts_it_is_refused_by_name(triton, given, min_tokens, ends, field):
    with pytest.raises(InvalidArgument) as caught:
        read_guide(inputs(triton, *given), min_tokens, ends)
    assert caught.value.field == field


# ---- word lists ------------------------------------------------------------------------------------------------------


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
