"""One error in each protocol's words. What replicas and upstreams say when they fail reaches the log, and callers get a
sentence that is safe to read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from starlette.requests import Request
from starlette.responses import Response
from tritonclient.grpc import service_pb2

from clients.wire.failures import from_rpc, retry_hint
from contract import tensors
from contract.errors import (
    BY_NAME,
    Cancelled,
    EngineFailed,
    InvalidArgument,
    NotFound,
    Overloaded,
    PermissionDenied,
    PromptTooLong,
    TridentError,
    Unauthenticated,
    Unavailable,
    make,
)
from contract.generation import FinishReason
from gateway.api import error_responses, kserve
from gateway.api.error_responses import for_caller
from gateway.batch.jsonl import refused
from gateway.batch.store import Line
from gateway.routing.backend_errors import from_backend
from tests.fakes.replica import FakeReplica, Script, SeenRequest, content
from tests.gateway.openai_upstream import upstream
from tests.gateway.routing.test_overflow import elsewhere, pressed
from tests.gateway.running import gateway

SECRET = "kaputt at /secret/path, signal 9, wire type 7"
REQUEST = {"model": "demo", "prompt": "a b", "max_tokens": 5}
STATUSES = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


@pytest.mark.parametrize("kind", BY_NAME.values())
def test_every_kind_of_error_of_a_backend_has_a_sentence_and_the_request_id(kind: type[TridentError]):
    error = from_backend(make(kind, SECRET))
    error.attempts = 3
    told = for_caller(error, "r-17")
    assert "secret" not in str(told) and "r-17" in str(told) and "3 times" in str(told)
    assert for_caller(told) is told
    if kind in (Unauthenticated, PermissionDenied):  # it is the gateway that may not
        assert type(told) is Unavailable and SECRET in str(error)
    elif kind is TridentError:
        assert type(told) is EngineFailed
    else:
        assert type(told) is kind
    # A caller that does not check is safe as well.
    body = json.dumps(error_responses.error_object(error)) + str(error_responses.grpc_status(error))
    assert "secret" not in body and b"secret" not in error_responses.http(error)[2]
    line = Line("batch_1", 3, "mine", b"{}")
    assert b"secret" not in refused(line, error) and b"quote request batch_req_1_3" in refused(line, error)


def test_when_to_come_back_is_kept():
    for kind in (Overloaded, Unavailable):
        error = kind(SECRET, 7.0)
        assert for_caller(from_backend(error)).retry_after_s == 7.0


def test_a_complaint_about_the_request_is_the_callers_to_read():
    for text_shown in (
        InvalidArgument("top_k", "must be 0 or more, got -3"),
        PromptTooLong("text_input", "has 9 tokens, allowed are 8"),
        InvalidArgument("", "in ensemble 'ensemble', unexpected inference input 'x' for model 'ensemble'"),
    ):
        assert for_caller(from_backend(text_shown), "r") is text_shown
    for hidden in (InvalidArgument("", SECRET), InvalidArgument("/secret/path", "x"), NotFound("no /secret/model")):
        assert "secret" not in str(for_caller(from_backend(hidden), "r"))


def broken(**script: object) -> Callable[[SeenRequest], Script]:
    return lambda seen: Script((" a", " b", " c"), **script)


FAILURES = {
    "refused in band": broken(refuse=EngineFailed(SECRET)),
    "refused in Triton's way": broken(refuse=f"in ensemble 'ensemble', {SECRET}"),
    "refused as invalid": broken(refuse=f"failed to parse {SECRET}"),
    "failed before the first token": broken(fail_after=0, error=EngineFailed(SECRET)),
    "failed midway": broken(fail_after=2, error=EngineFailed(SECRET)),
    **{f"{code.name} at once": broken(status_after=0, status=(code, SECRET, ())) for code in STATUSES},
    **{f"{code.name} midway": broken(status_after=1, status=(code, SECRET, ())) for code in STATUSES[:3]},
}


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
async def test_no_words_of_a_replica_reach_callers_and_all_of_them_reach_the_log(
    failure: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    async with FakeReplica(FAILURES[failure]) as replica, gateway(replica, breaker_failures=1000) as running:
        text_shown = []
        for stream in (True,) if "midway" in failure else (False, True):  # a whole answer has no middle
            async with aiohttp.ClientSession(headers={"x-request-id": f"http-{stream}"}) as session:
                url = f"{running.base_url}/v1/completions"
                async with session.post(url, json={**REQUEST, "stream": stream}) as answer:
                    text_shown.append(await answer.text())
                    assert '"error"' in text_shown[-1] and f"quote request http-{stream}" in text_shown[-1]
        for status in ("true", "false"):
            text_shown.append(await raw(running.grpc_url, f"grpc-{status}", status))
            assert f"quote request grpc-{status}" in text_shown[-1]
        assert not [
            text for text in text_shown for word in ("secret", "kaputt", "signal", "wire", replica.url) if word in text
        ]
    fields = [record.fields for record in caplog.records if record.name == "gateway.request"]
    logged = {one["request_id"] for one in fields if "kaputt" in one["error"]}
    assert (
        logged >= {"http-True", "grpc-true"} and len(logged) >= len(text_shown) - 1
    )  # the last may find no replica healthy


async def raw(url: str, request_id: str, status: str, outputs: tuple[str, ...] = ()) -> str:
    """Everything that one request brings over gRPC, messages, details and trailers, as one text."""
    request = service_pb2.ModelInferRequest(model_name="ensemble", id=request_id)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(b"\1\0\0\0x")
    for name in outputs:
        request.outputs.add(name=name)
    text_shown: list[str] = []
    async with grpc.aio.insecure_channel(url) as channel:
        method = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        call = method(iter([request.SerializeToString()]), metadata=(("triton_grpc_error", status),))
        try:
            async for data in call:
                text_shown.append(data.decode(errors="replace"))
        except grpc.aio.AioRpcError as error:
            text_shown += [error.details() or "", str(error.trailing_metadata())]
    return "\n".join(text_shown)


@pytest.mark.slow
async def test_an_error_in_the_same_message_as_text_is_rewritten_and_the_text_kept():
    error = EngineFailed(SECRET)

    async def generate(seen: SeenRequest, context: object, sends_final: bool):
        script = Script(error=error)
        order = range(len(tensors.ENSEMBLE_OUTPUTS))
        yield content(seen.id, "ensemble", 0, [" kept"], FinishReason.ERROR, script, order, 3, True)

    async with FakeReplica() as replica, gateway(replica) as running:
        replica.generate = generate
        for outputs in ((), ("text_output",), ("text_output", "error_message")):
            text_shown = await raw(running.grpc_url, "mine", "false", outputs)
            assert " kept" in text_shown and "secret" not in text_shown and "quote request mine" in text_shown


def test_only_the_error_of_a_message_is_replaced():
    answer = service_pb2.ModelStreamInferResponse(error_message=SECRET)
    answer.infer_response.id = "r"
    answer.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    answer.infer_response.outputs.add(name="error_message", datatype="BYTES", shape=[1, 1])
    answer.infer_response.raw_output_contents.extend([b"\1\0\0\0x", b"\1\0\0\0y"])
    left = service_pb2.ModelStreamInferResponse.FromString(
        kserve.with_error(answer.SerializeToString(), Cancelled("é"))
    )
    assert (left.error_message, left.infer_response.id) == ("Cancelled: é", "r")
    assert left.infer_response.raw_output_contents[0] == b"\1\0\0\0x"
    assert left.infer_response.raw_output_contents[1] == b"\x0d\0\0\0" + "Cancelled: é".encode()


@pytest.mark.slow
async def test_an_upstreams_refusal_names_our_parameter_and_nothing_of_its_own(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    cases = {
        ("max_tokens", None): ("max_tokens", "invalid_value"),
        ("organization", None): (None, "invalid_value"),
        (None, "context_length_exceeded"): (None, "context_length_exceeded"),
    }
    for (param, code), (told, told_code) in cases.items():
        message = "account org-17 of acme"
        error = {"error": {"message": message, "param": param, "code": code}}
        async with upstream(status=400, error=error) as there, FakeReplica() as replica:
            async with gateway(replica, config=elsewhere(there), environ={"UPSTREAM": ""}) as running:
                held = await pressed(running, replica)
                status, _, body = await running.post("/v1/completions", REQUEST, x_request_id="r-9")
                assert (status, body["error"]["param"], body["error"]["code"]) == (400, told, told_code)
                assert "org-17" not in str(body) and "r-9" in body["error"]["message"]
                held.cancel()
        records = [
            record.fields for record in caplog.records if getattr(record, "fields", {}).get("request_id") == "r-9"
        ]
        assert records and all(message in one["error"] for one in records)
        caplog.clear()


@pytest.mark.slow
async def test_metadata_that_a_replica_cannot_give_is_refused_without_its_words(caplog: pytest.LogCaptureFixture):
    async with FakeReplica() as replica, gateway(replica) as running:
        replica.model = "other"  # it does not know the model it is asked about any more
        async with grpc.aio.insecure_channel(running.grpc_url) as channel:
            request = service_pb2.ModelMetadataRequest(name="ensemble").SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as refused_:
                await channel.unary_unary("/inference.GRPCInferenceService/ModelMetadata")(request)
        assert refused_.value.code() is grpc.StatusCode.NOT_FOUND and "unknown model" not in refused_.value.details()
    assert "unknown model" in caplog.text


def test_the_mark_does_not_outlive_the_error():
    assert from_backend(EngineFailed("x")).internal and not EngineFailed("x").internal


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != "TridentError"])
def test_every_error_has_a_status_in_both_protocols(name: str):
    error = make(BY_NAME[name], "field: problem")
    status, headers, body = error_responses.http(error)
    table = json.loads(body)["error"]
    assert status == error.http_status and set(table) == {"message", "type", "param", "code"}
    assert (b"retry-after" in dict(headers)) is error.retryable
    code, details, trailers = error_responses.grpc_status(error)
    assert type(from_rpc(code, details)).http_status == error.http_status
    assert (retry_hint(trailers).after_s is not None) is error.retryable


def test_a_field_is_named_and_a_wait_is_told_in_whole_seconds_upward():
    assert json.loads(error_responses.http(InvalidArgument("top_p", "is wrong"))[2])["error"]["param"] == "top_p"
    headers = dict(error_responses.http(Overloaded("full", 1.2))[1])
    assert headers[b"retry-after"] == b"2" and headers[b"retry-after-ms"] == b"1200"
    assert dict(error_responses.http(Unauthenticated("who"))[1])[b"www-authenticate"] == b"Bearer"


@pytest.mark.parametrize("after_s", [0.0, 0.25, 2.0, 59.9999999999])
def test_a_grpc_status_carries_a_retry_info_that_googles_own_types_read(after_s: float):
    trailers = dict(error_responses.grpc_status(Overloaded("full: \u00e9", after_s))[2])
    status = Status.FromString(trailers["grpc-status-details-bin"])
    info = RetryInfo()
    assert status.details[0].Unpack(info) and (status.code, status.message) == (8, "full: \u00e9")
    assert info.retry_delay.seconds + info.retry_delay.nanos / 1e9 == pytest.approx(after_s)


def test_the_budgets_headers_go_along():
    error = Overloaded("full", 1.0)
    error.headers = {"x-ratelimit-remaining-tokens": "0"}
    assert dict(error_responses.http(error)[1])[b"x-ratelimit-remaining-tokens"] == b"0"
    assert ("x-ratelimit-remaining-tokens", "0") in error_responses.grpc_status(error)[2]


async def test_an_endpoint_sends_json_or_its_response_or_the_error():
    async def handle(request: Request) -> Any:
        if request.url.path == "/json":
            return {"a": 1}
        if request.url.path == "/text":
            return Response("text", 201)
        raise NotFound("no such key")

    async def sent(path: str) -> tuple[int, bytes]:
        response = await error_responses.answering(handle)(Request({"type": "http", "path": path, "headers": []}))
        return response.status_code, response.body

    assert await sent("/json") == (200, b'{"a":1}') and await sent("/text") == (201, b"text")
    status, body = await sent("/other")
    assert status == 404 and json.loads(body)["error"]["message"] == "no such key"
