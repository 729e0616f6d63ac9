"""The engine's queue is ordered by class, whatever callers ask for."""

from __future__ import annotations

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from clients.wire import infer_request
from contract.generation import GenerationRequest
from gateway.admission.engine_priority import engine_priority
from gateway.config.tenant import LOWEST_PRIORITY, Tenant
from tests.fakes.replica import FakeReplica
from tests.gateway.running import gateway, until

classes = st.integers(0, LOWEST_PRIORITY)
wishes = st.floats(0, 1)


@given(classes, wishes, wishes)
def test_a_caller_may_lower_itself_within_its_class_and_nothing_else(own_class: int, wish: float, other: float) -> None:
    found = engine_priority(own_class, wish)
    assert 0.0 <= found <= engine_priority(own_class) <= 1.0
    assert wish >= 0.5 or engine_priority(own_class, other) >= found or other < wish
    if own_class < LOWEST_PRIORITY:
        assert found > engine_priority(own_class + 1, 1.0)


def test_the_most_urgent_class_is_the_engines_first() -> None:
    assert engine_priority(0) == 1.0 and engine_priority(0, 0.0) > engine_priority(1) == 0.9
    assert engine_priority(LOWEST_PRIORITY) == 0.1 and engine_priority(LOWEST_PRIORITY, 0.0) > 0


class Keys:
    def tenant(self, api_key: str) -> Tenant:
        return Tenant(f"class {api_key}", priority=int(api_key or 1))


async def sent_by_grpc(url: str, key: str, **parameters: object) -> list[bytes]:
    request = service_pb2.ModelInferRequest.FromString(
        infer_request.generation(GenerationRequest("a b", max_tokens=2), "ensemble")
    )
    for name, value in parameters.items():
        field = {float: "double_param", str: "string_param", int: "int64_param"}[type(value)]
        setattr(request.parameters[name], field, value)

    async def messages():
        yield request.SerializeToString()

    async with grpc.aio.insecure_channel(url) as channel:
        call = channel.stream_stream(infer_request.GENERATE)
        return [data async for data in call(messages(), metadata=(("authorization", f"Bearer {key}"),))]


@pytest.mark.parametrize(("key", "priority"), [("0", 1.0), ("1", 0.9), ("9", 0.1)])
async def test_the_tenants_class_reaches_the_engine_over_both_protocols(key: str, priority: float) -> None:
    async with FakeReplica() as replica, gateway(replica, keys=Keys()) as running:
        await until(lambda: all(one.takes_priority for one in running.service.replicas.all()))
        for path, fields in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            body = {"model": "demo", "max_tokens": 2, **fields}
            assert (await running.post(path, body, authorization=f"Bearer {key}"))[0] == 200
        await sent_by_grpc(running.grpc_url, key)
        assert [seen.parameters["request_priority"] for seen in replica.seen] == [priority] * 3


@pytest.mark.parametrize("wish", [1.0, "1", 1])
async def test_a_callers_own_priority_does_not_raise_it_above_its_class(wish: object) -> None:
    async with FakeReplica() as replica, gateway(replica, keys=Keys()) as running:
        await sent_by_grpc(running.grpc_url, "9", request_priority=wish)
        await sent_by_grpc(running.grpc_url, "0", request_priority=0.25)
        assert [seen.parameters["request_priority"] for seen in replica.seen] == [0.1, 0.955]


async def test_a_priority_that_is_none_is_refused_at_the_gateway() -> None:
    async with FakeReplica() as replica, gateway(replica, keys=Keys()) as running:
        (answer,) = await sent_by_grpc(running.grpc_url, "1", request_priority=7.0)
        message = service_pb2.ModelStreamInferResponse.FromString(answer).error_message
        assert "request_priority: must be a number from 0" in message and not replica.seen


async def test_an_engine_without_priorities_is_sent_none() -> None:
    class Trtllm(FakeReplica):
        def metrics_page(self) -> str:
            return super().metrics_page() + 'trident_engine_info{engine="e",kind="trtllm"} 1\n'

    async with Trtllm() as replica, gateway(replica, keys=Keys()) as running:
        await sent_by_grpc(running.grpc_url, "9", request_priority=1.0)
        assert "request_priority" not in replica.seen[0].parameters
    async with FakeReplica() as replica, gateway(replica, keys=Keys(), metrics_urls={}) as running:
        await sent_by_grpc(running.grpc_url, "9", request_priority=1.0)
        assert "request_priority" not in replica.seen[0].parameters


async def test_a_probe_goes_before_all_classes() -> None:
    async with FakeReplica() as replica, gateway(replica, deep_probes=True, probe_interval_s=0.05):
        await until(lambda: any(seen.parameters.get("request_priority") == 1.0 for seen in replica.seen))
