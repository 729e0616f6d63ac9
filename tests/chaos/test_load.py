"""How streams end, as the load reads them."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chaos import load
from chaos.fleet import TOKENIZER
from chaos.load import CUT, LEFT, PROMPTS, TENANTS, Load, Outcome
from clients.wire.completion import Completion
from contract.generation import Usage
from server import ports

BEGIN = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
USAGE = b'"usage": {"prompt_tokens": 3, "completion_tokens": 2}'
END = b'data: {"choices": [{"text": "b", "finish_reason": "length"}], %b}\n\n' % USAGE
FAILED = b'data: {"error": {"message": "no replica", "code": "unavailable"}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_a_stream_begins_with_its_first_token():
    one = Outcome(PROMPTS[0], "http", "one", 0.0)
    one.add("", 0)
    assert not one.first_s
    one.add("a", 1)
    first_s = one.first_s
    one.add("b", 1)
    assert 0 < one.first_s == first_s


async def test_the_undisturbed_text_is_not_what_the_replica_makes_of_its_tokens(monkeypatch):
    """Else a detokenizer that always loses a token would agree with itself."""
    ids = tuple(Tokenizer.from_file(str(TOKENIZER)).encode("def add(a, b):").ids)

    class Client:
        def __init__(self, url: str) -> None:
            pass

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_) -> None:
            pass

        def generate(self, text: str, **_):
            return self

        async def complete(self) -> Completion:
            return Completion("def add(a b):", ids, (), None, "", Usage(3, len(ids)), None, "")

    monkeypatch.setattr(load, "AsyncClient", Client)
    texts, inputs = await load.undisturbed("", TOKENIZER)
    assert set(texts.values()) == {"def add(a, b):"} and set(inputs.values()) == {3}


def test_no_two_tenants_share_a_prompt():
    assert len({prompt.text for prompt in PROMPTS}) == len(PROMPTS)
    assert {prompt.tenant for prompt in PROMPTS} == set(TENANTS)


@given(st.integers(0, 2**32), st.floats(1, 60), st.floats(0.1, 20))
def test_requests_come_alone_and_in_bursts(seed: int, duration_s: float, rate: float):
    sent = load.moments(seed, duration_s, rate)
    assert sent == load.moments(seed, duration_s, rate) == sorted(sent)
    assert all(0 <= at_s < duration_s for at_s, _ in sent)
    bursts = Counter(at_s for at_s, is_of_burst in sent if is_of_burst)
    assert set(bursts.values()) <= {load.BURST}


async def test_half_of_the_callers_of_a_burst_leave_at_once(monkeypatch):
    monkeypatch.setattr(load, "moments", lambda *_: [(0.0, True)] * 100)
    [port] = ports.free(1)
    made = Load({"one": f"127.0.0.1:{port}"}, {"one": f"127.0.0.1:{port}"}, dict.fromkeys(TENANTS, "key"))
    for _ in range(2):
        await made.run(seed=1, duration_s=1, rate=1)
    assert len({one.id for one in made.outcomes}) == len(made.outcomes)
    leaves = Counter(one.leaves for one in made.outcomes if not one.repeats)
    assert set(leaves) == {0, None} and 60 < leaves[0] < 140
    keys = Counter(one.key for one in made.outcomes if one.key)
    assert keys and set(keys.values()) == {2}  # of some a second request has their key
    keyed = [one for one in made.outcomes if one.key]
    assert {(one.prompt.tenant, one.protocol, one.leaves) for one in keyed} == {("metered", "http", None)}


async def test_callers_that_leave_ask_for_streams_and_repeat_the_same_shape(monkeypatch):
    monkeypatch.setattr(load, "moments", lambda *_: [(0.0, True)] * 200)
    [port] = ports.free(1)
    made = Load({"one": f"127.0.0.1:{port}"}, {"one": f"127.0.0.1:{port}"}, dict.fromkeys(TENANTS, "key"))
    await made.run(seed=1, duration_s=1, rate=1)
    of_http = [one for one in made.outcomes if one.protocol == "http"]
    assert {one.shape for one in of_http if one.leaves is None} == set(load.SHAPES)
    assert {one.shape for one in of_http if one.leaves == 0} == set(load.SHAPES) - {"whole"}
    assert {one.shape for one in made.outcomes if one.protocol == "grpc"} == {""}
    by_id = {one.id: one for one in made.outcomes}
    assert all(one.shape == by_id[one.key].shape for one in made.outcomes if one.repeats)


@pytest.mark.parametrize(
    ("shape", "field", "value"),
    [
        ("", "stream", True),
        ("stop", "stop", load.STOPS),
        ("logprobs", "logprobs", 1),
        ("whole", "stream", False),
    ],
)
async def test_a_request_asks_what_its_shape_is(shape: str, field: str, value: object):
    asked = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(body := await request.json())
        if not body["stream"]:
            end = {"text": "ab", "finish_reason": "length"}
            return web.json_response({"choices": [end], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
        scored = BEGIN.replace(b"null}", b'null, "logprobs": {"token_logprobs": [-0.5, -1]}}')
        return web.Response(body=(scored if "logprobs" in body else BEGIN) + END + DONE)

    application = web.Application()
    application.router.add_post("/v1/completions", handle)
    async with serving(application) as load, aiohttp.ClientSession() as session:
        await load._send(Outcome(PROMPTS[0], "http", "one", 0.0, shape=shape), session)
    [outcome] = load.outcomes
    assert asked[0][field] == value
    assert (outcome.error, outcome.ends, outcome.text, outcome.reason, outcome.tokens) == (
        "",
        1,
        "ab",
        "length",
        (3, 2),
    )
    assert outcome.scores == (2 if shape == "logprobs" else 0)


@pytest.mark.parametrize(
    ("body", "error", "ends", "text", "late_text"),
    [
        (BEGIN + END + DONE, "", 1, "ab", ""),
        (BEGIN + FAILED + DONE, "Unavailable", 1, "a", ""),
        (BEGIN + END + BEGIN + DONE, "", 1, "aba", "a"),
        (BEGIN + END + END + DONE, "", 3, "abb", "b"),
        (BEGIN + END + b'data: {"choices": [], %b}\n\n' % USAGE + DONE, "", 2, "ab", ""),
        (BEGIN, CUT, 0, "a", ""),
        (BEGIN + END, CUT, 1, "ab", ""),
        (BEGIN + END + DONE + BEGIN, "", 1, "ab", BEGIN.decode().strip()),
        (BEGIN + END + DONE + DONE, "", 1, "ab", "data: [DONE]"),
    ],
)
async def test_an_event_stream_is_read_to_its_last_byte(body: bytes, error: str, ends: int, text: str, late_text: str):
    [outcome] = await sent_to(lambda: web.Response(body=body))
    assert (outcome.error, outcome.ends, outcome.text, outcome.late_text) == (error, ends, text, late_text)
    assert (outcome.tokens, outcome.reason) == (((3, 2), "length") if END in body else (None, ""))


@pytest.mark.parametrize(("leaves", "text"), [(1, "a"), (0, "")])
async def test_a_caller_leaves_after_a_text_or_at_once(leaves: int, text: str):
    gone = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            if leaves:
                await response.prepare(request)
                await response.write(BEGIN)
            await asyncio.sleep(60)
        finally:
            gone.set()
        return response

    application = web.Application()
    application.router.add_post("/v1/completions", handle)
    async with serving(application) as load, aiohttp.ClientSession() as session:
        await load._send(Outcome(PROMPTS[0], "http", "one", 0.0, leaves=leaves), session)
        await asyncio.wait_for(gone.wait(), 30)
    [outcome] = load.outcomes
    assert (outcome.error, outcome.text, outcome.received, outcome.ends) == (LEFT, text, len(text), 0)


async def test_a_status_is_the_error_of_its_class_and_no_server_is_a_cut():
    refusal = {"error": {"message": "too many", "code": "rate_limit_exceeded"}}
    [outcome] = await sent_to(lambda: web.json_response(refusal, status=429))
    assert (outcome.error, outcome.message, outcome.ends) == ("Overloaded", "too many", 1)
    [port] = ports.free(1)
    load = Load({"one": f"127.0.0.1:{port}"}, {"one": f"127.0.0.1:{port}"}, dict.fromkeys(TENANTS, "key"))
    await load.run(seed=1, duration_s=0.2, rate=30)
    assert load.outcomes and {one.error for one in load.outcomes} == {CUT}
    assert {one.protocol for one in load.outcomes} == {"http", "grpc"}


async def sent_to(answer) -> list[Outcome]:
    """Send one request over HTTP to a server that gives this answer."""

    async def handle(request: web.Request) -> web.Response:
        return answer()

    application = web.Application()
    application.router.add_post("/v1/completions", handle)
    async with serving(application) as load, aiohttp.ClientSession() as session:
        await load._send(Outcome(PROMPTS[0], "http", "one", 0.0), session)
    return load.outcomes


@contextlib.asynccontextmanager
async def serving(application: web.Application) -> AsyncIterator[Load]:
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield Load({"one": f"127.0.0.1:{runner.addresses[0][1]}"}, {}, {tenant: tenant for tenant in TENANTS})
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("own", "other", "output", "problem"),
    [
        (200, 404, "x", ""),
        (200, 200, "x", "reading got 200: must be 404"),
        (404, 404, "x", "reading got 404: must be 200"),
        (200, 404, "y", "reading got another output than storing"),
    ],
)
async def test_who_can_read_a_stored_response_is_found_out(own: int, other: int, output: str, problem: str):
    async def post(request: web.Request) -> web.Response:
        return web.json_response({"id": "resp_1", "output": "x"})

    async def get(request: web.Request) -> web.Response:
        status = own if "plain" in request.headers["authorization"] else other
        return web.json_response({"id": "resp_1", "output": output}, status=status)

    application = web.Application()
    application.router.add_post("/v1/responses", post)
    application.router.add_get("/v1/responses/resp_1", get)
    async with serving(application) as load, aiohttp.ClientSession() as session:
        await load._store("one", session)
    assert [text for _, text in load.stored] == ([f"{problem}, at one"] if problem else [])


async def test_a_response_that_is_never_stored_keeps_a_run_no_longer_than_a_stream():
    async def post(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError("nobody waits")

    application = web.Application()
    application.router.add_post("/v1/responses", post)
    async with serving(application) as load, aiohttp.ClientSession() as session:
        load.patience_s = 0.1
        await asyncio.wait_for(load._store("one", session), 30)
    assert not load.stored
