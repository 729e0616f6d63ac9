"""Which class a request is in, and what its class gives it, through both protocols."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from clients.wire import infer_request
from contract.errors import InvalidArgument
from contract.generation import GenerationRequest
from gateway.admission.request_class import HEADER, classified, engine_priority
from gateway.config.policy import ClassRules
from gateway.config.tenant import LOWEST_PRIORITY, Level, Tenant
from tests.fakes.replica import FakeReplica, Script, SeenRequest
from tests.gateway.api.test_kserve import ours
from tests.gateway.cache.test_reuse import as_
from tests.gateway.config.test_configuration import ALICE, BOB, keys
from tests.gateway.running import gateway, until

CLASSES = {
    "interactive": ClassRules(priority=0, operations="chat"),
    "standard": ClassRules(priority=2),
    "background": ClassRules(priority=8, operations="batch"),
}
KEYED = Tenant("acme/research", levels=(Level("acme"),))


@pytest.mark.parametrize(
    ("tenant", "operation", "asked", "expected"),
    [
        (KEYED, "chat", "", "interactive"),
        (KEYED, "text_completion", "", ""),
        (KEYED, "chat", "background", "background"),
        (Tenant("a", request_class="standard", levels=KEYED.levels), "chat", "", "standard"),
        (Tenant("a", request_class="standard", levels=KEYED.levels), "batch", "", "background"),
        (Tenant("a", classes=("interactive",), priority=9, levels=KEYED.levels), "score", "interactive", "interactive"),
        (Tenant(), "text_completion", "interactive", "interactive"),  # without API keys
    ],
)
def test_the_class_is_the_callers_the_keys_or_the_operations(
    tenant: Tenant, operation: str, asked: str, expected: str
) -> None:
    found = classified(CLASSES, tenant, operation, asked)
    assert found.request_class == expected
    assert found.priority == (CLASSES[expected].priority if expected else tenant.priority)
    assert found.class_rules == CLASSES.get(expected)


@pytest.mark.parametrize(
    ("tenant", "asked"),
    [
        (Tenant("a", request_class="standard", levels=KEYED.levels), "interactive"),
        (Tenant("a", classes=("standard",), levels=KEYED.levels), "background"),
        (KEYED, "no such class"),
    ],
)
def test_a_class_that_the_tenant_may_not_ask_for_is_refused_by_name(tenant: Tenant, asked: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"must be one of .*, got '{asked}'") as refused:
        classified(CLASSES, tenant, "text_completion", asked)
    assert refused.value.field == HEADER


@given(
    st.integers(0, 9), st.sampled_from(["", *CLASSES]), st.sampled_from(["chat", "score"]), st.sampled_from([*CLASSES])
)
def test_asking_never_makes_a_request_more_urgent(priority: int, own: str, operation: str, asked: str) -> None:
    tenant = Tenant("a", priority=priority, request_class=own, levels=KEYED.levels)
    usual = classified(CLASSES, tenant, operation).priority
    try:
        assert classified(CLASSES, tenant, operation, asked).priority >= usual
    except InvalidArgument:
        assert CLASSES[asked].priority < usual


CONFIG = """
[admission]
max_running = 4
[classes.interactive]
priority = 0
ttft_s = 60.0
itl_s = 60.0
[classes.background]
priority = 7
share = 0.5
max_tokens = 2
max_wait_s = 0.2
operations = "text_completion"
"""


async def test_a_class_bounds_tokens_wait_and_slots_and_counts_its_objectives() -> None:
    gate, seen = asyncio.Event(), []

    def script(request: SeenRequest) -> Script:
        seen.append(request)
        return Script(
            (" t",) * request.value("max_tokens"), gate=gate if request.value("text_input") == "hold" else None
        )

    body = {"model": "demo", "prompt": "hold", "max_tokens": 5}
    async with FakeReplica(script, slots=4) as replica, gateway(replica, config=keys(ALICE, BOB) + CONFIG) as running:
        held = [asyncio.ensure_future(running.post("/v1/completions", body, **as_(ALICE))) for _ in range(2)]
        await until(lambda: len(seen) == 2)
        # Half of the four slots are taken: the class waits its 0.2 s, the other tenant's too.
        status, _, refused = await running.post("/v1/completions", body, **as_(BOB))
        assert status == 504 and len(seen) == 2, refused
        chat = {"model": "demo", "messages": [{"role": "user", "content": "go"}], "max_tokens": 5}
        status, headers, answer = await running.post(
            "/v1/chat/completions", chat, **as_(BOB, x_trident_class="interactive")
        )
        assert status == 400 and answer["error"]["param"] == HEADER  # more urgent than its usual class 1
        status, headers, answer = await running.post(
            "/v1/chat/completions", chat, **as_(BOB, x_trident_class="background")
        )
        assert status == 504
        status, headers, answer = await running.post("/v1/chat/completions", chat, **as_(BOB))
        assert status == 200 and HEADER not in headers and answer["usage"]["completion_tokens"] == 5
        gate.set()
        for status, headers, answer in await asyncio.gather(*held):
            assert status == 200 and answer["usage"]["completion_tokens"] == 2
            assert headers[HEADER] == "background" and headers["x-trident-degraded"] == "max_tokens=2"
        assert seen[0].parameters["request_priority"] < seen[-1].parameters["request_priority"]


@pytest.mark.parametrize("more", [{"min_tokens": 5}, {"continue_ids": [1]}])
async def test_the_cap_of_a_class_holds_whatever_the_request_asks_for(more: dict[str, object]) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 5, "temperature": 0, **more}
    async with FakeReplica() as replica, gateway(replica, config=CONFIG) as running:
        status, headers, _ = await running.post("/v1/completions", body)
        assert status == 200 and headers["x-trident-degraded"] == "max_tokens=2"
        assert replica.seen[-1].value("max_tokens") == 2


async def test_objectives_are_counted_by_class_and_the_class_is_grpc_metadata_too() -> None:
    def script(request: SeenRequest) -> Script:
        return Script((" t",) * 3, first_token_s=0.0)

    config = CONFIG.replace("60.0\nitl", "0.000001\nitl")
    async with FakeReplica(script, slots=4) as replica, gateway(replica, config=config) as running:
        async with ours(running, metadata={HEADER: "interactive"}) as client:
            await client.generate("a b", max_tokens=3).complete()
        await until(lambda: not len(running.service.live))
        page = await running.metrics()
        counted = {name: value for name, value in page.items() if name.startswith("trident_gateway_objectives_total")}
        assert counted == {
            'trident_gateway_objectives_total{class="interactive",met="no",objective="ttft"}': 1,
            'trident_gateway_objectives_total{class="interactive",met="yes",objective="itl"}': 1,
        }


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
