import grpc
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.gateway import contenders
from benchmarks.gateway.script import Pace
from clients.wire import infer_request
from clients.wire.request import build
from clients.wire.response_reader import ResponseReader


@pytest.mark.slow
def test_the_scripted_replica_answers_as_the_ensemble_does(tmp_path):
    """The official client's messages and ours read it alike."""
    request = build(Pace(0.05, 0.01).prompt(), max_tokens=3, request_id="mine")
    with contenders.scripted("replica", tmp_path) as url, grpc.insecure_channel(url) as channel:
        call = channel.unary_stream(infer_request.GENERATE)(infer_request.generation(request, "ensemble"), timeout=60)
        messages = list(call)
    answer = ResponseReader(request)
    deltas = [answer.read(data) for data in messages]
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,)] and answer.complete
    assert answer.last.usage.output_tokens == 3
    for data in messages:
        inner = service_pb2.ModelStreamInferResponse.FromString(data).infer_response
        assert inner.id == "mine" and len(inner.outputs) == len(inner.raw_output_contents)
