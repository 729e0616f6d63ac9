import pytest
from tritonclient.grpc import service_pb2

from benchmarks import engine_target
from benchmarks.engine_target import EngineTarget
from benchmarks.prompts import Prompts
from benchmarks.workload import PlannedRequest


def test_a_request_has_one_tensor_for_each_input():
    message = service_pb2.ModelInferRequest.FromString(engine_target.infer([5, 6, 7], 9, True))
    raws = dict(zip((one.name for one in message.inputs), message.raw_input_contents, strict=True))
    assert message.model_name == "engine" and list(message.inputs[0].shape) == [1, 3]
    assert raws["input_ids"] == b"\5\0\0\0\6\0\0\0\7\0\0\0" and raws["request_output_len"] == b"\t\0\0\0"


def test_a_prompt_needs_a_tokenizer():
    with pytest.raises(AssertionError):
        EngineTarget("127.0.0.1:1", Prompts()).open(PlannedRequest(0, "hello", 3))
