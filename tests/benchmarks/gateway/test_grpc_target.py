"""The byte-level gRPC target against the scripted replica."""

import grpc
import pytest

from benchmarks.gateway import contenders
from benchmarks.gateway.grpc_target import GrpcTarget
from benchmarks.record import Record
from benchmarks.workload import PlannedRequest
from contract.errors import EngineFailed, Overloaded, Unavailable
from contract.generation import FinishReason
from tests.fakes.replica import Script

pytestmark = pytest.mark.slow
FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", ())


async def send(url, tokens):
    record, target = Record(0, 0.0), GrpcTarget(url, connections=1)
    try:
        await target.send(PlannedRequest(0, "pace 0 0 0", tokens), record)
    finally:
        await target.close()
    return record


async def test_every_token_of_the_scripted_replica_is_recorded(tmp_path):
    with contenders.scripted("replica", tmp_path) as url:
        record = await send(url, 5)
    assert record.tokens == len(record.transit_s) == 5 and record.finish_reason == "length"


async def test_errors_and_missing_tokens_raise(replica, unused_tcp_port):
    with pytest.raises(Overloaded):
        await send(replica(lambda seen: Script(status_after=0, status=FULL)).url, 5)
    with pytest.raises(EngineFailed, match="ended after 0 of 5 tokens"):
        await send(replica(lambda seen: Script(("a",), FinishReason.LENGTH)).url, 5)
    with pytest.raises(Unavailable):
        await send(f"127.0.0.1:{unused_tcp_port}", 5)
