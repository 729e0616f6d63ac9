"""A generation whose replica is lost goes on at another one: nothing is lost, doubled or counted twice."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Callable

import aiohttp
import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients import AsyncClient
from contract.errors import DeadlineExceeded, EngineFailed, InvalidArgument, TridentError, Unavailable
from contract.generation import FinishReason, GenerationRequest, Guide, SamplingParams, TokenDelta
from gateway import continuation
from gateway.continuation import Continuation, SuspectPrompts, is_loss
from tests.fakes import replica as fake_replica
from tests.fakes.replica import FakeReplica, Script, SeenRequest
from tests.gateway.generation_runtime import grpc_context, requests, runtime
from tests.gateway.running import gateway, until

TEXT = tuple(f" {n}" for n in range(12))
WHOLE = Script(TEXT, FinishReason.LENGTH)
GONE = Script(TEXT, status_after=5)  # tritonserver is killed
CRASHED = Script(TEXT, fail_after=5, error=EngineFailed("the engine process died"))
DRAINED = Script(TEXT, fail_after=5, error=Unavailable("the server is stopping"))
SILENT = Script(TEXT, stall_after=5)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(continuation, "PAUSE_S", 0.01)
    monkeypatch.setattr(continuation, "WAIT_S", 0.3)


def first_then(script: Script, then: Script = WHOLE) -> Callable[[SeenRequest], Script]:
    """``script`` for a request from its beginning, ``then`` for one that goes on."""
    return lambda seen: then if seen.inputs.get("continue_ids") else script


def pair(script: Callable[[SeenRequest], Script]):
    return FakeReplica(script), FakeReplica(script)


@pytest.mark.parametrize("script", [GONE, CRASHED, DRAINED])
async def test_a_lost_replica_does_not_show_in_the_stream(script):
    async with FakeReplica(first_then(script)) as one, FakeReplica(first_then(script)) as two:
        async with runtime(f"{one.url},{two.url}", continuations=2) as here:
            choices = await here.choices(requests(max_tokens=12))
            deltas = [delta async for _, delta in choices]
            assert "".join(delta.text for delta in deltas) == "".join(TEXT)
            assert [token for delta in deltas for token in delta.token_ids] == list(range(12))
            (generation,) = choices.generations
            assert deltas[-1].finish_reason is FinishReason.LENGTH and generation.usage.output_tokens == 12
            assert choices.headers[continuation.HEADER] == "1"
            choices.close()
            assert here.idle and here.metric("trident_gateway_continuations_total", result="continued") == 1
            first, second = sorted(one.seen + two.seen, key=lambda seen: len(seen.inputs.get("continue_ids", ())))
            assert second.inputs["continue_ids"] == list(range(5)) and (len(one.seen), len(two.seen)) == (1, 1)


@pytest.mark.parametrize("continuations", [2, 0])
async def test_a_pause_of_the_gateway_neither_ends_nor_doubles_a_stream(continuations: int):
    """Found by chaos: it counted as the replica's silence when the next message had arrived, but was not read."""
    async with FakeReplica(lambda seen: WHOLE) as one, FakeReplica(lambda seen: WHOLE) as two:
        async with runtime(f"{one.url},{two.url}", continuations=continuations, idle_timeout_s=5) as here:
            choices = await here.choices(requests(max_tokens=12))
            (generation,) = choices.generations
            deltas = [await anext(generation)]
            read = generation._stream._next

            async def late() -> bytes:
                data = await read()
                generation.check(time.monotonic() + 6)  # as the watchdog does before the reader gets its turn
                return data

            generation._stream._next = late
            ended = []
            try:
                deltas += [delta async for delta in generation]
            except TridentError as error:
                ended.append(error)
                assert isinstance(error, DeadlineExceeded) and generation.message == b""
            text = "".join(delta.text for delta in deltas)
            assert text == "".join(TEXT) if continuations else ended and "".join(TEXT).startswith(text)
            choices.close()


async def test_text_in_front_of_an_error_is_generated_again(monkeypatch):
    """A detokenizer that is told of an error sends with it what it had held back, half a character as U+FFFD."""
    made = fake_replica.content

    def flushed(request_id, model, sent, texts, reason, *rest):
        return made(request_id, model, sent, ("\ufffd",) if reason is FinishReason.ERROR else texts, reason, *rest)

    monkeypatch.setattr(fake_replica, "content", flushed)
    async with FakeReplica(first_then(CRASHED)) as one, runtime(one.url, continuations=1) as here:
        generation = await here.generation(requests(max_tokens=12)[0])
        assert "".join([delta.text async for delta in generation]) == "".join(TEXT)
        generation.close()
    async with FakeReplica(lambda seen: CRASHED) as one, runtime(one.url, continuations=0) as here:
        generation = await here.generation(requests(max_tokens=12)[0])
        with pytest.raises(EngineFailed, match="engine process died"):
            _ = [delta async for delta in generation]
        generation.close(generation.error)
        assert here.metric("trident_gateway_continuations_total", result="refused") == 1  # one loss
        assert generation.request not in here.generations.suspects


async def test_a_hung_replica_is_left_after_its_silence():
    async with FakeReplica(first_then(SILENT)) as one, FakeReplica(first_then(SILENT)) as two:
        async with runtime(f"{one.url},{two.url}", continuations=2, idle_timeout_s=5) as here:
            generation = await here.generation(requests(max_tokens=12)[0])
            text = "".join([(await anext(generation)).text for _ in range(5)])
            rest = asyncio.ensure_future(anext(generation))
            await asyncio.sleep(0)
            generation.check(time.monotonic() + 6)
            text += (await rest).text + "".join([delta.text async for delta in generation])
            assert text == "".join(TEXT)
            generation.close()
            assert here.idle


async def test_a_request_that_queues_where_it_goes_on_is_not_silent():
    async with (
        FakeReplica(first_then(GONE, SILENT)) as one,
        runtime(one.url, continuations=1, idle_timeout_s=5) as here,
    ):
        generation = await here.generation(requests(max_tokens=12)[0])
        for _ in range(5):
            await anext(generation)
        rest = asyncio.ensure_future(anext(generation))
        await until(lambda: one.counts.started == 2)
        now_s = time.monotonic()
        here.generations.replicas.all()[0].progress_s = now_s + 6  # it makes tokens of others
        generation.check(now_s + 7)
        await asyncio.sleep(0.05)
        assert not rest.done()
        generation.check(now_s + 60)
        with pytest.raises(DeadlineExceeded, match="silent for 5 s"):
            await rest
        generation.close(generation.error)


async def test_without_another_replica_it_waits_for_its_own_to_return():
    async with FakeReplica(first_then(GONE)) as only, runtime(only.url, continuations=1) as here:
        generation = await here.generation(requests(max_tokens=12)[0])
        assert len([delta async for delta in generation]) == 12
        generation.close()


async def test_a_generation_that_is_cut_while_it_waits_goes_nowhere(monkeypatch):
    monkeypatch.setattr(continuation, "PAUSE_S", 0.1)
    async with FakeReplica(first_then(GONE)) as only, runtime(only.url, continuations=1) as here:
        generation = await here.generation(requests(max_tokens=12)[0])
        for _ in range(5):
            await anext(generation)
        rest = asyncio.ensure_future(anext(generation))
        await until(lambda: not only.counts.running)
        await asyncio.sleep(0.02)
        generation.cut(Unavailable("the gateway is stopping"))
        with pytest.raises(Unavailable, match="stopping"):
            await rest
        generation.close(generation.error)
        assert only.counts.started == 1 and here.idle


async def test_the_first_error_is_told_when_no_replica_returns_in_time():
    async with FakeReplica(first_then(GONE)) as only, runtime(only.url, continuations=1) as here:
        generation = await here.generation(requests(max_tokens=12)[0])
        for _ in range(5):
            await anext(generation)
        await only.stop()
        with pytest.raises(Unavailable):
            _ = [delta async for delta in generation]
        generation.close(generation.error)
        assert here.idle and generation.usage.output_tokens == 5


async def test_a_prompt_that_ends_every_replica_is_given_up_and_told_to_the_operator(caplog):
    def script(seen: SeenRequest) -> Script:
        return dataclasses.replace(CRASHED, fail_after=5 + len(seen.inputs.get("continue_ids", ())) // 5)

    async with FakeReplica(script) as one:
        async with runtime(one.url, continuations=2) as here:
            for lives, result in ((3, "refused"), (1, "suspect")):
                before = one.counts.started
                generation = await here.generation(requests(max_tokens=12)[0])
                with caplog.at_level(logging.ERROR), pytest.raises(EngineFailed, match="engine process died"):
                    _ = [delta async for delta in generation]
                generation.close(generation.error)
                assert one.counts.started - before == lives
                assert here.metric("trident_gateway_continuations_total", result=result) == 1
            assert [record.message for record in caplog.records].count(
                "suspect prompt: every replica that ran it was lost"
            ) == 1


async def test_an_engine_that_cannot_go_on_leaves_the_first_error():
    def script(seen: SeenRequest) -> Script:
        refused = Script(refuse=InvalidArgument("presence_penalty", "must be 0 with continue_ids"))
        return refused if seen.inputs.get("continue_ids") else CRASHED

    async with FakeReplica(script) as one, runtime(one.url, continuations=2) as here:
        generation = await here.generation(requests(max_tokens=12)[0], grpc_context())
        with pytest.raises(EngineFailed, match="engine process died"):
            _ = [delta async for delta in generation]
        generation.close(generation.error)


async def test_only_a_replica_with_the_same_engine_goes_on():
    async with FakeReplica(first_then(GONE), engine="a" * 64) as one, FakeReplica(engine="b" * 64) as other:
        urls = {replica.url: replica.metrics_url for replica in (one, other)}
        async with runtime(f"main={one.url}", continuations=1, metrics_urls=urls) as here:
            replicas = here.generations.replicas
            replicas.all()[0].metrics = dataclasses.replace(replicas.all()[0].metrics, engine="a" * 64)
            assert not replicas.with_other_engine("main", "a" * 64)
            assert replicas.with_other_engine("main", "c" * 64) == {one.url}
            assert replicas.ready_with("main", "a" * 64) and not replicas.ready_with("main", "c" * 64)


async def test_both_protocols_carry_on_and_say_so():
    async with FakeReplica(first_then(GONE)) as one, FakeReplica(first_then(GONE)) as two:
        async with gateway(one, two, continuations=2) as up:
            asked = {"model": "demo", "prompt": "x", "max_tokens": 12}
            async with aiohttp.ClientSession() as session:
                asked |= {"stream": True, "stream_options": {"include_usage": True}}
                async with session.post(f"{up.base_url}/v1/completions", json=asked) as response:
                    events = (await response.text()).strip().split("\n\n")
            *chunks, usage = (json.loads(event[6:]) for event in events if event.startswith("data: {"))
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "".join(TEXT)
            assert usage["usage"]["completion_tokens"] == 12
            assert events[-3] == f": {continuation.HEADER}: 1" and events[-1] == "data: [DONE]"
            async with AsyncClient(up.grpc_url) as client:
                answer = await client.generate("x", max_tokens=12).complete()
            assert answer.text == "".join(TEXT) and answer.usage.output_tokens == 12
            assert (await up.metrics())['trident_gateway_continuations_total{result="continued"}'] == 2


def test_what_must_be_generated_again_has_a_seed_from_the_start():
    free, guided = GenerationRequest("x"), GenerationRequest("x", guide=Guide("json"))
    penalised = GenerationRequest("x", sampling=SamplingParams(presence_penalty=1.0))
    greedy = dataclasses.replace(guided, sampling=SamplingParams(temperature=0.0))
    for request, seeded in ((free, False), (guided, True), (penalised, True), (greedy, False)):
        state = Continuation(1)
        first = state.request(request)
        assert (first.sampling.seed is not None) is seeded and Continuation(0).request(request) == request
        state.observe(TokenDelta(" a", (7,)))
        state.lose(EngineFailed("gone"), "a:1", True)
        again = state.request(request)
        assert again.sampling == first.sampling and again.continue_ids == (7,)


def test_an_echo_goes_on_behind_the_ids_that_were_generated():
    scored = SamplingParams(log_probs=True, prompt_log_probs=True)
    request = GenerationRequest("x", max_tokens=9, echo=True, sampling=scored)
    state = Continuation(2)
    assert state.allows(request) and state.request(request) == request
    state.observe(TokenDelta("x y", (1, 2, 3), prompt_ids=2))
    state.observe(TokenDelta(" z", (4,)))
    further = state.request(request)
    assert state.allows(request) and further.continue_ids == (3, 4) and not further.sampling.prompt_log_probs
    state = Continuation(2)  # of another gateway, which goes on with the request that goes on
    state.observe(TokenDelta(" a", (5,)))
    assert state.allows(further) and state.request(further).continue_ids == (3, 4, 5)
    untold = Continuation(2)
    untold.observe(TokenDelta("x y", (1, 2, 3)))
    assert not untold.allows(request)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=6), st.integers(0, 3), st.integers(0, 5))
def test_it_goes_on_behind_all_ids_and_never_more_often_than_allowed(parts, limit, losses):
    state, request = Continuation(limit), GenerationRequest("x", continue_ids=(1, 2))
    for part in parts:
        state.observe(TokenDelta("t" if part else "", part))
    for n in range(losses):
        state.lose(EngineFailed("gone"), f"r{n}", True)
    assert state.ids(request) == (1, 2, *(token for part in parts for token in part))
    assert state.allows(request) == (0 < limit and losses <= limit)
    echoing = dataclasses.replace(request, echo=True, continue_ids=())  # whose ids are the prompt's was not told
    assert state.allows(echoing) == (0 < limit and losses <= limit and not any(parts))
    state.observe(TokenDelta("text without ids"))
    assert not state.allows(request)


@pytest.mark.parametrize(
    ("error", "in_band", "ran_s", "began", "loss"),
    [
        (EngineFailed("died"), True, 0.0, False, True),
        (Unavailable("the server is stopping"), True, 9.0, True, False),  # a drain
        (Unavailable("connection reset"), False, 9.0, True, True),
        (Unavailable("connection refused"), False, 0.0, False, False),  # not up again
        (DeadlineExceeded("late"), False, 9.0, True, False),
    ],
)
def test_a_drain_and_a_replica_that_is_not_up_are_no_losses(error: TridentError, in_band, ran_s, began, loss):
    assert is_loss(error, in_band, ran_s, began) is loss


def test_suspects_are_known_by_their_prompt_only():
    suspects = SuspectPrompts()
    suspects.add(GenerationRequest("x", max_tokens=1), "request-1", EngineFailed("died"))
    assert GenerationRequest("x", max_tokens=2) in suspects and GenerationRequest("y") not in suspects
    assert GenerationRequest(input_ids=(1,)) not in suspects


def test_statuses_of_a_killed_server_are_unavailable():
    assert GONE.status[0] is grpc.StatusCode.UNAVAILABLE
