from __future__ import annotations

import asyncio
import re

import pytest

from clients import NO_RETRY, AsyncClient, BalancedClient
from clients.wire.status import Model
from contract.errors import InvalidArgument, NotFound, Unavailable
from contract.generation import GenerationRequest
from tests.fakes.replica import FakeReplica


async def test_every_call_carries_an_id_and_a_trace_context_and_what_the_caller_adds(replica) -> None:
    async with AsyncClient(replica.url, api_key="s3cret", metadata={"x-tenant": "acme"}) as client:
        await client.complete("x", max_tokens=1)
        await client.complete("x", max_tokens=1, request_id="mine", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    first, second = replica.seen
    assert re.fullmatch("[0-9a-f]{32}", first.id) and first.metadata["x-request-id"] == first.id
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", first.metadata["traceparent"])
    assert second.id == "mine"
    assert second.metadata["traceparent"] == f"00-{'a' * 32}-{'b' * 16}-01"
    assert first.metadata["authorization"] == "Bearer s3cret"
    assert first.metadata["x-tenant"] == "acme"


async def test_a_valid_request_can_be_opened_as_it_is(replica) -> None:
    async with AsyncClient(replica.url) as client:
        whole = await client.open(GenerationRequest("p q", max_tokens=3)).complete()
    assert whole.text == " p q p"
    assert whole.request_id == replica.seen[0].id != ""


async def test_health_says_what_is_live_and_ready(replica) -> None:
    async with AsyncClient(replica.url) as client:
        health = await client.health()
        assert (health.live, health.ready, health.model_ready, health.ok) == (True, True, True, True)
        replica.ready = False
        health = await client.health()
        assert (health.live, health.ready, health.model_ready, health.ok) == (True, False, False, False)


async def test_the_models_are_listed_with_their_state(replica) -> None:
    async with AsyncClient(replica.url) as client:
        assert await client.models() == [Model("ensemble", "1", "READY"), Model("engine", "1", "READY")]
        assert await client.model_ready("engine") and not await client.model_ready("nosuch")


async def test_an_unknown_model_is_not_found(replica) -> None:
    async with AsyncClient(replica.url, model="nosuch") as client:
        with pytest.raises(NotFound, match="unknown model: 'nosuch'"):
            await client.complete("x")


async def test_a_bad_argument_is_refused_before_anything_is_sent(replica) -> None:
    async with AsyncClient(replica.url) as client:
        with pytest.raises(InvalidArgument, match="top_p"):
            client.generate("x", top_p=0)
    assert not replica.seen


async def test_health_of_a_server_that_is_not_there_raises(unused_tcp_port) -> None:
    async with AsyncClient(f"127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(Unavailable, match="cannot reach"):
            await client.health()


async def test_a_closed_client_opens_again_when_it_is_used(replica) -> None:
    client = AsyncClient(replica.url)
    assert (await client.complete("x", max_tokens=1)).text == " x"
    await client.close()
    assert (await client.complete("y", max_tokens=1)).text == " y"
    await client.close()
    await client.close()


def test_one_client_serves_one_event_loop_after_another(threaded_replica) -> None:
    client = AsyncClient(threaded_replica.url)
    for word in ("x", "y"):

        async def ask(word: str = word) -> str:
            return (await client.complete(word, max_tokens=1)).text

        assert asyncio.run(ask()) == f" {word}"


def test_a_client_that_streamed_on_another_event_loop_can_be_closed(threaded_replica) -> None:
    client = AsyncClient(threaded_replica.url)

    async def stream() -> str:
        return (await client.generate("x", max_tokens=1).complete()).text

    async def stream_and_close() -> str:
        text = await stream()
        await client.close()
        return text

    assert asyncio.run(stream()) == asyncio.run(stream_and_close()) == " x"


async def test_text_that_utf8_cannot_hold_is_refused_by_name(replica) -> None:
    async with AsyncClient(replica.url) as client:
        with pytest.raises(InvalidArgument, match="prompt: must be .* UTF-8, got a lone surrogate at index 1"):
            await client.complete("x\ud800")
        with pytest.raises(InvalidArgument, match="stop: must be .* UTF-8, got a lone surrogate at index 0"):
            await client.complete("x", stop="\udc00")
    assert not replica.seen


async def learnt(client, replica) -> None:
    """A first stream, beside which the client asks, until it has the answer."""
    asked = replica.counts.health_checks
    await client.generate("x", max_tokens=1).complete()
    while replica.counts.health_checks == asked:
        await asyncio.sleep(0.005)
    await client.model_ready("engine")  # answered later, over the same connection


async def test_streams_go_to_the_packed_ensemble_once_the_server_has_said_that_it_has_it(replica) -> None:
    replica.packed = True
    async with AsyncClient(replica.url, retry=NO_RETRY) as client:
        await learnt(client, replica)
        replica.seen.clear()
        asked = replica.counts.health_checks
        for stream in (True, False):
            whole = await client.generate("p q", max_tokens=3, stream=stream).complete()
            assert whole.text == " p q p" and whole.usage is not None and whole.usage.output_tokens == 3
        assert [seen.model for seen in replica.seen] == ["ensemble_packed", "ensemble"]
        assert replica.counts.health_checks == asked
    async with AsyncClient(replica.url, model="ensemble") as client:
        replica.seen.clear()
        for _ in range(3):
            await client.generate("x", max_tokens=1).complete()
        assert [seen.model for seen in replica.seen] == ["ensemble"] * 3
        assert replica.counts.health_checks == asked


async def test_a_server_that_lost_the_packed_ensemble_serves_the_request_once(replica) -> None:
    replica.packed = True
    async with AsyncClient(replica.url, retry=NO_RETRY) as client:
        await learnt(client, replica)
        replica.packed, started = False, replica.counts.started
        replica.seen.clear()
        stream = client.generate("p q", max_tokens=2)
        assert (await stream.complete()).text == " p q"
        await client.generate("x", max_tokens=1).complete()
        assert [seen.model for seen in replica.seen] == ["ensemble_packed", "ensemble", "ensemble"]
        assert replica.counts.started == started + 2


async def test_a_client_that_is_closed_while_it_asks_leaves_nothing(threaded_replica) -> None:
    client = AsyncClient(threaded_replica.url, retry=NO_RETRY)
    stream = client.generate("x", max_tokens=1)
    await anext(aiter(stream))
    await client.close()
    assert not [task for task in asyncio.all_tasks() if "AsyncChannel._ask" in repr(task)]


async def test_each_replica_of_a_set_is_asked_for_itself(replica) -> None:
    async with FakeReplica(packed=True) as packed, BalancedClient([replica.url, packed.url]) as client:
        while not {seen.model for seen in packed.seen} >= {"ensemble_packed"}:
            await client.generate("x", max_tokens=1).complete()
        assert {seen.model for seen in replica.seen} <= {"ensemble"}
