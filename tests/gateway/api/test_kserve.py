"""Triton's own client, and ours, through the gateway's gRPC endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import queue
import struct
from dataclasses import astuple

import grpc
import numpy as np
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tritonclient.grpc import InferInput, InferRequestedOutput, service_pb2
from tritonclient.grpc import aio as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from clients import NO_RETRY, AsyncClient
from clients.wire.completion import join
from contract import tensors
from contract.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidArgument,
    NotFound,
    Overloaded,
    TridentError,
    Unauthenticated,
    Unavailable,
)
from contract.generation import FinishReason
from gateway.admission.prompt_tokens import PromptTokens
from gateway.api import kserve
from gateway.api.response_writer import ResponseWriter
from gateway.config.tenant import Tenant
from gateway.service import Service
from gateway.telemetry.tracing import Tracing
from tests.fakes.replica import FakeReplica, Script, content
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow
CODE = 'trident_gateway_requests_total{code="%s",operation="text_completion",protocol="grpc"}'


def inputs(prompt: str, max_tokens: int, **more: object) -> list[InferInput]:
    values = {
        "text_input": np.array([[prompt]], dtype=object),
        "max_tokens": np.array([[max_tokens]], dtype=np.int32),
        "stream": np.array([[True]]),
        **{name: np.array([[value]]) for name, value in more.items()},
    }
    made = []
    for name, array in values.items():
        tensor = InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


async def send_requests(running: Running, *requests: dict, headers: dict | None = None) -> list[tuple[str, str]]:
    """(request id, text or error) of every response of one stream, by Triton's own client."""

    async def iterate():
        for request in requests:
            yield {"model_name": "ensemble", "enable_empty_final_response": True, **request}

    seen = []
    async with triton.InferenceServerClient(running.grpc_url) as client:
        async for result, error in client.stream_infer(iterate(), headers=headers):
            if error is not None:
                seen.append(("", str(error)))
            else:
                response = result.get_response()
                output = result.as_numpy("text_output")
                seen.append((response.id, output.flatten()[0].decode() if output is not None else ""))
    return seen


def ours(running: Running, **more: object) -> AsyncClient:
    return AsyncClient(running.grpc_url, retry=NO_RETRY, **more)


async def test_tritons_client_streams_through_the_gateway():
    async with FakeReplica() as replica, gateway(replica) as running:
        seen = await send_requests(running, {"request_id": "r1", "inputs": inputs("one two", 3)})
        assert "".join(text for _, text in seen) == " one two one" and {rid for rid, _ in seen} == {"r1"}
        assert replica.seen[-1].id == "r1" and replica.seen[-1].value("max_tokens") == 3


async def test_requests_of_one_stream_run_side_by_side():
    async with FakeReplica(lambda seen: Script((" a", " b"), gap_s=0.05)) as replica, gateway(replica) as running:
        seen = await send_requests(running, *({"request_id": f"r{n}", "inputs": inputs("x", 2)} for n in range(5)))
        for n in range(5):
            assert "".join(text for rid, text in seen if rid == f"r{n}") == " a b"
        assert replica.counts.most_running > 1


async def test_a_cancelled_call_frees_the_replica():
    script = Script(tuple(" a" for _ in range(500)), gap_s=0.01)
    async with FakeReplica(lambda seen: script) as replica, gateway(replica) as running, ours(running) as client:
        async for _ in client.generate("x", max_tokens=500):
            break
        await until(lambda: replica.counts.running == 0 and not running.service.live)
        assert replica.counts.cancelled == 1


async def test_a_chat_with_half_a_character_is_the_replicas_to_refuse():
    made = [tensor for tensor in inputs("x", 2) if tensor.name() != "text_input"]
    tensor, long = InferInput("messages", [1, 1], "BYTES"), 1000 * "\\ud800"
    tensor.set_data_from_numpy(np.array([[f'[{{"role": "user", "content": "{long}"}}]']], dtype=object))
    refused = Script(refuse=InvalidArgument("messages", "must be encodable as UTF-8"))
    async with FakeReplica(lambda seen: refused) as one, FakeReplica(lambda seen: refused) as two:
        async with gateway(one, two) as running:
            [(_, error)] = await send_requests(running, {"request_id": "r", "inputs": [*made, tensor]})
            assert "InvalidArgument: messages: must be encodable" in error
            assert one.counts.started + two.counts.started == 1


async def test_a_write_to_a_client_that_is_gone_is_no_failure_of_the_gateway(monkeypatch, caplog):
    """gRPC's own error of such a write comes before its context tells that the client is gone."""
    writes = []

    async def fail(data: bytes) -> None:
        writes.append(data)
        raise grpc.aio.InternalError('Failed "execute_batch": (<SendMessageOperation>,)')

    monkeypatch.setattr(ResponseWriter, "write", lambda self, data: self._send(fail, data))
    async with FakeReplica(lambda seen: Script((" a", " b"))) as replica, gateway(replica) as running:
        assert await send_requests(running, {"request_id": "r", "inputs": inputs("one", 1)}) == []
        await until(lambda: not running.service.live)
        metrics = await running.metrics()
    assert metrics[CODE % "CANCELLED"] == 1 and len(writes) == 1
    gc.collect()  # only then asyncio tells of a task's exception
    assert "unhandled" not in caplog.text and "never retrieved" not in caplog.text


async def test_what_no_code_expects_is_an_error_of_its_request_alone(monkeypatch, caplog):
    routed = Service.routed

    async def failing(self: Service, model: str, requests, context):
        if context.request_id == "bad":
            raise RuntimeError("unexpected")
        return await routed(self, model, requests, context)

    monkeypatch.setattr(Service, "routed", failing)
    async with FakeReplica() as replica, gateway(replica) as running:
        asked = ({"request_id": name, "inputs": inputs("one", 1)} for name in ("bad", "good"))
        seen = await asyncio.wait_for(send_requests(running, *asked), 30)
        [error] = [text for name, text in seen if not name]
        assert "EngineFailed: the gateway failed; quote bad when you report it" in error
        assert "".join(text for name, text in seen if name == "good") == " one"
        assert "unexpected" in caplog.text and not running.service.live
        metrics = await running.metrics()
        assert (metrics[CODE % "INTERNAL"], metrics[CODE % "OK"]) == (1, 1)


REFUSING = "[degradation]\nshorter_at = 0.1\noverflow_at = 0.1\nrefuse_at = 0.1"


async def test_a_refusal_is_resource_exhausted_with_retry_info():
    async with FakeReplica(lambda seen: Script((" a",), stall_after=0)) as replica:
        async with gateway(replica, config=REFUSING, max_in_flight=10) as running, ours(running) as client:
            running_one = asyncio.ensure_future(client.generate("x").complete())
            await until(lambda: replica.counts.running == 1)
            with pytest.raises(Overloaded, match="more work than can be done") as caught:
                await client.generate("x").complete()
            assert 1.0 <= caught.value.retry_after_s <= 1.26
            async with grpc.aio.insecure_channel(running.grpc_url) as channel:
                call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(
                    iter([service_pb2.ModelInferRequest(model_name="ensemble").SerializeToString()])
                )
                with pytest.raises(grpc.aio.AioRpcError) as status:
                    async for _ in call:
                        pass
            running_one.cancel()
            await asyncio.gather(running_one, return_exceptions=True)
        trailers = dict(status.value.trailing_metadata())
        assert status.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 1000 <= int(trailers["retry-after-ms"]) <= 1251
        assert int(trailers["grpc-retry-pushback-ms"]) == int(trailers["retry-after-ms"])
        rpc_status = pytest.importorskip("google.rpc.status_pb2").Status.FromString(trailers["grpc-status-details-bin"])
        from google.rpc.error_details_pb2 import RetryInfo

        info = RetryInfo()
        assert rpc_status.details[0].Unpack(info)
        assert 1.0 <= info.retry_delay.ToTimedelta().total_seconds() <= 1.26


async def test_a_refusal_beside_running_requests_rides_in_band_and_leaves_them_alone():
    script = Script(tuple(" a" for _ in range(10)), gap_s=0.03)
    async with FakeReplica(lambda seen: script) as replica:
        async with gateway(replica, max_in_flight=1) as running:
            seen = await send_requests(running, *({"request_id": f"r{n}", "inputs": inputs("x", 10)} for n in range(2)))
            assert [text for _, text in seen if "Overloaded" in text]
            assert "".join(text for rid, text in seen if rid in ("r0", "r1") and "Overloaded" not in text) == " a" * 10


async def test_an_open_stream_hears_a_refusal_without_ending_its_side():
    keys = {"TRIDENT_GATEWAY_API_KEYS": "a/b/c=" + "k" * 20}
    async with FakeReplica() as replica, gateway(replica, environ=keys) as running:
        from tritonclient.grpc import InferenceServerClient

        answers: queue.Queue = queue.Queue()

        def talk() -> InferenceServerException:
            client = InferenceServerClient(running.grpc_url)
            client.start_stream(lambda result, error: answers.put(error or result))
            client.async_stream_infer("ensemble", inputs("x", 2))
            try:
                return answers.get(timeout=60)
            finally:
                client.stop_stream(cancel_requests=True)
                client.close()

        error = await asyncio.to_thread(talk)
        assert error.status() == "StatusCode.UNAUTHENTICATED"


async def test_what_the_replica_refuses_comes_through_as_it_said_it():
    refusal = InvalidArgument("top_k", "must be 0 or more, got -3")
    async with FakeReplica(lambda seen: Script(refuse=refusal)) as replica, gateway(replica) as running:
        seen = await send_requests(running, {"inputs": inputs("x", 2)})
        assert "in ensemble 'ensemble', InvalidArgument: top_k" in seen[0][1]
        async with ours(running) as client:
            with pytest.raises(InvalidArgument, match="top_k"):
                await client.generate("x").complete()


async def test_a_request_that_fails_at_one_replica_goes_to_another_before_its_first_token():
    def dying(seen):
        return Script((" a",), status_after=0)

    async with FakeReplica(dying) as bad, FakeReplica() as good:
        async with gateway(bad, good, routing="round_robin") as running:
            for _ in range(6):
                seen = await send_requests(running, {"inputs": inputs("one two", 2)})
                assert "".join(text for _, text in seen) == " one two"
            assert bad.counts.started >= 1 and good.counts.started == 6


async def test_after_the_first_token_nothing_is_tried_again():
    script = Script((" a", " b", " c"), status_after=1)
    async with FakeReplica(lambda seen: script) as one, FakeReplica(lambda seen: script) as two:
        async with gateway(one, two) as running, ours(running) as client:
            with pytest.raises(Unavailable):
                await client.generate("x").complete()
            assert one.counts.started + two.counts.started == 1


async def test_an_unknown_model_and_unreadable_tensors_are_named():
    async with FakeReplica() as replica, gateway(replica) as running:
        seen = await send_requests(running, {"model_name": "engine", "inputs": inputs("x", 2)})
        assert "NotFound: the model 'engine' does not exist" in seen[0][1]
        wrong = InferInput("max_tokens", [1, 2], "INT32")
        wrong.set_data_from_numpy(np.array([[1, 2]], dtype=np.int32))
        seen = await send_requests(running, {"inputs": [wrong]})
        assert "max_tokens: must be one INT32" in seen[0][1]
        with pytest.raises(grpc.aio.AioRpcError) as status:
            await send_requests(running, {"inputs": [wrong]}, headers={"triton_grpc_error": "true"})
        assert status.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with ours(running, model="nowhere") as client:
            with pytest.raises(NotFound):
                await client.generate("x").complete()
        assert replica.counts.started == 0


async def test_an_id_that_no_metadata_can_carry_is_served_and_comes_back():
    async with FakeReplica() as replica, gateway(replica) as running:
        for odd in ("\u65e5\u672c", "line\nbreak", "x" * 100_000):
            seen = await send_requests(running, {"request_id": odd, "inputs": inputs("one", 1)})
            assert "".join(text for _, text in seen) == " one" and {rid for rid, _ in seen} == {odd}


async def test_a_caller_who_wants_statuses_gets_what_the_replica_refuses_as_one():
    script = Script(refuse=InvalidArgument("temperature", "got -1"))
    async with FakeReplica(lambda seen: script) as replica, gateway(replica) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send_requests(running, {"inputs": inputs("x", 1)}, headers={"triton_grpc_error": "true"})
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "temperature" in caught.value.details()


async def test_nobodys_own_mistakes_open_a_breaker_for_the_others():
    def script(seen) -> Script:
        if seen.value("text_input") == "wrong":
            return Script(refuse="[request id: x] input 'max_tokens' already exists in request")
        stall_after = {"hurry": 0, "slow": 1}.get(seen.value("text_input"))
        return Script((" a", " b"), stall_after=stall_after)

    async with FakeReplica(script) as replica, gateway(replica, breaker_failures=2) as running, ours(running) as client:
        for _ in range(3):
            with pytest.raises(InvalidArgument):
                await client.complete("wrong", max_tokens=1)
            with pytest.raises(DeadlineExceeded):
                await client.complete("hurry", max_tokens=2, timeout_s=0.02)
            with pytest.raises(DeadlineExceeded):
                async for _ in client.generate("slow", max_tokens=2, timeout_s=0.15):
                    pass
            body = {"model": "demo", "prompt": "hurry"}
            status, _, _ = await running.post("/v1/completions", body, x_trident_timeout_s="0.02")
            assert status == 504
        assert (await client.complete("good", max_tokens=2)).text == " a b"


async def test_a_caller_that_leaves_does_not_make_a_bad_replica_a_good_one():
    def script(seen) -> Script:
        return Script((" a",), stall_after=0) if seen.value("text_input") == "leave" else Script(refuse="engine boom")

    async with FakeReplica(script) as replica, gateway(replica, breaker_failures=2) as running, ours(running) as client:
        with pytest.raises(EngineFailed):
            await client.complete("x", max_tokens=1)
        leaving = asyncio.ensure_future(client.complete("leave", max_tokens=1))
        await until(lambda: replica.counts.running == 1)
        leaving.cancel()
        await until(lambda: replica.counts.running == 0)
        with pytest.raises(EngineFailed):
            await client.complete("x", max_tokens=1)
        with pytest.raises(Unavailable):
            await client.complete("x", max_tokens=1)


def test_an_output_in_another_form_is_refused_by_name():
    for parameter in ("classification", "shared_memory_region"):
        request = service_pb2.ModelInferRequest()
        request.outputs.add(name="text_output").parameters[parameter].int64_param = 2
        with pytest.raises(InvalidArgument, match=f"text_output.*{parameter}"):
            kserve.read(request, 1.0)


async def test_keys_are_asked_for():
    class Keys:
        def tenant(self, api_key):
            if api_key != "right":
                raise Unauthenticated("no such key")
            return Tenant("acme")

    async with FakeReplica() as replica, gateway(replica, keys=Keys(), header_timeout_s=0.5) as running:
        async with ours(running) as client:
            with pytest.raises(Unauthenticated):
                await client.generate("x").complete()
        async with ours(running, api_key="right") as client:
            assert (await client.generate("one", max_tokens=1).complete()).text == " one"
        async with grpc.aio.insecure_channel(running.grpc_url) as channel:
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
            assert await asyncio.wait_for(call.code(), 20) == grpc.StatusCode.UNAUTHENTICATED  # without any request
        assert (await running.metrics())[CODE % "UNAUTHENTICATED"] == 2


async def test_questions_about_server_and_model_are_answered():
    async with FakeReplica() as replica, gateway(replica) as running:
        async with triton.InferenceServerClient(running.grpc_url) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("ensemble") and not await client.is_model_ready("engine")
            assert await client.is_model_ready("ensemble", "1") and not await client.is_model_ready("ensemble", "2")
            index = [(one.name, one.state) for one in (await client.get_model_repository_index()).models]
            assert index == [("demo", "READY")] and await client.is_model_ready("demo")
            assert (await client.get_server_metadata()).name == "triton"
            assert (await client.get_model_metadata("ensemble")).name == "ensemble"
            assert (await client.get_model_config("ensemble")).config.model_transaction_policy.decoupled
            with pytest.raises(InferenceServerException, match="NOT_FOUND|does not exist"):
                await client.get_model_metadata("engine")
            with pytest.raises(InferenceServerException, match="decoupled"):
                await client.infer("ensemble", inputs("x", 2))


async def test_the_index_of_models_says_which_have_no_replica():
    async with gateway() as running, triton.InferenceServerClient(running.grpc_url) as client:
        [model] = (await client.get_model_repository_index()).models
        assert (model.name, model.version, model.state) == ("demo", "1", "UNAVAILABLE")
        assert model.reason == "no replica is ready"
        call = client._client_stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True))
        assert not (await call).models


async def test_the_packed_ensemble_is_offered_where_a_replica_has_it():
    async with FakeReplica() as plain, FakeReplica(packed=True) as packed:
        async with gateway(plain) as running, triton.InferenceServerClient(running.grpc_url) as client:
            assert not await client.is_model_ready("ensemble_packed")
            with pytest.raises(InferenceServerException, match="no replica is ready"):
                await client.get_model_metadata("ensemble_packed")
        async with gateway(plain, packed) as running, triton.InferenceServerClient(running.grpc_url) as client:
            await until(lambda: any(replica.metrics.packed for replica in running.service.replicas.all()))
            assert await client.is_model_ready("ensemble_packed")
            assert (await client.get_model_metadata("ensemble_packed")).name == "ensemble_packed"
            assert (await client.get_model_config("ensemble_packed")).config.name == "ensemble_packed"


SCRIPTS = {
    "length": Script((" a", " b", " c", " d", " e"), tokens_per_response=2, cached_tokens=3),
    "refused": Script(refuse=InvalidArgument("top_p", "must be less")),
    "failed at once": Script((), fail_after=0, error=EngineFailed("gone")),
    "failed": Script((" a", " b", " c"), fail_after=2, error=EngineFailed("gone")),
    "status": Script((" a", " b", " c"), status_after=1),
    "cut": Script((" a", " b"), silent_end=True, finish_reason=None),
}


async def read_all(running: Running, model: str) -> tuple:
    """What a caller gets of one stream, whatever messages it came in."""
    deltas, error = [], None
    async with ours(running, model=model) as client:
        try:
            async for delta in client.generate("one two", max_tokens=5, request_id="r1"):
                deltas.append(delta)
        except TridentError as raised:
            error = type(raised), str(raised)
    return *(astuple(join(deltas, "r1", 0.0, 0.0))), error


async def counted(running: Running, requests: int = 1) -> dict[str, float]:
    """The metrics once so many requests are counted: their callers may have the end before that."""
    async with asyncio.timeout(60):
        while True:
            page = await running.metrics()
            found = (value for name, value in page.items() if name.startswith("trident_gateway_requests_total"))
            if sum(found) == requests:
                return page
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("packed", [False, True])
async def test_a_caller_of_the_packed_ensemble_gets_and_pays_what_one_of_the_ensemble_does(packed, hidden, monkeypatch):
    monkeypatch.setattr(Service, "reports_cached_tokens", not hidden)
    for name, script in SCRIPTS.items():
        async with (
            FakeReplica(lambda seen, script=script: script, packed=packed) as replica,
            gateway(replica, continuations=0) as running,
        ):
            await until(lambda: running.service.replicas.all()[0].metrics.packed is packed)
            answers, pages = [], [{}]
            for model in ("ensemble", "ensemble_packed"):
                answers.append(await read_all(running, model))
                pages.append(await counted(running, len(pages)))
            assert answers[0] == answers[1], name
            assert [seen.model for seen in replica.seen] == ["ensemble", "ensemble_packed" if packed else "ensemble"]
            for metric in pages[2]:
                if metric.startswith(("trident_gateway_tokens_total", "trident_gateway_requests_total")):
                    assert pages[2][metric] == 2 * pages[1].get(metric, 0), (name, metric)


@pytest.mark.parametrize(("name", "code"), [("length", "OK"), ("failed", "INTERNAL"), ("failed at once", "INTERNAL")])
@pytest.mark.parametrize("model", ["ensemble", "ensemble_packed"])
async def test_a_client_that_leaves_with_the_last_message_has_not_cancelled(model, name, code, monkeypatch):
    write = ResponseWriter.write

    async def write_and_hear_late(writer, data):
        await write(writer, data)
        await asyncio.sleep(0.2)

    monkeypatch.setattr(ResponseWriter, "write", write_and_hear_late)
    script = dataclasses.replace(SCRIPTS[name], tokens_per_response=9)
    async with FakeReplica(lambda seen: script, packed=True) as replica, gateway(replica, continuations=0) as running:
        await until(lambda: running.service.replicas.all()[0].metrics.packed)
        async with ours(running, model=model) as client, contextlib.aclosing(client.generate("x", max_tokens=5)) as got:
            with contextlib.suppress(EngineFailed):
                async for delta in got:
                    if delta.finish_reason:
                        break
        page = await counted(running)
    labels = f'code="{code}",operation="text_completion",protocol="grpc"'
    assert page[f"trident_gateway_requests_total{{{labels}}}"] == 1
    ended = [name for name in page if name.startswith("gen_ai_server_request_duration_seconds_count")]
    assert len(ended) == 1 and "Cancelled" not in ended[0]


async def test_a_stream_of_the_packed_ensemble_goes_on_at_a_replica_without_it():
    died = Script(tuple(f" {n}" for n in range(9)), status_after=4)
    whole = dataclasses.replace(died, status_after=None)
    async with FakeReplica(lambda seen: died, packed=True) as one, gateway(one, continuations=2) as running:
        await until(lambda: running.service.replicas.all()[0].metrics.packed)
        reading = asyncio.ensure_future(read_all(running, "ensemble_packed"))
        await until(lambda: one.counts.started == 1 and not one.counts.running)
        one.script, one.packed = (lambda seen: whole), False
        got = await reading
        assert got[0] == "".join(whole.tokens) and got[-1] is None
        assert [seen.model for seen in one.seen][0] == "ensemble_packed" and one.seen[-1].model == "ensemble"
        assert one.seen[-1].inputs["continue_ids"] == list(range(4))
        assert (await running.metrics())['trident_gateway_continuations_total{result="continued"}'] >= 1


async def test_another_output_of_the_packed_ensemble_is_refused_by_name():
    async with FakeReplica() as replica, gateway(replica) as running:
        for outputs in (["packed_delta"], ["packed_delta", "text_output"]):
            requested = [InferRequestedOutput(name) for name in outputs]
            request = {"model_name": "ensemble_packed", "inputs": inputs("x", 2), "outputs": requested}
            async with triton.InferenceServerClient(running.grpc_url) as client:

                async def iterate(request=request):
                    yield request

                async for _, error in client.stream_infer(iterate()):
                    assert (error is None) is (len(outputs) == 1), error
                    assert error is None or "outputs: must be packed_delta alone, got 'text_output'" in str(error)


async def test_a_message_over_the_limit_is_refused():
    async with FakeReplica() as replica, gateway(replica, max_body_bytes=2048) as running, ours(running) as client:
        with pytest.raises(Overloaded, match="larger than max"):
            await client.generate("x" * 4096).complete()
        assert replica.counts.started == 0


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("sent", [True, False])
def test_max_tokens_can_be_lowered_wherever_it_was(inline: bool, sent: bool):
    request = service_pb2.ModelInferRequest(model_name="ensemble")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    if inline:
        request.inputs[0].contents.bytes_contents.append(b"hello")
    else:
        request.raw_input_contents.append(b"\x05\x00\x00\x00hello")
    if sent:
        request.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1])
        if inline:
            request.inputs[1].contents.int_contents.append(100)
        else:
            request.raw_input_contents.append((100).to_bytes(4, "little"))
    assert kserve.read(request, 5.0).max_tokens == (100 if sent else kserve.DEFAULT_MAX_TOKENS)
    kserve.set_max_tokens(request, 7)
    again = kserve.read(request, 5.0)
    assert (again.max_tokens, again.text_input, again.timeout_s) == (7, "hello", 5.0)


@pytest.mark.parametrize("inline", [True, False])
def test_a_prompt_of_ids_is_read_for_admission(inline: bool):
    request = service_pb2.ModelInferRequest(model_name="ensemble")
    request.inputs.add(name="input_ids", datatype="INT32", shape=[1, 3])
    request.inputs.add(name="truncate_prompt_tokens", datatype="INT32", shape=[1, 1])
    if inline:
        request.inputs[0].contents.int_contents.extend([5, 6, 7])
        request.inputs[1].contents.int_contents.append(2)
    else:
        request.raw_input_contents.extend([struct.pack("<3i", 5, 6, 7), struct.pack("<i", 2)])
    read = kserve.read(request, 5.0)
    assert (read.text_input, read.input_ids, read.truncate_prompt_tokens) == (None, (5, 6, 7), 2)
    assert read.continue_ids == ()
    count = PromptTokens().estimate(read)
    assert (count.tokens, count.least, count.likely, count.exact) == (2, 2, 2, True)
    request.inputs[0].datatype = "INT64"
    with pytest.raises(InvalidArgument, match="input_ids: must be INT32"):
        kserve.read(request, 5.0)


def test_shared_memory_is_refused_by_name():
    request = service_pb2.ModelInferRequest(model_name="ensemble")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    tensor.parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(InvalidArgument, match="text_input: must be sent inline"):
        kserve.read(request, 5.0)


async def test_what_admission_says_comes_as_metadata_before_the_answer_and_as_trailers():
    key = "k" * 20
    config = f'salt = "{"00" * 16}"\n[orgs.a]\ntokens_per_minute = 6000\nrequests_per_minute = 2'
    environ = {"TRIDENT_GATEWAY_API_KEYS": f"a/b/c={key}"}
    sent = service_pb2.ModelInferRequest(model_name="ensemble")
    sent.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    sent.raw_input_contents.append(b"\x01\x00\x00\x00x")
    async with FakeReplica() as replica, gateway(replica, config=config, environ=environ) as running:
        async with grpc.aio.insecure_channel(running.grpc_url) as channel:
            ask = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")

            async def once() -> tuple[dict, dict]:
                call = ask(iter([sent.SerializeToString()]), metadata=(("authorization", f"Bearer {key}"),))
                before = dict(await call.initial_metadata())
                assert [data async for data in call]
                return before, dict(await call.trailing_metadata())

            before, after = await once()
            assert before["x-ratelimit-limit-tokens"] == "6000" == after["x-ratelimit-limit-tokens"]
            assert before["x-ratelimit-remaining-requests"] == "1"
            await once()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await once()
        trailers = dict(refused.value.trailing_metadata())
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert trailers["x-ratelimit-remaining-requests"] == "0" and int(trailers["retry-after-ms"]) > 1000


class Broken(FakeReplica):
    """Answers every request with these messages, whatever they are."""

    def __init__(self, *messages: bytes) -> None:
        super().__init__()
        self.messages = messages

    async def generate(self, seen, context, asked_empty_final):
        for message in self.messages:
            yield message


def serialised(text: str, final: bool = False, reason: FinishReason | None = None) -> bytes:
    texts = [text] if text else []
    return content("r1", "ensemble", 0, texts, reason, Script(), range(len(tensors.ENSEMBLE_OUTPUTS)), 3, final)


async def test_an_answer_that_ends_in_the_middle_is_not_passed_on_as_a_whole_one():
    async with (
        Broken(serialised(" a"), serialised(" b")) as replica,
        gateway(replica) as running,
        ours(running) as client,
    ):
        got = []
        with pytest.raises(Unavailable, match="the connection to its replica was lost; quote request"):
            async for delta in client.generate("x"):
                got.append(delta.text)
        assert got == [" a", " b"]
        assert (await counted(running))[CODE % "UNAVAILABLE"] == 1


@pytest.mark.parametrize("rubbish", [b"\xff\xff", b"\x12\xff\xff\xff\x7f"])
async def test_what_cannot_be_read_is_not_passed_on_but_said_to_be_so(rubbish: bytes):
    async with Broken(serialised(" a"), rubbish) as replica, gateway(replica) as running:
        seen = await send_requests(running, {"request_id": "r1", "inputs": inputs("x", 2)})
        assert (
            seen[0] == ("r1", " a")
            and "EngineFailed: the engine failed while it served the request; quote" in seen[1][1]
        )
        assert len(seen) == 2 and (await counted(running))[CODE % "INTERNAL"] == 1


async def test_nothing_is_passed_on_behind_the_end_of_an_answer():
    end = serialised(" a", True, FinishReason.LENGTH)
    async with Broken(end, serialised(" b"), end) as replica, gateway(replica) as running:
        assert await send_requests(running, {"request_id": "r1", "inputs": inputs("x", 2)}) == [("r1", " a")]


async def test_an_error_that_a_replica_says_in_band_is_counted_as_one():
    async with FakeReplica(lambda seen: Script(refuse=EngineFailed("no"))) as replica, gateway(replica) as running:
        await send_requests(running, {"inputs": inputs("x", 2)})
        assert (await counted(running))[CODE % "INTERNAL"] == 1


@pytest.mark.parametrize(("outputs", "errors"), [(["text_output"], 1), (["text_output", "error_message"], 0)])
async def test_an_error_behind_text_is_sent_once(outputs: list[str], errors: int):
    script = Script(error=EngineFailed("no"))
    order = range(len(tensors.ENSEMBLE_OUTPUTS))
    message = content("r1", "ensemble", 0, [" a"], FinishReason.ERROR, script, order, 3, True)
    async with Broken(message) as replica, gateway(replica, continuations=0) as running:
        requested = [InferRequestedOutput(name) for name in outputs]
        seen = await send_requests(running, {"inputs": inputs("x", 2), "outputs": requested})
        assert seen[0] == ("r1", " a") and len(seen[1:]) == errors
        assert (await counted(running))[CODE % "INTERNAL"] == 1


async def test_a_caller_that_requests_the_text_alone_pays_for_every_token_and_gets_the_text_alone():
    script = Script(tuple(" a" for _ in range(50)), tokens_per_response=25)
    async with FakeReplica(lambda seen: script) as replica, gateway(replica) as running:
        outputs = [InferRequestedOutput("text_output")]
        names = []

        async def iterate():
            yield {"model_name": "ensemble", "inputs": inputs("x", 50), "outputs": outputs}

        async with triton.InferenceServerClient(running.grpc_url) as client:
            async for result, error in client.stream_infer(iterate()):
                assert error is None and result.as_numpy("text_output").flatten()[0] == b" a" * 25
                names.append({output.name for output in result.get_response().outputs})
        assert len(names) == 2 and not any(kserve.COUNTS & seen for seen in names)
        page = await running.metrics()
        assert page['trident_gateway_tokens_total{direction="output",source="engine",tenant="anonymous"}'] == 50
        assert page['trident_gateway_generations_total{end="stop",pool="",source="engine"}'] == 1


def test_outputs_can_be_taken_out_of_a_response():
    left = service_pb2.ModelStreamInferResponse.FromString(kserve.without_outputs(serialised(" a"), kserve.COUNTS))
    names = [output.name for output in left.infer_response.outputs]
    assert not kserve.COUNTS & set(names)
    assert len(left.infer_response.raw_output_contents) == len(names)
    assert left.infer_response.raw_output_contents[names.index("text_output")] == b"\2\0\0\0 a"


async def test_metadata_comes_from_a_replica_that_answers():
    async with FakeReplica() as one, FakeReplica() as two, gateway(one, two, probe_interval_s=60.0) as running:
        await until(lambda: len(running.service.replicas.ready()) == 2)
        async with triton.InferenceServerClient(running.grpc_url) as client:
            for dead in (one, two):
                await dead.stop()
                if dead is one:
                    assert (await client.get_model_metadata("ensemble")).name == "ensemble"
            with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
                await client.get_model_metadata("ensemble")


async def test_a_reader_that_takes_nothing_frees_the_replica_and_hears_why_when_it_reads_on():
    script = Script(tuple("z" * 2000 for _ in range(20_000)))
    async with FakeReplica(lambda seen: script) as replica, gateway(replica, stall_timeout_s=0.2) as running:
        async with grpc.aio.insecure_channel(running.grpc_url) as channel:
            request = service_pb2.ModelInferRequest(model_name="ensemble").SerializeToString()
            call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([request]))
            await call.read()
            await until(lambda: replica.counts.cancelled == 1, 60.0)
            with pytest.raises(grpc.aio.AioRpcError, match="the client read nothing for 0.2 s") as caught:
                while await asyncio.wait_for(call.read(), 60.0) is not grpc.aio.EOF:
                    pass
            assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_a_traced_request_has_spans_from_the_engine_itself_and_its_caller_gets_no_more_for_it():
    exporter = InMemorySpanExporter()
    async with FakeReplica() as replica, gateway(replica, tracing=Tracing(exporter=exporter)) as running:
        for outputs in (None, [InferRequestedOutput("text_output")]):
            await send_requests(running, {"inputs": inputs("x", 2), "outputs": outputs})
            assert replica.seen[-1].value("return_perf_metrics") is True
        running.service.tracing.close()
        names = [span.name for span in exporter.get_finished_spans()]
        for name in ("queue", "route", "replica", "tokenizer", "engine", "engine.prefill", "detokenizer"):
            assert names.count(name) == 2, name


@pytest.mark.parametrize("inline", [False, True])
def test_timings_are_asked_for_however_the_tensors_are_sent_and_once(inline: bool):
    request = service_pb2.ModelInferRequest()
    prompt = request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    if inline:
        prompt.contents.bytes_contents.append(b"x")
    else:
        request.raw_input_contents.append(b"\1\0\0\0x")
    request.outputs.add(name="text_output")
    assert kserve.request_timings(request) == kserve.TIMINGS and not kserve.request_timings(request)
    assert [(one.name, list(one.shape)) for one in request.inputs[1:]] == [("return_perf_metrics", [1, 1])]
    assert list(request.inputs[1].contents.bool_contents) == ([True] if inline else [])
    assert list(request.raw_input_contents[1:]) == ([] if inline else [b"\1"])
