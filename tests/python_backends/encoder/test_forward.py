from hypothesis import given
from hypothesis import strategies as st

from python_backends.encoder.forward import MOST_PADDING, PASS_TOKENS, STEP, packed


@given(
    lengths=st.lists(st.integers(1, 300), max_size=80),
    max_rows=st.integers(1, 64),
    max_tokens=st.integers(8, 4096),
)
def test_every_row_is_in_one_batch_within_both_bounds_and_beside_rows_of_its_length(lengths, max_rows, max_tokens):
    batches = packed(lengths, max_rows, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert lengths[batch[-1]] == longest
        padded = -(-longest // STEP) * STEP * len(batch)
        assert len(batch) <= max_rows and (padded <= max_tokens or len(batch) == 1)
        tokens = sum(lengths[index] for index in batch)
        assert len(batch) == 1 or padded - tokens <= PASS_TOKENS + MOST_PADDING * tokens
    in_order = [lengths[index] for batch in batches for index in batch]
    assert in_order == sorted(lengths)
