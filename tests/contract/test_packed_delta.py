import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.generation import FinishReason, Timings, TokenDelta, Usage
from contract.packed_delta import pack, unpack

IDS, COUNTS, NS = st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(1, 2**63 - 1)
LOG_PROBS = st.floats(max_value=0.0, allow_nan=False)
TEXTS = st.text(max_size=20)
TOP = st.lists(st.lists(st.tuples(IDS, LOG_PROBS), max_size=3).map(tuple), max_size=3).map(tuple)
DELTAS = st.builds(
    TokenDelta,
    text=TEXTS,
    token_ids=st.lists(IDS, max_size=9).map(tuple),
    log_probs=st.lists(LOG_PROBS, max_size=9).map(tuple),
    finish_reason=st.sampled_from(FinishReason),
    stop_reason=TEXTS,
    usage=st.none() | st.builds(Usage, COUNTS, COUNTS, COUNTS),
    timings=st.none() | st.builds(Timings, *[NS] * 7),
    error=TEXTS,
    top_log_probs=TOP,
    prompt_ids=COUNTS,
)
RUNNING = st.builds(
    TokenDelta, TEXTS, DELTAS.map(lambda one: one.token_ids), DELTAS.map(lambda one: one.log_probs), top_log_probs=TOP
)


@given(DELTAS | RUNNING)
def test_what_is_packed_is_unpacked_again(delta):
    assert unpack(pack(delta)) == delta


def test_a_delta_of_one_id_is_small():
    assert len(pack(TokenDelta(" the", (7,)))) == 16


@given(st.binary(max_size=40))
def test_other_bytes_are_refused_and_break_nothing(data):
    try:
        assert isinstance(unpack(data), TokenDelta)
    except (ValueError, struct.error):
        pass


@pytest.mark.parametrize("cut", [1, 9, -1])
def test_cut_bytes_are_refused(cut):
    with pytest.raises((ValueError, struct.error)):
        unpack(pack(TokenDelta("text", (1, 2), finish_reason=FinishReason.STOP))[:cut])
