"""What the bare relay makes of a request and of a response; a run of the benchmark relays through it."""

import orjson
from tritonclient.grpc import service_pb2

from benchmarks.gateway import bare_relay, scripted_replica
from clients.wire.protobuf import text, varint


def test_a_chat_becomes_the_ensembles_tensors():
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}
    request = service_pb2.ModelInferRequest.FromString(bare_relay.infer_request(body))
    assert [tensor.name for tensor in request.inputs] == ["messages", "max_tokens", "stream"]
    assert request.raw_input_contents[1] == (7).to_bytes(4, "little")


def test_a_response_becomes_an_event_with_its_text():
    before, after = scripted_replica.tail(1, 2)
    inner = text(3, "one") + before + b"@0000000000000000001" + after
    data = bare_relay.event(b"\x12" + varint(len(inner)) + inner, "demo")
    chunk = orjson.loads(data.removeprefix(b"data: "))
    assert chunk["choices"] == [{"index": 0, "delta": {"content": "@0000000000000000001"}, "finish_reason": "length"}]
