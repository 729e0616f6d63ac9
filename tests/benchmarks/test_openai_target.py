"""The OpenAI target against a server that sends scripted bytes."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from benchmarks.openai_target import OpenAITarget, http_error
from benchmarks.workload import PlannedRequest
from contract.errors import EngineFailed, InvalidArgument, NotFound, Overloaded, Unavailable
from contract.generation import FinishReason, Usage

REQUEST = PlannedRequest(0, "hello", 7)


def event(text="", reason=None, **more):
    return {"choices": [{"text": text, "finish_reason": reason}], **more}


@asynccontextmanager
async def server(*events, status=200, done=True):
    """An HTTP server that answers every request with ``events``; yields its URL and the bodies it was sent."""
    bodies = []

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
        bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 %d Status\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" % status)
        for one in events:
            writer.write(b"data: " + json.dumps(one).encode() + b"\n\n")
            await writer.drain()
        writer.write(b"data: [DONE]\n\n" if done else b"")
        writer.close()

    running = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with running:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}", bodies


async def read(url, extra=(), request=REQUEST):
    target = OpenAITarget(url, "m", dict(extra))
    try:
        return [delta async for delta in target.open(request)]
    finally:
        await target.close()


async def test_every_chunk_with_text_is_a_token_and_the_usage_corrects_the_sum():
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    async with server(event("a"), event(), event("b"), event("", "length"), {"choices": [], "usage": usage}) as (
        url,
        _,
    ):
        deltas = await read(url)
    assert [delta.text for delta in deltas] == ["a", "b", ""]
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 3]
    assert deltas[-1].finish_reason is FinishReason.LENGTH and deltas[-1].usage == Usage(3, 5)


async def test_token_ids_are_counted_if_the_server_sends_them():
    chunk = {"choices": [{"text": "abc", "token_ids": [4, 5, 6], "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}
    async with server(chunk, usage) as (url, _):
        deltas = await read(url)
    assert [delta.token_ids for delta in deltas] == [(4, 5, 6), ()]


async def test_a_request_is_greedy_and_has_only_fields_the_server_understands():
    async with server(event("a", "length")) as (url, bodies):
        await read(url)
        await read(url, {"ignore_eos": True, "top_k": 1})
        await read(url, {"ignore_eos": True}, PlannedRequest(0, "hello", 7, ignore_eos=False))
    plain = {"model": "m", "prompt": "hello", "max_tokens": 7, "temperature": 0.0, "stream": True}
    assert bodies == [plain, plain | {"ignore_eos": True, "top_k": 1}, plain]


async def test_an_error_event_a_cut_stream_and_an_http_error_raise():
    async with server(event("a"), {"error": {"message": "the step broke"}}) as (url, _):
        with pytest.raises(EngineFailed, match="the step broke"):
            await read(url)
    async with server(event("a"), done=False) as (url, _):
        with pytest.raises(EngineFailed, match="ended after 1 tokens without a finish reason"):
            await read(url)
    for status, kind in ((422, InvalidArgument), (503, Unavailable), (500, EngineFailed)):
        async with server({"no": "field"}, status=status) as (url, _):
            with pytest.raises(kind, match="no"):
                await read(url)


@pytest.mark.parametrize(
    "odd",
    [
        event("a", "eos_token"),
        ["a list"],
        event("a", "stop", usage={"prompt_tokens": 1}),
        {"choices": ["text"]},
        event("a", "stop", usage=3),
    ],
)
async def test_an_answer_that_is_not_as_openais_is_a_failed_request(odd):
    async with server(odd) as (url, _):
        with pytest.raises(EngineFailed, match="no completion of OpenAI's"):
            await read(url)


async def test_a_server_that_is_not_there_is_unavailable(unused_tcp_port):
    with pytest.raises(Unavailable, match=f"127.0.0.1:{unused_tcp_port}"):
        await read(f"http://127.0.0.1:{unused_tcp_port}")


def test_answers_that_do_not_stream_are_not_supported():
    with pytest.raises(InvalidArgument, match="^stream: must be true"):
        OpenAITarget("http://x", "m").open(PlannedRequest(0, "hello", 7, stream=False))


@pytest.mark.parametrize(
    ("status", "kind"), [(429, Overloaded), (503, Unavailable), (404, NotFound), (418, EngineFailed)]
)
def test_an_http_status_is_an_error_of_its_kind(status, kind):
    error = http_error(status, "why", 2.0)
    assert type(error) is kind and "why" in str(error)
    assert error.retry_after_s == (2.0 if kind.retryable else None)
