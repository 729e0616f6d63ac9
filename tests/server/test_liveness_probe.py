"""The liveness probe's request and how its responses are judged."""

import asyncio
import struct
from dataclasses import replace

import grpc
import pytest
from tritonclient.grpc import service_pb2

from clients.wire import failures
from clients.wire.connection import Connection
from contract.errors import DeadlineExceeded, EngineFailed, Overloaded
from contract.generation import FinishReason
from server import liveness_probe
from server.liveness_probe import Outcome, ProbeResult, passes
from server.server_metrics import ServerMetrics
from server.settings import Settings
from tests.fakes.replica import FakeReplica, Script, replica_in_thread

BEFORE = ServerMetrics(responses=100, in_engine=4, steps=50)
AFTER = ServerMetrics(responses=102, in_engine=4, steps=52)
INCONCLUSIVE = (Outcome.BUSY, Outcome.TIMED_OUT)


def test_the_request_is_for_one_token_of_the_ensemble():
    request = service_pb2.ModelInferRequest.FromString(liveness_probe.request("probe-1"))
    assert (request.model_name, request.id) == ("ensemble", "probe-1")
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in request.inputs] == [
        ("text_input", "BYTES", [1, 1]),
        ("max_tokens", "INT32", [1, 1]),
    ]
    assert request.raw_input_contents[1] == struct.pack("<i", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (Script(("a",), FinishReason.LENGTH), Outcome.PASSED),
        (Script(("a",), FinishReason.STOP), Outcome.PASSED),
        (Script(("a",), FinishReason.CANCELLED), Outcome.FAILED),
        (Script(refuse=Overloaded("full")), Outcome.BUSY),
        (Script(("a",), stall_after=0), Outcome.TIMED_OUT),
        (Script(("a",), fail_after=0, error=EngineFailed("gone")), Outcome.FAILED),
        (Script(("a",), status_after=0), Outcome.FAILED),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_each_probe_has_its_own_id_and_is_judged_by_its_answer(script, outcome):
    with replica_in_thread(lambda seen: script) as server:
        port = int(server.url.rpartition(":")[2])
        for _ in range(2):
            timeout_s = 0.5 if outcome is Outcome.TIMED_OUT else 60.0
            settings = Settings(grpc_port=port, canary_timeout_s=timeout_s)
            assert asyncio.run(liveness_probe.probe(settings)).outcome is outcome
        assert len({seen.id for seen in server.seen}) == 2


async def test_a_server_that_just_came_up_passes_while_other_connections_still_back_off(unused_tcp_port):
    url, script = f"127.0.0.1:{unused_tcp_port}", Script(("a",), FinishReason.LENGTH)
    options = Connection(url).options()
    settings = Settings(grpc_port=unused_tcp_port, canary_timeout_s=60.0)
    async with grpc.aio.insecure_channel(url, options) as other:
        other.get_state(try_to_connect=True)
        while other.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await asyncio.sleep(0)
        assert (await liveness_probe.probe(settings)).outcome is Outcome.FAILED
        async with await FakeReplica(lambda seen: script).start(port=unused_tcp_port):
            assert await liveness_probe.probe(settings) == ProbeResult(Outcome.PASSED)


def test_a_full_queue_is_busy_and_any_other_error_is_a_failure():
    for message in ("Overloaded: 1024 requests wait", "in ensemble 'ensemble', Exceeds maximum queue size"):
        assert liveness_probe.result_of_error(failures.from_error_message(message), 5).outcome is Outcome.BUSY
    for message in ("EngineFailed: the engine is gone", "Stub process 'tokenizer_0_0' is not healthy.", ""):
        result = liveness_probe.result_of_error(failures.from_error_message(message), 5)
        assert result.outcome is Outcome.FAILED and result.reason
    late = liveness_probe.result_of_error(DeadlineExceeded("late"), 5)
    assert late == ProbeResult(Outcome.TIMED_OUT, "no token within 5 s")


def test_without_a_full_server_the_result_alone_decides():
    assert passes(ProbeResult(Outcome.PASSED), None, None)
    assert not passes(ProbeResult(Outcome.FAILED), BEFORE, AFTER)


@pytest.mark.parametrize("outcome", INCONCLUSIVE)
def test_a_full_or_slow_server_is_live_only_while_it_answers_other_requests(outcome):
    result = ProbeResult(outcome)
    assert passes(result, BEFORE, AFTER)
    assert not passes(result, BEFORE, replace(AFTER, responses=101))  # the probe's own response
    reading = replace(AFTER, responses=100, steps=51, generating=0)  # a long prompt, and nothing else
    assert passes(result, BEFORE, reading) and not passes(result, BEFORE, replace(reading, steps=50))
    assert not passes(result, BEFORE, replace(reading, generating=1))
    assert not passes(result, BEFORE, replace(reading, in_engine=0))  # the probe's own step
    assert not passes(result, None, AFTER) and not passes(result, BEFORE, None)


@pytest.mark.parametrize("outcome", INCONCLUSIVE)
@pytest.mark.parametrize("steps", [50, 51, None])
def test_responses_without_engine_steps_do_not_prove_liveness(outcome, steps):
    assert not passes(ProbeResult(outcome), BEFORE, replace(AFTER, responses=900, steps=steps))
