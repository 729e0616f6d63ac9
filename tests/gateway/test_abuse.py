"""Callers that mean no good, at both protocols: each is refused in its protocol's own way, and nothing of it is left.

Every test runs its abuse inside ``unharmed``, which looks afterwards: no generation in flight, no request at the
replica, no open file more than before, and an ordinary request is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from tritonclient.grpc import service_pb2

from clients.wire import infer_request
from clients.wire.request import build
from contract.errors import Unauthenticated
from gateway.config.tenant import Tenant
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow

PATH = "/v1/completions"
REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 2}
BODY = json.dumps(REQUEST).encode()
LINE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SHORT = {"header_timeout_s": 1.0, "body_timeout_s": 1.0}


@contextlib.asynccontextmanager
async def unharmed(replica: FakeReplica | None = None, **overrides: Any) -> AsyncIterator[Running]:
    async with replica or FakeReplica() as serving, gateway(serving, **overrides) as running:
        keys = {"authorization": "Bearer right"}
        assert (await running.post(PATH, REQUEST, **keys))[0] == 200  # opens what stays open, at both protocols
        async with grpc.aio.insecure_channel(running.grpc_url) as channel:
            await streamed(channel, message(), (("authorization", "Bearer right"),))
        before = open_files()
        yield running
        await until(lambda: serving.counts.running == 0 and open_files() <= before)
        page = await running.metrics()
        assert page["trident_gateway_in_flight"] == 0 and page["trident_gateway_waiting"] == 0
        assert (await running.post(PATH, REQUEST, **keys))[0] == 200


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def exchange(running: Running, data: bytes, patience_s: float = 60.0, port: int = 0) -> bytes:
    """What is answered to these bytes until the connection is closed from the other side, which it must be."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port or running.port)
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    heard = b""
    try:
        async with asyncio.timeout(patience_s) if hasattr(asyncio, "timeout") else contextlib.nullcontext():
            while more := await reader.read(65536):
                heard += more
    except ConnectionError:
        pass
    finally:
        writer.close()
    return heard


def refused(answer: bytes, *statuses: int) -> dict:
    """The error object of the one answer, which has one of these statuses."""
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    head, _, body = answer.partition(b"\r\n\r\n")
    assert int(head.split()[1]) in statuses, answer[:300]
    assert len(body) < 2000
    return json.loads(body)["error"]


TWO_WAYS_TO_READ = {
    "two lengths that differ": LENGTH + b"content-length: 5\r\n\r\n" + BODY,
    "one length twice": LENGTH * 2 + b"\r\n" + BODY,
    "a list of lengths": b"content-length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY,
    "a length and chunks": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED,
    "chunks and a length": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n" + CHUNKED,
    "chunks, twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED,
    "almost chunks": b"transfer-encoding: xchunked\r\n\r\n" + CHUNKED,
    "chunks, then not": b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKED,
    "a space before the colon": b"transfer-encoding : chunked\r\n\r\n" + CHUNKED,
    "a chunk of no size": b"transfer-encoding: chunked\r\n\r\nzz\r\n" + BODY,
    "a chunk of every size": b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + BODY,
    "a length below nothing": b"content-length: -5\r\n\r\n" + BODY,
    "a length with a sign": b"content-length: +%d\r\n\r\n" % len(BODY) + BODY,
    "a length without end": b"content-length: 99999999999999999999999999\r\n\r\n" + BODY,
    "a folded header": b"x-a: b\r\n c\r\n" + LENGTH + b"\r\n" + BODY,
    "a header with a NUL": b"x-a: b\0c\r\n" + LENGTH + b"\r\n" + BODY,
    "a header with half a line end": b"x-a: b\rc\r\n" + LENGTH + b"\r\n" + BODY,
}


async def test_what_can_be_read_two_ways_is_not_read_at_all():
    async with unharmed() as running:
        for name, rest in TWO_WAYS_TO_READ.items():
            assert refused(await exchange(running, LINE + rest), 400)["type"] == "invalid_request_error", name


async def test_what_is_not_http_ends_with_its_connection():
    noise = random.Random(7).randbytes(4096)
    tls_hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise
    async with unharmed(**SHORT) as running:
        for data in (
            noise,
            tls_hello,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
            b"CONNECT x:1 HTTP/1.1\r\n\r\n",
        ):
            refused(await exchange(running, data), 400)
        refused(await exchange(running, b"\r\n\r\n"), 408)


async def test_a_smuggled_second_request_is_never_answered():
    second = b"GET /health/live HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd"
    async with unharmed() as running:
        answer = await exchange(running, LINE + LENGTH + b"\r\n" + BODY + second)
        assert b"\r\nlive\n" not in answer and b" 400 " in answer
        whole = LINE + LENGTH + b"\r\n" + BODY
        closing = LINE + b"connection: close\r\n" + LENGTH + b"\r\n" + BODY
        answer = await exchange(running, whole * 2 + closing)  # pipelining itself is fine
        assert answer.count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("apart", [False, True])
async def test_an_offer_of_another_protocol_is_declined_and_its_body_is_no_second_request(apart: bool):
    """Java's own HTTP client offers HTTP/2 with its first request, whatever that carries."""
    offer = b"connection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    inner = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    async with unharmed() as running:
        for body, status in ((BODY, 200), (inner, 400)):
            head = LINE + offer + b"content-length: %d\r\n\r\n" % len(body)
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(head if apart else head + body)
            await writer.drain()
            if apart:
                await asyncio.sleep(0.05)  # so that they most likely arrive apart; together they must do as well
                writer.write(body)
            answer = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"HTTP/1.1 ") == 1
            assert b"\r\nlive\n" not in answer


@pytest.mark.parametrize("stream", [False, True])
async def test_who_sends_ahead_and_leaves_frees_the_replica(stream: bool):
    replica = FakeReplica(lambda seen: Script((" a",), stall_after=0))
    async with replica, gateway(replica) as running:
        body = json.dumps({**REQUEST, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(
            LINE + b"content-length: %d\r\n\r\n" % len(body) + body + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
        )
        await until(lambda: replica.counts.running == 1)
        writer.close()
        await until(lambda: replica.counts.cancelled == 1 and not running.service.live)


@pytest.mark.parametrize(
    "ahead",
    [b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" * 20, LINE + b"content-length: 200000\r\n\r\n" + bytes(200_000)],
    ids=["many", "much"],
)
async def test_who_sends_too_far_ahead_is_cut_off(ahead: bytes):
    async with FakeReplica(lambda seen: Script((" a",), stall_after=0)) as replica, gateway(replica) as running:
        assert await exchange(running, LINE + LENGTH + b"\r\n" + BODY + ahead, 30) == b""
        await until(lambda: replica.counts.running == 0 and not running.service.live)


async def test_floods_of_headers_and_long_lines_are_refused_while_they_come():
    async with unharmed() as running:
        many = LINE + b"".join(b"x-%d: y\r\n" % n for n in range(5000)) + b"\r\n"
        for data in (many, LINE + b"x: " + b"y" * 200_000, b"GET /" + b"a" * 200_000):
            assert refused(await exchange(running, data), 431)["code"] == "headers_too_large"


@pytest.mark.slow
async def test_slow_callers_are_cut_off_and_delay_no_other():
    """A hundred that stop in their headers and a hundred that stop in their body."""
    async with unharmed(**SHORT) as running:
        slow = [exchange(running, LINE + b"x-a: b\r\n") for _ in range(100)]
        slow += [exchange(running, LINE + LENGTH + b"\r\n" + BODY[:5]) for _ in range(100)]
        answers = asyncio.gather(*slow)
        assert (await running.post(PATH, REQUEST))[0] == 200
        for answer in await answers:
            assert refused(answer, 408)["code"] == "timeout"


async def test_callers_that_leave_midway_leave_nothing():
    async with unharmed(FakeReplica(lambda seen: Script((" a", " b")))) as running:
        for size in (10, len(LINE), len(LINE + LENGTH) + 10):
            _, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write((LINE + LENGTH + b"\r\n" + BODY)[:size])
            await writer.drain()
            writer.transport.abort()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_ten_megabytes_gets_its_answer_although_it_was_not_read(chunked: bool):
    """Its caller sends all of it before it reads a word, as HTTP clients do."""
    body = b'{"model":"demo","prompt":"' + b"a" * 10_000_000 + b'"}'
    if chunked:
        data = LINE + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        data = LINE + b"content-length: %d\r\n\r\n" % len(body) + body
    async with unharmed() as running:
        assert refused(await exchange(running, data), 413)["code"] == "request_too_large"


@pytest.mark.slow
async def test_who_announces_too_much_and_sends_nothing_is_refused_too():
    async with unharmed() as running:
        data = LINE + b"content-length: 1099511627776\r\nexpect: 100-continue\r\n\r\n"
        answer = await exchange(running, data)
        assert b"100 Continue" not in answer and refused(answer, 413)


@pytest.mark.slow
async def test_a_caller_without_a_key_cannot_make_us_hold_a_body():
    class Keys:
        def tenant(self, api_key: str) -> Tenant:
            if api_key != "right":
                raise Unauthenticated("no such key")
            return Tenant("acme")

    async with unharmed(keys=Keys()) as running:
        data = LINE + b"authorization: Bearer wrong\r\ncontent-length: 4000000\r\nexpect: 100-continue\r\n\r\n"
        answer = await exchange(running, data)
        assert b"100 Continue" not in answer and refused(answer, 401)["code"] == "invalid_api_key"


def with_(**fields: Any) -> bytes:
    return json.dumps({**REQUEST, **fields}).encode()


NOT_JSON = {
    "nothing": b"",
    "NUL": b"\0",
    "a list": b"[]",
    "null": b"null",
    "a hundred thousand brackets": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "a deep prompt": b'{"model":"demo","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "NaN": b'{"model":"demo","prompt":"a","temperature":NaN}',
    "Infinity": b'{"model":"demo","prompt":"a","temperature":Infinity}',
    "beyond any number": b'{"model":"demo","prompt":"a","temperature":1e999}',
    "a number of 5000 digits": b'{"model":"demo","prompt":"a","max_tokens":' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"model":"demo","prompt":"\xff\xfe"}',
    "half a character": b'{"model":"demo","prompt":"\\ud800"}',
    "a byte order mark": b"\xef\xbb\xbf" + BODY,
    "UTF-16": BODY.decode().encode("utf-16"),
    "more behind it": BODY + b"x",
}
WRONG_FIELDS = {
    "n": (10**9, 0, -1, True, "3", 17),
    "stop": (["a"] * 101, "", {"a": 1}, [1] * 150_000, ["a"] * 100_000),
    "max_tokens": (2**63, 1.5, -1, 0, "many"),
    "model": ({}, 1, None),
    "temperature": (-1, 3, "hot", [1]),
    "prompt": ("", [], [-1], [[1], []], [2**40], ["a"] * 100_000, [[1]] * 100_000, [1, "a"] * 50_000, {}),
    "continue_ids": ([-1], ["a"] * 100_000, "x"),
    "truncate_prompt_tokens": (0, -2, 1.5, "x"),
    "bad_words": ([""], ["a"] * 101, "a"),
    "seed": (2**200, "x"),
    "stream": ("yes", 1),
    "stop_token_ids": ([2**70], ["a"] * 100_000),
    "logit_bias": ({"1": 1}, {str(n): "x" for n in range(50_000)}),
    "metadata": ({str(n): 1 for n in range(50_000)}, "x"),
    "unheard_of": (1, None),
}


async def test_bodies_that_are_no_json_are_told_so():
    async with unharmed() as running:
        for name, data in NOT_JSON.items():
            status, _, table = await running.post(PATH, data=data)
            assert status == 400 and "JSON" in table["error"]["message"], name


async def test_a_wrong_field_is_named_however_wrong_it_is():
    async with unharmed() as running:
        for name, values in WRONG_FIELDS.items():
            for value in values:
                status, _, table = await running.post(PATH, data=with_(**{name: value}))
                assert status == 400 and str(table["error"]["param"]).startswith(name), (name, table)


async def test_a_complaint_is_short_however_long_the_wrong_name_is():
    async with unharmed() as running:
        status, _, table = await running.post(PATH, data=with_(**{"x" * 100_000: 1}))
        assert status == 400 and len(json.dumps(table)) < 1000
        status, _, table = await running.post(PATH, data=with_(model="m" * 100_000))
        assert status == 404 and len(json.dumps(table)) < 1000
        status, _, table = await running.post(PATH, data=with_(**{"\r\nevil: 1": 1}))
        assert status == 400 and "evil" in table["error"]["param"] and "\n" not in table["error"]["param"]
        status, _, table = await running.post(PATH, data=with_(**{"": 1}))
        assert status == 400 and table["error"]["param"] == "''"


async def test_a_deeply_nested_schema_is_refused():
    schema = b'{"a":' * 990 + b"1" + b"}" * 990
    body = b'{"model":"demo","messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema",'
    body += b'"json_schema":{"name":"x","schema":' + schema + b"}}}"
    async with unharmed() as running:
        status, _, table = await running.post("/v1/chat/completions", data=body)
        assert (status, table["error"]["param"]) == (400, "response_format.json_schema.schema")


async def test_strange_request_ids_are_refused_and_not_repeated():
    async with unharmed() as running:
        for strange in (b"\xff\xfe", b"a" * 300, b"a\tb"):
            data = LINE + b"connection: close\r\nx-request-id: " + strange + b"\r\n" + LENGTH + b"\r\n" + BODY
            answer = await exchange(running, data)
            assert refused(answer, 400)["param"] == "x-request-id"
            assert strange not in answer


async def test_model_text_forges_no_event_of_a_chat():
    evil = "\r\n\r\ndata: [DONE]\r\n\r\nevent: x\rid: 1\n\u2028data: {}\n\n"
    chat_request = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "stream": True}
    async with unharmed(FakeReplica(lambda seen: Script((evil, " b")))) as running:
        body = json.dumps(chat_request).encode()
        data = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        answer = await exchange(running, data + b"content-length: %d\r\n\r\n" % len(body) + body)
        lines = answer.partition(b"\r\n\r\n")[2].replace(b"\r\n", b"\n").split(b"\n")
        assert sum(line == b"data: [DONE]" for line in lines) == 1
        assert not any(line.startswith((b"event:", b"data: {}")) for line in lines)
        texts = [json.loads(line[6:])["choices"][0]["delta"].get("content") for line in lines if line[:7] == b"data: {"]
        assert "".join(filter(None, texts)) == evil + " b"


class Keys:
    def tenant(self, api_key: str) -> Tenant:
        if api_key != "right":
            raise Unauthenticated("no such key")
        return Tenant("acme")


async def test_no_header_makes_a_caller_another_tenant():
    forged = {"x-tenant-id": "acme", "x-trident-tenant": "acme", "x-forwarded-user": "acme", "x-api-key": "right"}
    async with unharmed(keys=Keys()) as running:
        for authorization in ("", "right", "Basic right", "Bearer", "Bearer wrong", "Bearer right, Bearer wrong"):
            headers = {**forged, "authorization": authorization}
            status, said_, _ = await running.post(PATH, REQUEST, **headers)
            assert status == 401 and said_["www-authenticate"] == "Bearer", authorization
        calls = grpc.aio.insecure_channel(running.grpc_url)
        for metadata in (tuple(forged.items()), (("authorization", "bearer wrong"), *forged.items())):
            assert await status_of(calls, message(), metadata) is grpc.StatusCode.UNAUTHENTICATED
        await calls.close()
        page = await running.metrics()
        assert not [name for name in page if 'tenant="' in name and 'tenant="acme"' not in name]


async def test_no_caller_can_make_series_of_metrics():
    async with unharmed() as running:
        await running.post(PATH, with_and("nobody"))
        await running.get("/none")
        before = set(await running.metrics())
        for n in range(50):
            await running.post(PATH, with_and(f"model-{n}"), x_request_id=f"r{n}", x_session_id=f"s{n}")
            await running.get(f"/path-{n}")
            await running.post(PATH, {**REQUEST, "user": f"user-{n}", "metadata": {f"k{n}": "v"}}, x_tenant_id=f"t{n}")
        assert len(set(await running.metrics()) - before) <= 40  # of statuses that had not been seen before


def with_and(model: str) -> dict:
    return {**REQUEST, "model": model}


def message(**more: Any) -> bytes:
    return infer_request.generation(build("one two", max_tokens=2, **more), "ensemble")


async def streamed(channel: grpc.aio.Channel, payload: bytes, metadata: Any = ()) -> list[bytes]:
    call = channel.unary_stream(infer_request.GENERATE)(payload, timeout=60, metadata=metadata)
    return [data async for data in call]


async def status_of(channel: grpc.aio.Channel, payload: bytes, metadata: Any = ()) -> grpc.StatusCode:
    """How a call ends. (A caught error would keep its call, and that its connection.)"""
    call = channel.unary_stream(infer_request.GENERATE)(payload, timeout=60, metadata=metadata)
    return await call.code()


async def test_garbage_on_the_grpc_port_harms_no_call():
    noise = random.Random(8).randbytes(4096)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    huge_frame = preface + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + noise
    async with unharmed() as running, grpc.aio.insecure_channel(running.grpc_url) as channel:
        port = int(running.grpc_url.rpartition(":")[2])
        for data in (noise, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", preface + noise, huge_frame):
            await exchange(running, data, port=port)
            assert len(await streamed(channel, message())) >= 2
        await channel.close()


async def test_grpc_messages_that_are_none_or_too_large_end_their_call_alone():
    broken = service_pb2.ModelInferRequest.FromString(message())
    del broken.raw_input_contents[:]
    async with unharmed() as running, grpc.aio.insecure_channel(running.grpc_url) as channel:
        assert await status_of(channel, b"\xff" * 100) is grpc.StatusCode.INVALID_ARGUMENT
        assert await status_of(channel, bytes(5 << 20)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        large = (("x-large", "a" * 100_000),)
        assert await status_of(channel, message(), large) is grpc.StatusCode.RESOURCE_EXHAUSTED
        [answer] = await streamed(channel, broken.SerializeToString())
        assert service_pb2.ModelStreamInferResponse.FromString(answer).error_message
        assert len(await streamed(channel, message())) >= 2
        await channel.close()


async def test_tensors_that_lie_are_refused_by_name():
    def changed(name: str, data: bytes, datatype: str = "") -> bytes:
        request = service_pb2.ModelInferRequest.FromString(message())
        for place, tensor in enumerate(request.inputs):
            if tensor.name == name:
                tensor.datatype = datatype or tensor.datatype
                request.raw_input_contents[place] = data
        return request.SerializeToString()

    lies = {
        "text_input": [b"", b"\xff\xff\xff\xff", b"\x02\0\0\0a", b"\x02\0\0\0\xff\xfe"],
        "max_tokens": [b"", b"\1", b"\1\0\0\0\1\0\0\0"],
    }
    async with unharmed() as running, grpc.aio.insecure_channel(running.grpc_url) as channel:
        for name, contents in lies.items():
            for data in contents:
                [answer] = await streamed(channel, changed(name, data))
                assert name in service_pb2.ModelStreamInferResponse.FromString(answer).error_message, (name, data)
        await channel.close()


async def test_a_chat_nested_without_end_is_an_ordinary_request_to_the_gateway():
    """Its ensemble will refuse it; the gateway only counts it."""
    deep = build(messages=[{"role": "user", "content": "a"}], max_tokens=2)
    request = service_pb2.ModelInferRequest.FromString(infer_request.generation(deep, "ensemble"))
    for place, tensor in enumerate(request.inputs):
        if tensor.name == "messages":
            nested = b"[" * 100_000
            request.raw_input_contents[place] = len(nested).to_bytes(4, "little") + nested
    async with unharmed() as running, grpc.aio.insecure_channel(running.grpc_url) as channel:
        assert await streamed(channel, request.SerializeToString())
        await channel.close()


@pytest.mark.slow
async def test_a_caller_that_opens_hundreds_of_requests_and_leaves_frees_them_all():
    async with unharmed(
        FakeReplica(lambda seen: Script((" a",) * (seen.value("max_tokens") or 1), gap_s=0.1))
    ) as running:
        await opens_and_leaves(running.grpc_url, 200)


async def opens_and_leaves(url: str, requests: int) -> None:
    payload = infer_request.generation(build("one", max_tokens=1000), "ensemble")
    async with grpc.aio.insecure_channel(url) as channel:
        calls = [channel.unary_stream(infer_request.GENERATE)(payload) for _ in range(requests)]
        await asyncio.gather(*(call.read() for call in calls))
        for call in calls:
            call.cancel()
