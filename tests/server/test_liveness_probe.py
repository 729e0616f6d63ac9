"""The liveness probe's request and how its responses are judged."""

import struct
from dataclasses import replace

import pytest
from tritonclient.grpc import service_pb2

from server import liveness_probe
from server.liveness_probe import Outcome, ProbeResult, passes
from server.server_metrics import ServerMetrics

BEFORE = ServerMetrics(responses=100, in_engine=4, steps=50)
AFTER = ServerMetrics(responses=102, in_engine=4, steps=52)
INCONCLUSIVE = (Outcome.BUSY, Outcome.TIMED_OUT)


def test_the_request_is_for_one_token_of_the_ensemble():
    request = service_pb2.ModelInferRequest.FromString(liveness_probe.request())
    assert request.model_name == "ensemble"
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in request.inputs] == [
        ("text_input", "BYTES", [1, 1]),
        ("max_tokens", "INT32", [1, 1]),
    ]
    assert request.raw_input_contents[1] == struct.pack("<i", 1)


def test_an_encoder_is_asked_for_the_score_of_a_pair_which_both_kinds_compute():
    request = service_pb2.ModelInferRequest.FromString(liveness_probe.encoder_request("encoder"))
    assert request.model_name == "encoder"
    assert [(tensor.name, list(tensor.shape)) for tensor in request.inputs] == [
        ("text_input", [1, 1]),
        ("text_pair", [1, 1]),
    ]


def test_each_request_has_its_own_id():
    ids = {service_pb2.ModelInferRequest.FromString(liveness_probe.request()).id for _ in range(3)}
    assert len(ids) == 3


def test_a_stream_that_stops_or_reaches_its_length_passes():
    for finish_reason in ("length", "stop"):
        assert liveness_probe.result_of_finish(finish_reason) == ProbeResult(Outcome.PASSED)
    for finish_reason in ("cancelled", None):
        assert liveness_probe.result_of_finish(finish_reason).outcome is Outcome.FAILED


def test_a_full_queue_is_busy_and_any_other_error_is_a_failure():
    for message in ("Overloaded: 1024 requests wait", "in ensemble 'ensemble', Exceeds maximum queue size"):
        assert liveness_probe.result_of_error(message).outcome is Outcome.BUSY
    for message in ("EngineFailed: the engine is gone", "Stub process 'tokenizer_0_0' is not healthy.", ""):
        result = liveness_probe.result_of_error(message)
        assert result.outcome is Outcome.FAILED and result.reason


def test_without_a_full_server_the_result_alone_decides():
    assert passes(ProbeResult(Outcome.PASSED), None, None)
    assert not passes(ProbeResult(Outcome.FAILED), BEFORE, AFTER)


@pytest.mark.parametrize("outcome", INCONCLUSIVE)
def test_a_full_or_slow_server_is_live_only_while_it_answers_other_requests(outcome):
    result = ProbeResult(outcome)
    assert passes(result, BEFORE, AFTER)
    assert not passes(result, BEFORE, replace(AFTER, responses=101))  # the probe's own response
    assert not passes(result, None, AFTER) and not passes(result, BEFORE, None)


@pytest.mark.parametrize("outcome", INCONCLUSIVE)
@pytest.mark.parametrize("steps", [50, 51, None])
def test_responses_without_engine_steps_do_not_prove_liveness(outcome, steps):
    assert not passes(ProbeResult(outcome), BEFORE, replace(AFTER, responses=900, steps=steps))


def test_text_outputs_are_the_first_elements_of_the_byte_outputs():
    response = service_pb2.ModelInferResponse()
    for name, datatype, content in (
        ("text_output", "BYTES", b"\x02\x00\x00\x00hi\x01\x00\x00\x00x"),
        ("num_output_tokens", "INT32", struct.pack("<i", 1)),
        ("stop_reason", "BYTES", b""),
    ):
        response.outputs.add(name=name, datatype=datatype, shape=[1, 1])
        response.raw_output_contents.append(content)
    assert liveness_probe.text_outputs(response) == {"text_output": "hi"}
