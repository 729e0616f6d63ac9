from hypothesis import given
from hypothesis import strategies as st

from contract.scheduling import SHARED_DRAFT, drafts_beside


@given(st.integers(0, 32), st.integers(0, 100))
def test_others_beside_a_sequence_never_lengthen_its_drafts(most, others):
    assert drafts_beside(most, 0) == most
    assert drafts_beside(most, others + 1) == min(SHARED_DRAFT, most)
