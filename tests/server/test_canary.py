"""The canary's request and how its answers are judged."""

import struct
from dataclasses import replace

from tritonclient.grpc import service_pb2

from server import canary
from server.canary import Finding, Health
from server.traffic import Traffic


def test_the_request_asks_the_ensemble_for_one_token():
    request = service_pb2.ModelInferRequest.FromString(canary.request())
    assert request.model_name == "ensemble"
    assert [(one.name, one.datatype, list(one.shape)) for one in request.inputs] == [
        ("text_input", "BYTES", [1, 1]),
        ("max_tokens", "INT32", [1, 1]),
    ]
    assert request.raw_input_contents[1] == struct.pack("<i", 1)
    assert service_pb2.ModelInferRequest.FromString(canary.request()).id != request.id


def test_a_stream_that_ends_as_streams_do_is_well():
    assert canary.judge_end("length") == canary.judge_end("stop") == Finding(Health.WELL)
    assert canary.judge_end("cancelled").health is Health.ILL
    assert canary.judge_end(None).health is Health.ILL


def test_a_full_server_is_busy_and_any_other_error_is_ill():
    for message in ("Overloaded: 1024 requests wait", "in ensemble 'ensemble', Exceeds maximum queue size"):
        assert canary.judge_error(message).health is Health.BUSY
    for message in ("EngineFailed: the engine is gone", "Stub process 'tokenizer_0_0' is not healthy.", ""):
        found = canary.judge_error(message)
        assert found.health is Health.ILL and found.reason


def test_a_full_or_slow_server_is_well_only_while_it_answers_others():
    before = Traffic(answered=100, live=4, steps=50)
    moved = Traffic(answered=102, live=4, steps=52)
    for health in (Health.BUSY, Health.SLOW):
        assert canary.is_well(Finding(health), before, moved)
        assert not canary.is_well(Finding(health), before, replace(moved, answered=101))  # the canary's own
        assert not canary.is_well(Finding(health), None, moved) and not canary.is_well(Finding(health), before, None)
    assert canary.is_well(Finding(Health.WELL), None, None)
    assert not canary.is_well(Finding(Health.ILL), before, moved)


def test_answers_without_engine_steps_are_probes_and_prove_nothing():
    before = Traffic(answered=100, live=4, steps=50)
    for health in (Health.BUSY, Health.SLOW):
        assert not canary.is_well(Finding(health), before, Traffic(answered=900, live=4, steps=50))
        assert not canary.is_well(Finding(health), before, Traffic(answered=900, live=4, steps=51))
        assert not canary.is_well(Finding(health), before, Traffic(answered=900, live=4))


def test_texts_are_the_first_elements_of_the_byte_outputs():
    response = service_pb2.ModelInferResponse()
    for name, datatype, content in (
        ("text_output", "BYTES", b"\x02\x00\x00\x00hi\x01\x00\x00\x00x"),
        ("num_output_tokens", "INT32", struct.pack("<i", 1)),
        ("stop_reason", "BYTES", b""),
    ):
        response.outputs.add(name=name, datatype=datatype, shape=[1, 1])
        response.raw_output_contents.append(content)
    assert canary.texts(response) == {"text_output": "hi"}
