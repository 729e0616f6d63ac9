"""The OpenAI endpoint on the wire: raw events, readers that leave or stall, malformed bodies and headers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest

from contract.errors import Unauthenticated
from gateway.config.policy import AdmissionRules
from gateway.config.tenant import Tenant
from tests.fakes.replica import FakeReplica, Script, final_only
from tests.gateway.running import Running, gateway, until

pytestmark = pytest.mark.slow

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 3}


async def send(running: Running, body: bytes, path: str = COMPLETIONS, head: str = "") -> tuple:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return reader, writer


async def rest(reader: asyncio.StreamReader, until_: bytes = b"[DONE]") -> bytes:
    data = b""
    while until_ not in data:
        more = await asyncio.wait_for(reader.read(65536), 60)
        if not more:
            break
        data += more
    return data


def streamed(**more: object) -> bytes:
    return json.dumps({**REQUEST, "stream": True, **more}).encode()


class Keys:
    def tenant(self, api_key: str) -> Tenant:
        if api_key != "right":
            raise Unauthenticated("no such key")
        return Tenant("acme")


async def test_an_event_stream_is_data_lines_up_to_done():
    async with FakeReplica() as replica, gateway(replica) as running:
        reader, writer = await send(running, streamed())
        data = await rest(reader)
        writer.close()
        assert b"200 OK" in data and b"text/event-stream" in data
        events = [line for line in data.split(b"\r\n") if line.startswith(b"data: ")]
        assert events[-1] == b"data: [DONE]\n\n"
        texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]]
        assert "".join(texts) == " one two one"


async def test_what_was_answered_is_counted_so_and_who_left_is_counted_so():
    async with FakeReplica(lambda seen: Script((" a", " b"), gap_s=0.05)) as replica, gateway(replica) as running:
        for more in ({}, {"temperature": 0}):
            reader, writer = await send(running, streamed(**more))
            await rest(reader)
            writer.close()
            await running.post(COMPLETIONS, REQUEST)
        reader, writer = await send(running, streamed())
        await rest(reader, b" a")
        writer.close()
        await until(lambda: replica.counts.cancelled == 1)
        await until(lambda: not running.service.admission.running)
        counted = await running.metrics()
        message = 'trident_gateway_requests_total{code="%d",operation="text_completion",protocol="http"}'
        assert (counted[message % 200], counted[message % 499]) == (4, 1)


async def test_text_cannot_forge_events():
    evil = "\n\ndata: [DONE]\n\ndata: {}\r\revent: x\u2028data: {}\u2029data: {}\x85data: {}\x0bdata: {}\x1edata: {} é"
    async with FakeReplica(lambda seen: Script((evil,))) as replica, gateway(replica) as running:
        reader, writer = await send(running, streamed())
        data = await rest(reader, b"data: [DONE]\n\n")
        writer.close()
        assert data.count(b"\n\ndata: [DONE]") == 0 and data.count(b"\ndata: {}") == 0
        events = [line for line in data.decode().splitlines() if line.startswith("data:")]  # as careless readers do
        assert len(events) == 2 and events[1] == "data: [DONE]"
        first = events[0]
        assert json.loads(first[6:])["choices"][0]["text"] == evil


async def test_silence_is_filled_with_heartbeats_before_and_after_the_first_token():
    script = Script((" a", " b"), first_token_s=0.3, gap_s=0.3)
    async with FakeReplica(lambda seen: script) as replica, gateway(replica, heartbeat_s=0.05) as running:
        reader, writer = await send(running, streamed())
        data = await rest(reader)
        writer.close()
        before, _, after = data.partition(b'"text":" a"')
        assert b": keep-alive" in before and b": keep-alive" in after and b'"text":" b"' in after


async def test_a_caller_that_leaves_before_the_first_token_frees_the_replica():
    async with FakeReplica(lambda seen: Script((" a",), stall_after=0)) as replica, gateway(replica) as running:
        for body in (streamed(), json.dumps(REQUEST).encode()):
            _, writer = await send(running, body)
            await until(lambda: replica.counts.running == 1)
            writer.close()
            await until(lambda: replica.counts.running == 0 and not running.service.live)
        assert replica.counts.cancelled == 2


async def test_a_reader_that_takes_nothing_is_cut_off_and_its_replica_freed():
    long = tuple("x" * 2000 for _ in range(20_000))
    async with FakeReplica(lambda seen: Script(long)) as replica, gateway(replica, stall_timeout_s=0.2) as running:
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect(("127.0.0.1", running.port))
            body = streamed(max_tokens=20_000)
            lazy.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await until(lambda: replica.counts.started == 1)
            await until(lambda: replica.counts.running == 0 and not running.service.live)
        await until(lambda: not running.http.server_state.connections)


async def test_an_engine_that_falls_silent_is_left_and_the_caller_told():
    script = Script((" a", " b"), stall_after=1)
    async with FakeReplica(lambda seen: script) as replica, gateway(replica, idle_timeout_s=1.0) as running:
        reader, writer = await send(running, streamed())
        data = await rest(reader, b"deadline_exceeded")
        writer.close()
        assert b'"text":" a"' in data and b"silent" in data and b"[DONE]" not in data
        await until(lambda: replica.counts.running == 0)


async def test_an_engine_that_falls_silent_behind_its_answer_has_answered():
    async with FakeReplica(lambda seen: Script((" a", " b"), stall_after=2)) as replica:
        async with gateway(replica, idle_timeout_s=1.0) as running:
            status, _, body = await running.post(COMPLETIONS, REQUEST)
            assert status == 200 and body["choices"][0]["text"] == " a b"
            reader, writer = await send(running, streamed())
            message = await rest(reader)
            assert b"[DONE]" in message and b"error" not in message
            writer.close()
            await until(lambda: replica.counts.running == 0)


async def test_a_deadline_of_the_caller_holds():
    async with FakeReplica(lambda seen: Script((" a",), stall_after=0)) as replica, gateway(replica) as running:
        status, _, body = await running.post(COMPLETIONS, REQUEST, x_trident_timeout_s="0.1")
        assert status == 504 and body["error"]["code"] == "deadline_exceeded"
        status, _, body = await running.post(COMPLETIONS, REQUEST, x_trident_timeout_s="soon")
        assert status == 400 and body["error"]["param"] == "x-trident-timeout-s"


async def test_a_drain_lets_streams_end_and_refuses_new_work():
    script = Script(tuple(" a" for _ in range(20)), gap_s=0.02)
    async with FakeReplica(lambda seen: script) as replica, gateway(replica) as running:
        reader, writer = await send(running, streamed(max_tokens=20))
        await until(lambda: replica.counts.running == 1)
        draining = asyncio.ensure_future(running.service.drain(60.0))
        await asyncio.sleep(0)
        status, headers, body = await running.post(COMPLETIONS, REQUEST)
        assert status == 503 and headers["retry-after"] == "1" and body["error"]["code"] == "unavailable"
        assert (await running.get("/health/ready"))[0] == 503 and (await running.get("/health/live"))[0] == 200
        assert (await rest(reader)).count(b'"text":" a"') == 20
        assert await draining == 0
        writer.close()


async def test_a_drain_waits_for_those_who_wait_already():
    gate = asyncio.Event()
    async with FakeReplica(lambda seen: Script((" a", " b"), gate=gate)) as replica:
        async with gateway(replica, config="[admission]\nmax_running = 1") as running:
            pending = [asyncio.ensure_future(running.post(COMPLETIONS, REQUEST)) for _ in range(4)]
            await until(lambda: running.service.admission.waiting == 3)
            asyncio.get_running_loop().call_later(0.1, gate.set)
            assert await running.service.drain(60.0) == 0
            assert [status for status, _, _ in await asyncio.gather(*pending)] == [200] * 4


async def test_a_drain_that_takes_too_long_cuts_streams_off_with_an_error():
    async with FakeReplica(lambda seen: Script((" a", " b"), stall_after=1)) as replica, gateway(replica) as running:
        reader, writer = await send(running, streamed())
        await until(lambda: replica.counts.running == 1)
        running.service.admission.change(AdmissionRules(short_reserve=0.0, max_running=1), None)
        waiting = asyncio.ensure_future(running.post(COMPLETIONS, REQUEST))
        await until(lambda: running.service.admission.waiting == 1)
        assert await running.service.drain(0.05) == 1
        assert b"the gateway is stopping" in await rest(reader, b"stopping")
        assert (await waiting)[0] == 503 and replica.counts.started == 1
        await until(lambda: replica.counts.running == 0)
        writer.close()


MALFORMED = (
    (b"", "must be JSON"),
    (b"{", "must be JSON"),
    (b"[]", "must be a JSON object"),
    (b'{"model": "demo"}', "prompt: is missing"),
    (b'{"model": "demo", "prompt": 3}', "prompt: "),
    (b'{"model": "demo", "prompt": ""}', "prompt: "),
    (b'{"model": "demo", "prompt": [1, -2]}', "must be an integer from 0 to"),
    (b'{"model": "demo", "prompt": []}', "prompt: "),
    (b'{"model": "demo", "prompt": "x", "max_tokens": 1.5}', "max_tokens: "),
    (b'{"model": "demo", "prompt": "x", "max_tokens": 99999999999}', "max_tokens: "),
    (b'{"model": "demo", "prompt": "x", "temperature": "1"}', "temperature: "),
    (b'{"model": "demo", "prompt": "x", "temperature": NaN}', "must be JSON"),
    (b'{"model": "demo", "prompt": "\\ud800"}', "must be JSON"),
    (b'{"model": "demo", "prompt": "x", "stop": [""]}', "stop"),
    (b'{"model": "demo", "prompt": "x", "suffix": "y"}', "suffix: is not supported"),
    (b'{"model": "demo", "prompt": "x", "best_of": 3}', "best_of: "),
    (b'{"model": "demo", "prompt": "x", "stream_options": {}}', "stream_options: "),
    (b'{"model": "demo", "prompt": "x", "nonsense": 1}', "nonsense: is not supported"),
    (b"[" * 100_000, "must be JSON"),
)


async def test_malformed_bodies_are_refused_in_words():
    async with FakeReplica() as replica, gateway(replica) as running:
        for data, message in MALFORMED:
            status, _, body = await running.post(COMPLETIONS, data=data)
            assert status == 400 and message in body["error"]["message"], (data[:60], body)
            assert body["error"]["type"] == "invalid_request_error"
        assert replica.counts.started == 0


async def test_messages_must_be_text_of_known_roles():
    wrong = {
        "messages": [],
        "messages.0.role": [{"role": "function", "content": "x"}],
        "messages.0.tool_call_id": [{"role": "tool", "content": "x"}],
        "messages.0.content": [{"role": "user"}],
        "messages.0.content.0.type": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    }
    async with FakeReplica() as replica, gateway(replica) as running:
        for name, messages in wrong.items():
            status, _, body = await running.post(CHAT, {"model": "demo", "messages": messages})
            assert status == 400 and body["error"]["param"] == name, body
        parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
        await running.post(CHAT, {"model": "demo", "messages": [{"role": "developer", "content": parts}]})
        assert json.loads(replica.seen[-1].value("messages")) == [{"role": "system", "content": "a b"}]


async def test_a_body_over_the_limit_is_refused_whether_it_says_so_or_not():
    async with FakeReplica() as replica, gateway(replica, max_body_bytes=2048) as running:
        status, _, body = await running.post(COMPLETIONS, {**REQUEST, "prompt": "x" * 4096})
        assert status == 413 and body["error"]["code"] == "request_too_large"
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write((b"400\r\n" + b"x" * 0x400 + b"\r\n") * 4)
        assert b" 413 " in await reader.readline()
        writer.close()
        assert replica.counts.started == 0


async def test_headers_must_come_soon_and_be_few():
    soon = {"header_timeout_s": 0.1, "body_timeout_s": 0.1}
    async with FakeReplica() as replica, gateway(replica, **soon) as hasty, gateway(replica) as calm:
        for running, sent, code in (
            (hasty, b"", b" 408 "),
            (hasty, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nslow", b" 408 "),
            (hasty, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{", b" 408 "),
            (calm, b"POST /v1/completions HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b" 431 "),
            (calm, b"POST /v1/completions HTTP/1.1\r\na: " + b"b" * 100_000 + b"\r\n\r\n", b" 431 "),
            (calm, b"NONSENSE\r\n\r\n", b" 400 "),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), 60)
            assert code in answer.splitlines()[0], (sent[:60], answer)
            assert b'"error"' in answer
            writer.close()


async def test_a_connection_serves_several_requests_in_turn():
    async with FakeReplica() as replica, gateway(replica, header_timeout_s=5.0) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        for _ in range(3):
            body = json.dumps(REQUEST).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            assert b"one two one" in await rest(reader, b"}}}")
        writer.close()


async def test_unknown_paths_and_methods_are_refused_as_openai_does():
    async with FakeReplica() as replica, gateway(replica) as running:
        status, _, body = await running.post("/v1/nowhere", {})
        assert status == 404 and body["error"]["code"] == "not_found"
        status, _, body = await running.post(COMPLETIONS + "/", REQUEST)  # and is not sent where its Host header says
        assert status == 404 and body["error"]["code"] == "not_found"
        status, text = await running.get(CHAT)
        assert status == 405 and json.loads(text)["error"]["code"] == "method_not_allowed"


async def test_a_request_id_comes_back_and_never_becomes_the_engines():
    async with FakeReplica() as replica, gateway(replica) as running:
        status, headers, body = await running.post(COMPLETIONS, REQUEST, x_request_id="mine-1")
        assert headers["x-request-id"] == "mine-1" and body["id"] == "cmpl-mine-1"
        assert replica.seen[-1].id not in ("", "mine-1")
        status, headers, body = await running.post(COMPLETIONS, REQUEST, x_request_id="m" * 300)
        assert status == 400 and body["error"]["param"] == "x-request-id" and headers["x-request-id"] != "m" * 300


async def test_keys_are_asked_for_on_every_endpoint_that_generates_or_lists():
    async with FakeReplica() as replica, gateway(replica, keys=Keys()) as running:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
            status, sent, body = await running.post(COMPLETIONS, REQUEST, **headers)
            assert status == 401 and body["error"]["code"] == "invalid_api_key"
            assert sent["www-authenticate"] == "Bearer"
            assert (await running.get("/v1/models", **headers))[0] == 401
        assert (await running.post(COMPLETIONS, REQUEST, authorization="Bearer right"))[0] == 200


async def test_every_end_settles_the_permit_once():
    settled = []
    scripts = [Script((" a", " b")), Script((" a", " b"), fail_after=1), Script((" a", " b"), stall_after=1)]
    config = f'salt = "{"00" * 16}"\n[orgs.a]\ntokens_per_minute = 600000'
    environ = {"TRIDENT_GATEWAY_API_KEYS": "a/b/c=" + "k" * 20}
    bearer = {"authorization": "Bearer " + "k" * 20}
    async with FakeReplica(lambda seen: scripts[len(settled)]) as replica:
        async with gateway(replica, config=config, environ=environ) as running:
            settle = running.service.budgets.settle
            running.service.budgets.settle = lambda one, used, *more: (settled.append(used), settle(one, used, *more))
            await running.post(COMPLETIONS, REQUEST, **bearer)
            await running.post(COMPLETIONS, REQUEST, **bearer)
            reader, writer = await send(running, streamed(), head=f"authorization: {bearer['authorization']}\r\n")
            await reader.readuntil(b'"text":" a"')
            writer.close()
            await until(lambda: len(settled) == 3)
            # The prompt of two words: counted by the engine, then by size where the engine did not come to it.
            assert settled[0] == 2 + 2 and all(1 < used <= 8 for used in settled[1:])
            admission = running.service.admission
            assert admission.slots().idle


async def test_the_published_schema_describes_what_is_served():
    async with FakeReplica() as replica, gateway(replica) as running:
        document = json.loads((await running.get("/openapi.json"))[1])
        assert document["openapi"] == "3.1.0"
        for path in (CHAT, COMPLETIONS):
            reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            schema = document["components"]["schemas"][reference.rpartition("/")[2]]
            assert schema["additionalProperties"] is False and "model" in schema["required"]


async def test_an_answer_without_an_end_is_an_error_and_not_an_answer_without_choices():
    async with FakeReplica(lambda seen: Script(())) as replica, gateway(replica) as running:
        replica.generate = lambda seen, context, sends_final: only_the_flag(seen.id)
        status, _, body = await running.post(COMPLETIONS, REQUEST)
        assert status == 500 and "the engine failed" in body["error"]["message"]


async def only_the_flag(request_id: str) -> AsyncIterator[bytes]:
    yield final_only(request_id, "ensemble")
