"""The guide among a request's tensors; what each engine makes of it is in the tests of their requests."""

import pytest

from contract.errors import InvalidArgument
from contract.generation import Guide
from python_backends.ensemble.guide import read_guide
from python_backends.triton_io import Inputs


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
