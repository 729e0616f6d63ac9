import pytest

from contract.errors import InvalidArgument
from python_backends import priority


@pytest.mark.parametrize(
    ("given", "read"), [({}, 0.5), ({"request_priority": 1}, 1.0), ({"request_priority": "0.2"}, 0.2)]
)
def test_a_priority_is_a_number_from_0_to_1_in_whatever_type_a_client_sends_it(given, read):
    assert priority.read(given) == read


@pytest.mark.parametrize("given", [-0.1, 1.5, "high", None, True, float("nan"), [1]])
def test_another_value_is_refused_with_what_is_allowed(given):
    with pytest.raises(InvalidArgument, match=r"^request_priority: got .*; allowed is a number from 0 \(last\) to 1"):
        priority.read({"request_priority": given})


def test_an_engine_without_priorities_refuses_all_but_the_usual_one():
    priority.refuse({})
    priority.refuse({"request_priority": 0.5})
    with pytest.raises(InvalidArgument, match="request_priority: got 1; the TensorRT-LLM engine runs requests as they"):
        priority.refuse({"request_priority": 1})
