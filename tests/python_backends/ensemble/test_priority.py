import pytest

from contract.errors import InvalidArgument
from python_backends.ensemble import priority


def test_an_engine_without_priorities_refuses_all_but_the_usual_one():
    priority.refuse({})
    priority.refuse({"request_priority": 0.5})
    with pytest.raises(
        InvalidArgument, match="request_priority: must be left out, the TensorRT-LLM engine has no priorities"
    ):
        priority.refuse({"request_priority": 1})
