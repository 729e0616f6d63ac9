import pytest

from contract import priority
from contract.errors import InvalidArgument


@pytest.mark.parametrize(
    ("given", "read"), [({}, 0.5), ({"request_priority": 1}, 1.0), ({"request_priority": "0.2"}, 0.2)]
)
def test_a_priority_is_a_number_from_0_to_1_in_whatever_type_a_client_sends_it(given, read):
    assert priority.read(given) == read


@pytest.mark.parametrize("given", [-0.1, 1.5, "high", None, True, float("nan"), [1]])
def test_anything_else_is_refused_by_name(given):
    with pytest.raises(
        InvalidArgument, match=r"^request_priority: must be a number from 0 \(last\) to 1 \(first\), got "
    ):
        priority.read({"request_priority": given})
