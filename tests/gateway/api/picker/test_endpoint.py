"""The picker's protocol, spoken by a gRPC client in Envoy's place."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2

from clients.wire import protobuf
from gateway.api.picker import ext_proc_pb2 as pb
from gateway.api.picker.endpoint import HEADER, NAMESPACE, SERVED, SERVICE, SUBSET, SUBSET_NAMESPACE
from gateway.api.picker.request import FRAME
from tests.gateway.api.picker.endpoints import Pool, pool
from tests.gateway.config.test_configuration import ALICE, keys
from tests.gateway.identity.issuer import SECTION, issuer
from tests.gateway.running import until

pytestmark = pytest.mark.slow
CODE = 'trident_gateway_requests_total{code="%s",operation="chat",protocol="ext_proc"}'
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


def headers(path: str = "/v1/chat/completions", method: str = "POST", **more: str) -> dict[str, str]:
    named = {key.replace("_", "-"): value for key, value in more.items()}
    return {":method": method, ":path": path, "content-type": "application/json", **named}


def header_map(values: dict[str, str]) -> Any:
    return {"headers": [{"key": key, "raw_value": value.encode()} for key, value in values.items()]}


class Stream:
    """One stream of ext_proc."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self.call = call

    async def send(self, **message: Any) -> None:
        metadata = message.pop("metadata", {})
        request = pb.ProcessingRequest(**message)
        for namespace, fields in metadata.items():
            request.metadata_context.filter_metadata[namespace].update(fields)
        await self.call.write(request.SerializeToString())

    async def receive(self) -> pb.ProcessingResponse:
        data = await asyncio.wait_for(self.call.read(), 30)
        assert data is not grpc.aio.EOF, (await self.call.code(), await self.call.details())
        return pb.ProcessingResponse.FromString(data)

    async def begin(self, body: Any = None, metadata: Any = None, **more: str) -> pb.ProcessingResponse:
        """Sends headers and body, and returns the first answer."""
        given = headers(**more)
        ends = body is None
        request = {"headers": header_map(given), "end_of_stream": ends}
        await self.send(request_headers=request, metadata=metadata or {})
        if not ends:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            half = len(data) // 2
            await self.send(request_body={"body": data[:half]})
            await self.send(request_body={"body": data[half:], "end_of_stream": True})
        return await self.receive()

    async def answer(self, status: int = 200, served: str = "", **more: str) -> pb.ProcessingResponse:
        """Sends the headers of a response."""
        given = {":status": str(status), "content-type": "application/json", **more}
        metadata = {NAMESPACE: {SERVED: served}} if served else {}
        await self.send(response_headers={"headers": header_map(given)}, metadata=metadata)
        return await self.receive()


@contextlib.asynccontextmanager
async def stream(running: Pool) -> AsyncIterator[Stream]:
    async with grpc.aio.insecure_channel(running.running.picker_url) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Process")()
        yield Stream(call)
        call.cancel()


def where(answer: pb.ProcessingResponse) -> list[str]:
    """The endpoints of an answer, which header and metadata tell alike."""
    assert answer.WhichOneof("response") == "request_headers", answer
    set_headers = answer.request_headers.response.header_mutation.set_headers
    [header] = [each.header.raw_value.decode() for each in set_headers if each.header.key == HEADER]
    assert answer.dynamic_metadata[NAMESPACE][HEADER] == header
    return header.split(",")


def refusal(answer: pb.ProcessingResponse) -> tuple[int, dict[str, str], str]:
    assert answer.WhichOneof("response") == "immediate_response", answer
    immediate = answer.immediate_response
    told = {each.header.key: each.header.raw_value.decode() for each in immediate.headers.set_headers}
    return immediate.status.code, told, immediate.body.decode()


def idle(running: Pool) -> bool:
    service = running.running.service
    return not service.live and not service.admission.running and running.outstanding() == [0] * len(running.replicas)


async def test_a_request_gets_an_endpoint_and_fallbacks_and_its_body_goes_on():
    async with pool(3) as running, stream(running) as envoy:
        picked = where(await envoy.begin(CHAT))
        assert sorted(picked) == sorted(endpoint.url for endpoint in running.endpoints)
        body = (await envoy.receive()).request_body.response.body_mutation.streamed_response
        assert json.loads(body.body) == CHAT and body.end_of_stream
        chosen = [endpoint.url for endpoint in running.endpoints].index(picked[0])
        assert running.outstanding()[chosen] == 1 and sum(running.outstanding()) == 1
        await envoy.answer(served=picked[0])
        told = json.dumps({"usage": {"prompt_tokens": 11, "completion_tokens": 5}}).encode()
        await envoy.send(response_body={"body": told, "end_of_stream": True})
        part = (await envoy.receive()).response_body.response.body_mutation.streamed_response
        assert part.body == told and part.end_of_stream
        await until(lambda: idle(running))
        metrics = await running.running.metrics()
        tokens = 'trident_gateway_tokens_total{direction="%s",source="engine",tenant="anonymous"}'
        assert (metrics[tokens % "input"], metrics[tokens % "output"]) == (11, 5)


async def test_a_relayed_stream_teaches_the_pace_of_its_replica():
    async with pool(1) as running:
        [replica] = running.running.service.replicas.all()
        for _ in range(16):  # LEAST_SEEN
            async with stream(running) as envoy:
                picked = where(await envoy.begin(CHAT))
                await envoy.receive()
                await envoy.answer(served=picked[0], **{"content-type": "text/event-stream"})
                told = {"usage": {"prompt_tokens": 11, "completion_tokens": 3}}
                for n, event in enumerate(({}, {}, told)):
                    end = n == 2
                    data = b"data: " + json.dumps(event).encode() + b"\n\n"
                    await envoy.send(response_body={"body": data, "end_of_stream": end})
                    await envoy.receive()
                    await asyncio.sleep(0 if end else 0.01)
                await until(lambda: idle(running))
        assert replica.tokens == 48 and 4 < replica.work.pace.tokens_per_s(8) < 800


async def test_the_endpoint_that_served_is_booked_and_those_before_it_count_as_failed():
    async with pool(2) as running, stream(running) as envoy:
        picked = where(await envoy.begin(CHAT))
        await envoy.receive()
        urls = [endpoint.url for endpoint in running.endpoints]
        assert running.outstanding()[urls.index(picked[0])] == 1
        await envoy.answer(served=picked[1])
        assert running.outstanding()[urls.index(picked[1])] == 1 and sum(running.outstanding()) == 1
        breakers = {each.url: each.breaker.failures for each in running.running.service.replicas.all()}
        assert breakers[running.replicas[urls.index(picked[0])].url] == 1
    await asyncio.sleep(0)


async def test_a_stream_that_envoy_drops_releases_everything():
    async with pool() as running:
        async with stream(running) as envoy:
            await envoy.begin(CHAT)
            assert not idle(running)
        await until(lambda: idle(running))
        end = 'trident_gateway_requests_total{code="CANCELLED",operation="chat",protocol="ext_proc"}'
        assert (await running.running.metrics())[end] == 1


@pytest.mark.parametrize("form", [list, ",".join], ids=["list", "text"])
async def test_a_subset_is_kept_to(form):
    async with pool(3) as running:
        for endpoint in running.endpoints:
            hint = {SUBSET_NAMESPACE: {SUBSET: form([endpoint.url, "10.9.9.9:1"])}}
            async with stream(running) as envoy:
                assert where(await envoy.begin(CHAT, hint)) == [endpoint.url]


@pytest.mark.parametrize("given", [["10.9.9.9:1"], []], ids=["unknown", "empty"])
async def test_a_subset_without_an_endpoint_is_503(given):
    async with pool() as running, stream(running) as envoy:
        hint = {SUBSET_NAMESPACE: {SUBSET: given}}
        status, told, body = refusal(await envoy.begin(CHAT, hint))
        assert (status, told["retry-after"]) == (503, "1") and "subset" in body
        await until(lambda: idle(running))


async def test_a_subset_in_another_pool_than_the_drawn_one_is_found():
    async with pool(2) as running:
        one, two = running.replicas
        named = {one.url: "10.0.0.1:80", two.url: "10.0.0.2:80"}
        pools = {"replicas": f"a={one.url};b={two.url}", "picker_endpoints": named}
        async with pool(0, **pools, metrics_urls={}) as split:
            for number in range(8):
                hint = {SUBSET_NAMESPACE: {SUBSET: [f"10.0.0.{1 + number % 2}:80"]}}
                async with stream(split) as envoy:
                    assert where(await envoy.begin(CHAT, hint)) == [f"10.0.0.{1 + number % 2}:80"]


async def test_without_a_ready_replica_it_is_503_with_retry_after():
    async with pool(0) as running, stream(running) as envoy:
        status, told, body = refusal(await envoy.begin(CHAT))
        assert (status, told["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "unavailable")


async def test_more_than_a_budget_is_429_with_retry_after():
    config = keys(ALICE, limits="tokens_per_minute = 100\nburst_tokens = 100")
    async with pool(config=config) as running:
        async with stream(running) as envoy:
            where(await envoy.begin({**CHAT, "max_tokens": 40}, authorization=f"Bearer {ALICE}"))
            async with stream(running) as other:
                status, told, body = refusal(
                    await other.begin({**CHAT, "max_tokens": 40}, authorization=f"Bearer {ALICE}")
                )
        assert status == 429 and int(told["retry-after"]) > 1 and "tokens" in json.loads(body)["error"]["message"]


async def test_a_slot_is_waited_for():
    async with pool(1, max_in_flight=10, config="[admission]\nmax_running = 1\n") as running:
        async with stream(running) as first:
            where(await first.begin(CHAT))
            async with stream(running) as second:
                waiting = asyncio.ensure_future(second.begin(CHAT))
                await until(lambda: running.running.service.admission.waiting == 1)
                assert not waiting.done()
                await first.receive()
                await first.answer()
                await first.send(response_body={"end_of_stream": True})
                assert where(await waiting)


async def test_a_request_of_a_tenant_without_a_key_is_401():
    async with pool(environ={"TRIDENT_GATEWAY_API_KEYS": f"org/team/key={ALICE}"}) as running:
        async with stream(running) as envoy:
            assert refusal(await envoy.begin(CHAT))[0] == 401
        async with stream(running) as envoy:
            assert where(await envoy.begin(CHAT, authorization=f"Bearer {ALICE}"))


async def test_a_token_of_an_issuer_is_a_key():
    async with issuer() as served, pool(config=SECTION.format(url=served.url, refetch_s=1000.0)) as running:
        async with stream(running) as envoy:
            assert refusal(await envoy.begin(CHAT, authorization=f"Bearer {served.token(aud='x')}"))[0] == 401
        async with stream(running) as envoy:
            assert where(await envoy.begin(CHAT, authorization=f"Bearer {served.token()}"))


@pytest.mark.parametrize(
    ("body", "field"),
    [({"model": "none", "prompt": "x"}, "model"), ({"model": "demo"}, "prompt"), (b"{", None)],
)
async def test_a_wrong_body_is_refused_by_name(body, field):
    async with pool() as running, stream(running) as envoy:
        status, _, text = refusal(await envoy.begin(body))
        assert status in (400, 404) and json.loads(text)["error"]["param"] == field


async def test_a_request_without_a_generation_goes_anywhere():
    async with pool() as running, stream(running) as envoy:
        assert len(where(await envoy.begin(path="/v1/models", method="GET"))) == 2
        await envoy.answer()
        await envoy.send(response_body={"body": b"{}", "end_of_stream": True})
        await envoy.receive()
        await until(lambda: idle(running))


@pytest.mark.parametrize(
    ("modes", "field"),
    [
        ({"request_body_mode": 2, "response_body_mode": 4}, "request_body_mode"),
        ({"request_body_mode": 4, "response_body_mode": 1}, "response_body_mode"),
    ],
)
async def test_body_modes_that_would_hang_are_refused(modes, field):
    async with pool(1) as running, stream(running) as envoy:
        await envoy.send(request_headers={"headers": header_map(headers())}, protocol_config=modes)
        status, _, body = refusal(await envoy.receive())
        assert status == 400 and json.loads(body)["error"]["param"] == field and "FULL_DUPLEX_STREAMED" in body


async def test_a_response_that_is_not_seen_is_charged_with_all_that_it_might_have_used():
    async with pool(1) as running, stream(running) as envoy:
        modes = {"request_body_mode": 4, "response_body_mode": 0}
        await envoy.send(request_headers={"headers": header_map(headers())}, protocol_config=modes)
        await envoy.send(request_body={"body": json.dumps(CHAT).encode(), "end_of_stream": True})
        where(await envoy.receive())
        await envoy.receive()
        await envoy.answer()
        assert not idle(running)
        await envoy.call.done_writing()
        await until(lambda: idle(running))
        tokens = 'trident_gateway_tokens_total{direction="output",source="engine",tenant="anonymous"}'
        metrics = await running.running.metrics()
        assert metrics[tokens] == 8 and metrics[CODE % "OK"] == 1


async def test_a_body_that_is_too_large_or_too_slow_is_refused():
    async with pool(1, max_body_bytes=1024, body_timeout_s=0.2) as running:
        async with stream(running) as envoy:
            status, _, body = refusal(await envoy.begin({**CHAT, "user": "x" * 3000}))
            assert status == 400 and "at most 1024 bytes" in body
        async with stream(running) as envoy:
            await envoy.send(request_headers={"headers": header_map(headers())})
            assert refusal(await envoy.receive())[0] == 504
        await until(lambda: idle(running) and not running.running.service.bodies.held)


async def test_a_drain_waits_for_what_runs_and_then_ends_it():
    async with pool(1) as running, stream(running) as envoy:
        where(await envoy.begin(CHAT))
        await envoy.receive()
        draining = asyncio.ensure_future(running.running.service.drain(0.2))
        await asyncio.sleep(0)
        async with stream(running) as late:
            assert refusal(await late.begin(CHAT))[0] == 503
        assert await draining == 1
        assert await envoy.call.code() == grpc.StatusCode.UNAVAILABLE
        assert await health(running, "readiness") == 2 and await health(running, "liveness") == 1


async def test_a_request_ends_at_its_deadline():
    async with pool(1) as running, stream(running) as envoy:
        where(await envoy.begin(CHAT, x_trident_timeout_s="0.05"))
        await envoy.receive()
        assert await envoy.call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: idle(running))
        assert (await running.running.metrics())[CODE % "DEADLINE_EXCEEDED"] == 1


async def test_an_error_in_a_grpc_response_is_the_code_that_is_counted_and_costs_nothing():
    request = service_pb2.ModelInferRequest(model_name="ensemble")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(b"hi")
    answer = service_pb2.ModelStreamInferResponse(error_message="Overloaded: the queue is full")
    path, content_type = "/inference.GRPCInferenceService/ModelStreamInfer", "application/grpc"
    async with pool(1) as running, stream(running) as envoy:
        given = headers(path, content_type=content_type)
        await envoy.send(request_headers={"headers": header_map(given)})
        data = request.SerializeToString()
        await envoy.send(request_body={"body": FRAME.pack(0, len(data)) + data, "end_of_stream": True})
        where(await envoy.receive())
        await envoy.receive()
        await envoy.answer(**{"content-type": content_type})
        data = answer.SerializeToString()
        await envoy.send(response_body={"body": FRAME.pack(0, len(data)) + data})
        await envoy.receive()
        await envoy.send(response_trailers={"trailers": header_map({"grpc-status": "0"})})
        await envoy.receive()
        await envoy.call.done_writing()
        await until(lambda: idle(running))
        metrics = await running.running.metrics()
        assert metrics[(CODE % "RESOURCE_EXHAUSTED").replace("chat", "text_completion")] == 1
        assert not [name for name in metrics if name.startswith("trident_gateway_tokens_total")]


async def test_an_error_that_never_ends_ends_at_the_deadline_too():
    async with pool(1) as running, stream(running) as envoy:
        where(await envoy.begin(CHAT, x_trident_timeout_s="0.05"))
        await envoy.receive()
        await envoy.answer(500)
        assert await envoy.call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: idle(running))


async def test_what_is_no_message_ends_the_stream():
    async with pool(1) as running, stream(running) as envoy:
        await envoy.call.write(b"\xff\xff")
        assert await envoy.call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_failed_response_is_counted_against_its_replica():
    async with pool(1) as running, stream(running) as envoy:
        where(await envoy.begin(CHAT))
        await envoy.receive()
        await envoy.answer(503)
        await envoy.send(response_body={"body": b"down", "end_of_stream": True})
        await until(lambda: idle(running))
        [replica] = running.running.service.replicas.all()
        assert replica.breaker.failures == 1


async def health(running: Pool, service: str) -> int:
    async with grpc.aio.insecure_channel(running.running.picker_url) as channel:
        answer = await channel.unary_unary("/grpc.health.v1.Health/Check")(protobuf.text(1, service))
        return dict(protobuf.fields(answer))[1]


async def test_the_health_services_tell_life_and_readiness():
    async with pool(1) as running:
        for service in ("", "liveness", "readiness", SERVICE):
            assert await health(running, service) == 1
        with pytest.raises(grpc.aio.AioRpcError, match="must be liveness"):
            await health(running, "other")
    async with pool(0) as running:
        assert [await health(running, service) for service in ("liveness", "readiness", SERVICE)] == [1, 2, 2]
