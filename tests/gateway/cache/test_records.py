"""Idempotent streams over several gateways and a real Redis: one generation, the same bytes wherever they are read."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import Overloaded
from contract.generation import FinishReason, GenerationRequest, SamplingParams, TokenDelta, Usage
from gateway.admission.budgets import Reservation
from gateway.admission.shared_state import Away, SharedState
from gateway.cache import records, reuse
from gateway.cache.records import HEAD, Head, Record, Records, SharedAnswers, decode, encode, seeded, unfinished
from gateway.choices import ChoiceDelta
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.cache.test_reuse import as_
from tests.gateway.config.test_configuration import ALICE, BOB, keys
from tests.gateway.running import gateway, until
from tests.gateway.test_main import process

TOKENS = 24
PATH = "/v1/completions"
BODY = {
    "model": "demo",
    "prompt": "x",
    "max_tokens": TOKENS,
    "stream": True,
    "temperature": 0.7,
    "stream_options": {"include_usage": True},
}


def script(gap_s: float = 0.01) -> Script:
    return Script(tuple(f" {n}" for n in range(TOKENS)), FinishReason.LENGTH, gap_s=gap_s)


@contextlib.asynccontextmanager
async def pair(replica: FakeReplica, path: Path, **more) -> AsyncIterator[tuple]:
    shared = {"redis": f"unix://{path}", "continuations": 2, **more}
    async with gateway(replica, **shared) as one, gateway(replica, **shared) as two:
        await one.service.shared_state.redis.flushall()
        yield one, two


async def read(url: str, key: str, *, most: int | None = None, body: dict = BODY, **headers: str) -> tuple[int, bytes]:
    """The status and the body, or so many of its events."""
    named = {"idempotency-key": key} | {name.replace("_", "-"): value for name, value in headers.items()}
    async with aiohttp.ClientSession() as session, session.post(url + PATH, json=body, headers=named) as answer:
        if most is None:
            return answer.status, await answer.read()
        text = b""
        while text.count(b"\n\n") < most:
            part = await answer.content.readany()
            assert part, text
            text += part
        return answer.status, text


def after(text: bytes, event: int) -> bytes:
    """The events behind one."""
    return text[text.index(b"\n\n", text.index(b"id: %d\n" % event)) + 2 :]


@pytest.mark.slow
async def test_another_gateway_replays_follows_and_resumes_a_stream_byte_for_byte(redis_socket: Path):
    async with FakeReplica(lambda seen: script()) as replica, pair(replica, redis_socket) as (one, two):
        running = asyncio.create_task(read(one.base_url, "a"))
        await until(lambda: replica.counts.running == 1)
        followed = await read(two.base_url, "a")
        status, whole = await running
        assert status == 200 and whole.count(b"\n\n") == TOKENS + 2 and b"[DONE]" in whole
        assert followed == (200, whole)
        assert await read(two.base_url, "a") == (200, whole)
        async with gateway(replica, redis=f"unix://{redis_socket}") as three:
            assert await read(three.base_url, "a", Last_Event_ID="7") == (200, after(whole, 7))
            status, body = await read(three.base_url, "a", Last_Event_ID="99")
            assert status == 400 and b"must be at most 23" in body
            status, body = await read(three.base_url, "new", Last_Event_ID="3")
            assert status == 400 and b"still kept" in body
        assert replica.counts.started == 1
        metrics = await two.metrics()
        assert metrics['trident_gateway_reuse_total{result="replayed"}'] == 2


@pytest.mark.slow
async def test_a_stream_that_is_left_while_its_head_is_written_holds_nothing(
    redis_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, write = asyncio.Event(), Record.write

    async def hanging(record: Record, *fields: str, **more: float) -> None:
        if fields:
            writing.set()
            await asyncio.Event().wait()
        await write(record, *fields, **more)

    monkeypatch.setattr(Record, "write", hanging)
    shared = {"redis": f"unix://{redis_socket}", "config": "[reuse]\nidempotency_linger_s = 0.01\n"}
    async with FakeReplica(lambda seen: script()) as replica, gateway(replica, **shared) as one:
        await one.service.shared_state.redis.flushall()
        reading = asyncio.create_task(read(one.base_url, "a"))
        await asyncio.wait_for(writing.wait(), 30)
        assert one.service.admission.running == 1
        reading.cancel()
        await until(lambda: not one.service.admission.running and not one.service.live)
        assert not await one.service.shared_state.redis.keys("trident:stream:*")


@pytest.mark.slow
async def test_tenants_and_requests_are_told_apart_and_a_refused_request_leaves_nothing(redis_socket: Path):
    config = keys(ALICE, BOB)
    async with (
        FakeReplica(lambda seen: script(0.0)) as replica,
        pair(replica, redis_socket, config=config) as (one, two),
    ):
        body = BODY | {"stream": False, "stream_options": None}
        answers = [
            await one.post(PATH, body, idempotency_key="k", **as_(ALICE)),
            await two.post(PATH, body, idempotency_key="k", **as_(BOB)),
        ]
        assert [status for status, *_ in answers] == [200, 200] and replica.counts.started == 2
        status, _, error = await two.post(PATH, body | {"prompt": "y"}, idempotency_key="k", **as_(ALICE))
        assert status == 400 and error["error"]["param"] == "Idempotency-Key"
        names = await one.service.shared_state.redis.keys("trident:stream:*")
        assert len(names) == 4 and not any(b"alice" in name or b"acme" in name for name in names)
        assert all([0 < await one.service.shared_state.redis.pttl(name) <= 600_000 for name in names])


@pytest.mark.slow
async def test_the_stream_of_a_gateway_that_is_killed_goes_on_at_another_and_is_charged_once(
    redis_socket: Path, tmp_path: Path
):
    limits = "tokens_per_minute = 1000000"
    config = keys(ALICE, limits=limits) + f'[budgets]\nredis = "unix://{redis_socket}"\n'
    path = tmp_path / "gateway.toml"
    path.write_text(config)
    settings = {"REDIS": f"unix://{redis_socket}", "CONFIG": str(path), "LOG_LEVEL": "error", "CONTINUATIONS": "2"}
    async with FakeReplica(lambda seen: script(0.03)) as replica:
        async with process(replica, **settings) as (dying, url), process(replica, **settings) as (living, other_url):
            cut = asyncio.create_task(read(url, "killed", most=8, **as_(ALICE)))
            await until(lambda: replica.counts.running == 1)
            following = asyncio.create_task(read(other_url, "killed", **as_(ALICE)))
            _, seen = await cut
            os.kill(dying.pid, signal.SIGKILL)
            await dying.communicate()
            status, whole = await following
            assert status == 200 and whole.startswith(seen), whole
            text = b"".join(b'"text":" %d"' % n in whole and b"%d," % n for n in range(TOKENS))
            assert (
                text.count(b",") == TOKENS and whole.count(b"\n\n") == TOKENS + 2 and b'"completion_tokens":24' in whole
            )
            assert await read(other_url, "killed", Last_Event_ID="5", **as_(ALICE)) == (200, after(whole, 5))
            assert replica.counts.started == 2  # the second one only generated what was missing
            ids = replica.seen[-1].inputs["continue_ids"]
            assert list(ids) == list(range(len(ids))) and len(ids) >= 6
            living.terminate()
            await living.communicate()
    async with gateway(FakeReplica(), config=config) as third:
        standing = await third.service.budgets.reserve(third.service.configuration.tenant(ALICE).levels, 0)
        (tokens,) = [one.balance for one in standing.standings if one.demand.unit == "tokens"]
        assert 1_000_000 - tokens < 2 * TOKENS + 10  # no reservation is left of the one that died


@pytest.mark.slow
async def test_a_gateway_that_stood_still_does_not_go_on_with_a_stream_that_was_taken_over(
    redis_socket: Path, monkeypatch
):
    monkeypatch.setattr(records, "LEASE_S", 0.3)
    gate = asyncio.Event()
    waits = dataclasses.replace(script(), gate=gate, gate_at=12)
    async with (
        FakeReplica(lambda seen: script() if "continue_ids" in seen.inputs else waits) as replica,
        pair(replica, redis_socket) as (one, two),
    ):
        running = asyncio.create_task(read(one.base_url, "k"))
        await until(lambda: replica.counts.running == 1)
        await asyncio.sleep(0.2)
        state = one.service.shared_state
        state._away_until_s = time.monotonic() + 600  # as if this gateway stood still
        status, whole = await read(two.base_url, "k")
        state._away_until_s = 0.0
        gate.set()
        assert status == 200 and whole.count(b"\n\n") == TOKENS + 2
        assert b"another gateway goes on with this stream" in (await running)[1]


@pytest.mark.slow
async def test_a_redis_that_comes_back_empty_ends_no_stream(redis_socket: Path):
    async with FakeReplica(lambda seen: script(0.02)) as replica, pair(replica, redis_socket) as (one, two):
        running = asyncio.create_task(read(one.base_url, "k"))
        await until(lambda: replica.counts.running == 1)
        await asyncio.sleep(0.1)
        await one.service.shared_state.redis.flushall()
        status, whole = await running
        assert status == 200 and whole.count(b"\n\n") == TOKENS + 2 and b"error" not in whole
        assert (await read(two.base_url, "k"))[0] == 200 and replica.counts.started == 2


@pytest.fixture
async def made(redis_socket: Path) -> AsyncIterator[Records]:
    """Records of one gateway in an empty Redis."""
    state = SharedState(f"unix://{redis_socket}")
    await state.redis.flushall()
    found = Records(state, 60.0, lambda: False)
    yield found
    await found.aclose()
    await state.close()


@pytest.mark.parametrize("left", [0, 1])
async def test_a_redis_that_lost_items_of_a_stream_gets_no_wrong_ones(made: Records, left: int):
    record = made.record("t", "k", "digest")
    assert await record.claim() == "new"

    async def four() -> AsyncIterator[ChoiceDelta]:
        for number in range(4):
            if number == 3:
                await made._state.redis.rpop(record.keys[1], 3 - left)
            yield ChoiceDelta(0, TokenDelta(str(number), (number,)))

    assert len([item async for item in record.generate(four())]) == 4
    reader = made.record("t", "k", "digest")
    found = await reader.read()
    assert found is not None and not found[1] and not record.owned
    assert len(reader.items) == left


async def test_the_end_of_a_stream_is_written_when_redis_is_back(made: Records, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "RENEW_S", 0.05)
    record, reader = made.record("t", "k", "digest"), made.record("t", "k", "digest")
    await record.claim()

    async def four() -> AsyncIterator[ChoiceDelta]:
        for number in range(4):
            yield ChoiceDelta(0, TokenDelta(str(number), (number,)))
            if number == 1:
                made._state._away_until_s = time.monotonic() + 600

    assert len([item async for item in record.generate(four())]) == 4
    record.leave()
    made._state._away_until_s = 0.0
    await until(lambda: not record.owned and not made.owned)
    assert await reader.read() == (None, True, False) and len(reader.items) == 4
    assert 0 < await made._state.redis.pttl(record.keys[0]) <= 60_000


async def test_a_release_that_redis_did_not_take_is_written_when_it_is_back(
    made: Records, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "RENEW_S", 0.05)
    record, next_one = made.record("t", "k", "digest"), made.record("t", "k", "digest")
    await record.claim()
    await record.write_head(Head({}, "r", 1, "", Reservation("left", True)))

    async def two() -> AsyncIterator[ChoiceDelta]:
        for number in range(2):
            yield ChoiceDelta(0, TokenDelta(str(number), (number,)))

    deltas = record.generate(two())
    await anext(deltas)
    made._state._away_until_s = time.monotonic() + 600
    await anext(deltas)
    await deltas.aclose()  # as when its reader leaves
    record.leave()
    assert record.owned
    made._state._away_until_s = 0.0
    await until(lambda: not record.owned and not made.owned)
    assert await next_one.claim() == "lost" and (await next_one.read())[0] == Head({}, "r", 1, "")
    assert len(next_one.items) == next_one.settled == 2


async def test_the_end_of_a_stream_is_given_up_after_the_time_it_would_be_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "RENEW_S", 0.02)
    state = SharedState("redis://127.0.0.1:1")
    made = Records(state, 0.1, lambda: False)
    record = made.record("t", "k", "digest")
    record.owned = True
    made.own(record)

    async def one() -> AsyncIterator[ChoiceDelta]:
        yield ChoiceDelta(0, TokenDelta("a", (1,)))

    assert [item async for item in record.generate(one())]
    await until(lambda: not record.owned and not made.owned)
    await made.aclose()
    await state.close()


@contextlib.asynccontextmanager
async def half_a_stream(
    path: Path, monkeypatch: pytest.MonkeyPatch, config: str = "", **headers: str
) -> AsyncIterator[tuple]:
    """Two gateways, the first one in the middle of a stream."""
    monkeypatch.setattr(records, "LEASE_S", 0.3)
    gate = asyncio.Event()
    waits = dataclasses.replace(script(0.0), gate=gate, gate_at=12)
    plays = itertools.chain([waits], itertools.repeat(script(0.0)))
    config += "[reuse]\nidempotency_linger_s = 0.01\n"
    async with (
        FakeReplica(lambda seen: next(plays)) as replica,
        pair(replica, path, config=config) as (one, two),
    ):
        running = asyncio.create_task(read(one.base_url, "k", **headers))
        await until(lambda: replica.counts.running == 1)
        await asyncio.sleep(0.2)
        yield one, two
        gate.set()
        await running


def stand_still(one) -> None:
    one.service.shared_state._away_until_s = time.monotonic() + 600


@pytest.mark.slow
@pytest.mark.parametrize("start", [{}, {"Last_Event_ID": "2"}])
async def test_a_stream_whose_taking_over_fails_is_left_for_the_next_attempt(
    redis_socket: Path, monkeypatch: pytest.MonkeyPatch, start: dict[str, str]
):
    taken: list[Record] = []

    async def away(record: Record) -> None:
        taken.append(record)
        raise Away

    async with half_a_stream(redis_socket, monkeypatch) as (one, two):
        stand_still(one)
        await asyncio.sleep(0.4)
        with monkeypatch.context() as patch:
            patch.setattr(Record, "read", away)
            assert (await read(two.base_url, "k", **start))[0] == 503
        assert taken and not taken[0].owned and not taken[0].records.owned
        status, whole = await asyncio.wait_for(read(two.base_url, "k", **start), 30)
        assert status == 200 and whole.endswith(b"data: [DONE]\n\n") and b"error" not in whole


@pytest.mark.slow
async def test_a_reader_that_leaves_just_after_it_took_a_stream_over_leaves_it_to_others(
    redis_socket: Path, monkeypatch: pytest.MonkeyPatch
):
    claimed, claim = asyncio.get_running_loop().create_future(), Record.claim

    async def told(record: Record) -> str:
        state = await claim(record)
        if state == "lost" and not claimed.done():
            claimed.set_result(record)
        return state

    async with half_a_stream(redis_socket, monkeypatch) as (one, two):
        monkeypatch.setattr(Record, "claim", told)
        monkeypatch.setattr(reuse, "POLL_S", 2.0)  # the pause after the claim, in which the reader leaves
        following = asyncio.create_task(read(two.base_url, "k"))
        await until(lambda: two.service.metrics.in_flight._value.get() == 1)
        stand_still(one)
        record = await asyncio.wait_for(claimed, 30)
        following.cancel()
        monkeypatch.setattr(reuse, "POLL_S", 0.05)
        await until(lambda: not two.service.metrics.in_flight._value.get())
        assert not record.owned and not record.records.owned
        status, whole = await asyncio.wait_for(read(two.base_url, "k"), 30)
        assert status == 200 and whole.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
async def test_a_draining_gateway_waits_for_readers_of_other_gateways_streams(redis_socket: Path):
    async with FakeReplica(lambda seen: script(0.03)) as replica, pair(replica, redis_socket) as (one, two):
        running = asyncio.create_task(read(one.base_url, "k"))
        await until(lambda: replica.counts.running == 1)
        following = asyncio.create_task(read(two.base_url, "k"))
        await until(lambda: two.service.metrics.in_flight._value.get() == 1)
        assert await two.service.drain(60.0) == 0
        assert replica.counts.running == 0
        assert await following == await running


@pytest.mark.slow
async def test_a_drain_that_is_over_ends_readers_of_other_gateways_streams(redis_socket: Path):
    gate = asyncio.Event()
    waits = dataclasses.replace(script(), gate=gate, gate_at=12)
    async with FakeReplica(lambda seen: waits) as replica, pair(replica, redis_socket) as (one, two):
        running = asyncio.create_task(read(one.base_url, "k"))
        await until(lambda: replica.counts.running == 1)
        following = asyncio.create_task(read(two.base_url, "k"))
        await until(lambda: two.service.metrics.in_flight._value.get() == 1)
        assert await two.service.drain(0.0) == 1
        assert b"the gateway is stopping" in (await asyncio.wait_for(following, 30))[1]
        gate.set()
        assert (await running)[1].endswith(b"data: [DONE]\n\n")


async def test_answers_are_shared_by_gateways_that_keep_them_equally_long(redis_socket: Path):
    state = SharedState(f"unix://{redis_socket}")
    await state.redis.flushall()
    answer = (TokenDelta("a", (1,), finish_reason=FinishReason.STOP, usage=Usage(1, 1)),)
    await SharedAnswers(state, 600.0).put("key", answer)
    assert await SharedAnswers(state, 600.0).get("key", 60.0) == answer
    assert await SharedAnswers(state, 60.0).get("key", 60.0) is None  # its age is not known there
    await state.close()


@pytest.mark.slow
@pytest.mark.parametrize("start", [{}, {"Last_Event_ID": "2"}])
async def test_a_stream_of_a_pool_with_two_engines_is_not_taken_over(redis_socket: Path, monkeypatch, start):
    monkeypatch.setattr(records, "LEASE_S", 0.3)
    gate = asyncio.Event()
    plays = iter([dataclasses.replace(script(0.0), gate=gate, gate_at=12), script(0.0)])
    shared = {"redis": f"unix://{redis_socket}", "continuations": 2}
    async with (
        FakeReplica(lambda seen: next(plays), engine="a" * 64) as old,
        FakeReplica(lambda seen: next(plays), engine="b" * 64) as new,
        gateway(old, new, **shared) as one,
        gateway(old, new, **shared) as two,
    ):
        await one.service.shared_state.redis.flushall()
        for each in (one, two):
            await until(lambda each=each: each.service.replicas.engine("", "several") == "several")
        running = asyncio.create_task(read(one.base_url, "k"))
        await until(lambda: old.counts.running + new.counts.running == 1)
        await asyncio.sleep(0.2)
        stand_still(one)
        await asyncio.sleep(0.4)
        status, body = await read(two.base_url, "k", **start)
        if start:
            assert status == 503 and b"no other can go on with it exactly" in body
            status, body = await read(two.base_url, "k")
        assert status == 200 and body.count(b"\n\n") == TOKENS + 2
        assert await read(two.base_url, "k") == (200, body)
        assert not any("continue_ids" in seen.inputs for seen in old.seen + new.seen)
        gate.set()
        await running


@pytest.mark.slow
async def test_a_stream_that_is_taken_over_twice_is_charged_once(redis_socket: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "LEASE_S", 0.3)
    gate, whole = asyncio.Event(), script(0.0)
    plays = iter([whole, *(dataclasses.replace(whole, gate=gate, gate_at=at) for at in (12, 18)), whole])
    config = keys(ALICE, limits="tokens_per_minute = 1000000") + f'[budgets]\nredis = "unix://{redis_socket}"\n'
    body = BODY | {"n": 2, "stream": False, "stream_options": None}
    async with (
        FakeReplica(lambda seen: next(plays)) as replica,
        pair(replica, redis_socket, config=config) as (one, two),
        gateway(replica, redis=f"unix://{redis_socket}", continuations=2, config=config) as three,
    ):
        redis, reservations, charged, running = three.service.shared_state.redis, [], [], []
        for number, standing in enumerate((one, two)):
            standing.service.admission.on_charged = charged.append
            running.append(asyncio.create_task(standing.post(PATH, body, idempotency_key="k", **as_(ALICE))))
            await until(lambda number=number: len(replica.seen) == 2 + number and replica.counts.finished)
            await asyncio.sleep(0.2)
            (name,) = [name for name in await redis.keys("trident:stream:*") if not name.endswith(b"items")]
            reservations.append(HEAD.validate_json(await redis.hget(name, "head")).reservation.id)
            stand_still(standing)
        three.service.admission.on_charged = charged.append
        await asyncio.sleep(0.4)
        with monkeypatch.context() as patch:
            patch.setattr(three.service, "choices", refuse)
            assert (await three.post(PATH, body, idempotency_key="k", **as_(ALICE)))[0] == 429
        status, _, answer = await three.post(PATH, body, idempotency_key="k", **as_(ALICE))
        assert status == 200 and answer["usage"]["completion_tokens"] == 2 * TOKENS
        assert [record.completion_tokens for record in charged] == [TOKENS, TOKENS]
        assert len(set(reservations)) == 2  # the one of the second gateway is known to the third
        gate.set()
        await asyncio.gather(*running)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["drains", "is left", "stands still"])
@pytest.mark.parametrize("second", ["goes on", "drains", "is left", "stands still"])
async def test_a_stream_that_is_handed_over_is_charged_once(
    redis_socket: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str
):
    monkeypatch.setattr(records, "LEASE_S", 0.3)
    gate, whole = asyncio.Event(), script(0.0)
    gated = [dataclasses.replace(whole, gate=gate, gate_at=at) for at in (12, 18)]
    plays = iter([whole, gated[0], whole if second == "goes on" else gated[1], whole])
    config = keys(ALICE, limits="tokens_per_day = 10000") + f'[budgets]\nredis = "unix://{redis_socket}"\n'
    config += "[reuse]\nidempotency_linger_s = 0.01\n"
    config += '[models.demo]\npools = "main"\nprice = { input = 1.0, output = 2.0 }\n'
    body = BODY | {"n": 2}

    async def begin(one, how: str, tokens: int) -> asyncio.Task:
        """Generate until so many tokens are recorded, and end."""
        asked = asyncio.create_task(read(one.base_url, "k", body=body, **as_(ALICE)))
        while not (names := await redis.keys("trident:stream:*:items")) or await redis.llen(names[0]) < tokens:
            assert not asked.done(), asked.result()
            await asyncio.sleep(0.01)
        if how == "stands still":
            stand_still(one)
            await asyncio.sleep(0.4)
        elif how == "drains":
            await one.service.drain(0.0)
        else:
            asked.cancel()
        await until(lambda: how == "stands still" or not one.service.metrics.in_flight._value.get())
        return asked

    async with (
        FakeReplica(lambda seen: next(plays)) as replica,
        pair(replica, redis_socket, config=config, replicas=f"main={replica.url}") as (one, two),
        gateway(
            redis=f"unix://{redis_socket}", continuations=2, config=config, replicas=f"main={replica.url}"
        ) as three,
    ):
        gateways, redis, charged, output = (one, two, three), three.service.shared_state.redis, [], 2 * TOKENS
        for each in gateways:
            each.service.admission.on_charged = charged.append
        asked = [await begin(one, first, TOKENS + 12)]
        assert [record.completion_tokens for record in charged] == [TOKENS + 12] * (first != "stands still")
        if second != "goes on":
            asked.append(await begin(two, second, TOKENS + 18))
        if second == "is left":  # and nobody comes back
            output = TOKENS + 18
        else:
            last = two if second == "goes on" else three
            status, answer = await read(last.base_url, "k", body=body, **as_(ALICE))
            assert status == 200 and b'"completion_tokens":48' in answer, answer
        one.service.shared_state._away_until_s = two.service.shared_state._away_until_s = 0.0
        gate.set()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: not any(each.service.budgets._writing for each in gateways))
        prompt = 1
        sums = tuple(map(sum, zip(*[record[6:] for record in charged], strict=True)))
        assert sums == (prompt, 0, output, 1000 * (prompt + 2 * output))
        levels = three.service.configuration.tenant(ALICE).levels
        (standing,) = (await three.service.budgets.reserve(levels, 0)).standings
        assert 10_000 - standing.balance == prompt + output
        pages = [await each.metrics() for each in gateways]
        for name, amount in (("tokens", prompt + output), ("charges", (prompt + 2 * output) / 1e3)):
            series = f"trident_gateway_{name}_total{{"
            counted = sum(value for page in pages for key, value in page.items() if key.startswith(series))
            assert counted == pytest.approx(amount)


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [True, False])
async def test_the_reservation_of_a_dead_gateway_is_not_in_the_way_of_its_stream(
    redis_socket: Path, monkeypatch: pytest.MonkeyPatch, goes_on: bool
):
    if not goes_on:  # all is generated anew
        monkeypatch.setattr(reuse, "unfinished", lambda *_: None)
    limits = f"tokens_per_day = {2 * TOKENS}"  # for one request
    config = keys(ALICE, limits=limits) + f'[budgets]\nredis = "unix://{redis_socket}"\n'
    async with half_a_stream(redis_socket, monkeypatch, config, **as_(ALICE)) as (one, two):
        stand_still(one)
        await asyncio.sleep(0.4)
        status, answer = await read(two.base_url, "k", **as_(ALICE))
        assert status == 200 and b'"completion_tokens":24' in answer, answer


async def refuse(*_) -> None:
    raise Overloaded("full")


@pytest.mark.slow
async def test_without_redis_a_stream_is_its_gateways_and_does_not_wait():
    async with FakeReplica(lambda seen: script(0.0)) as replica:
        async with gateway(replica, redis="redis://127.0.0.1:1/0") as running:
            assert await read(running.base_url, "k") == await read(running.base_url, "k")
            assert replica.counts.started == 1
            assert (await read(running.base_url, "other", Last_Event_ID="1"))[0] == 503


deltas = st.builds(
    TokenDelta,
    text=st.text(),
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    log_probs=st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
    finish_reason=st.sampled_from([None, *FinishReason]),
    usage=st.none() | st.builds(Usage, st.integers(0, 9), st.integers(0, 9)),
    error=st.text(max_size=3),
    top_log_probs=st.lists(st.tuples(st.tuples(st.integers(0, 9), st.floats(allow_nan=False))), max_size=2).map(tuple),
)


@given(st.integers(0, 9), deltas)
def test_a_delta_is_read_as_it_was_written(choice, delta):
    item = ChoiceDelta(choice, delta)
    assert decode(encode(item).encode()) == item


def test_a_head_is_read_as_it_was_written():
    head = Head({"x": "1"}, "id", 5, "engine")
    assert HEAD.validate_json(HEAD.dump_json(head)) == head


def test_only_choices_that_have_not_ended_go_on_and_only_where_that_is_exact():
    requests = [GenerationRequest(text_input="x", max_tokens=9)] * 3
    items = [
        ChoiceDelta(0, TokenDelta("a", (1,))),
        ChoiceDelta(1, TokenDelta("b", (2,), finish_reason=FinishReason.STOP)),
        ChoiceDelta(0, TokenDelta("c", (3,))),
    ]
    left = unfinished(items, requests, 2)
    assert {number: request.continue_ids for number, request in left.items()} == {0: (1, 3), 2: ()}
    assert unfinished([*items, ChoiceDelta(0, TokenDelta("no ids"))], requests, 2) is None
    assert unfinished(items, requests, 0) is None
    assert unfinished(items[1:2] * 1, requests[:0] + [requests[0]] * 2, 2).keys() == {0}


def test_every_gateway_gives_a_request_that_needs_one_the_same_seed():
    sampled = SamplingParams(temperature=1.0, presence_penalty=0.5)
    request = GenerationRequest(text_input="x", sampling=sampled)

    class State:
        gateway = "g"

    record = Records(State(), 1.0, lambda: False).record("t", "k", "digest")
    other = Records(State(), 1.0, lambda: False).record("t2", "k", "digest")
    seeds = {seeded(request, record, choice).sampling.seed for choice in (0, 0, 1)}
    assert len(seeds) == 2 and seeded(request, other, 0).sampling.seed not in seeds
    plain = GenerationRequest(text_input="x", sampling=SamplingParams(temperature=1.0))
    assert seeded(plain, record, 0) is plain


@pytest.mark.slow
async def test_a_response_that_one_gateway_cached_is_served_by_all_and_to_its_tenant_alone(redis_socket: Path):
    config, body = (
        keys(ALICE, BOB) + '[reuse]\nengine = "e"\n',
        BODY | {"temperature": 0, "stream": False, "stream_options": None},
    )
    async with (
        FakeReplica(lambda seen: script(0.0)) as replica,
        pair(replica, redis_socket, config=config) as (one, two),
    ):
        first = await one.post(PATH, body, **as_(ALICE))
        while not await one.service.shared_state.redis.keys("trident:answer:*"):
            await asyncio.sleep(0.01)
        found = [await gate.post(PATH, body, **as_(ALICE)) for gate in (one, two, two)]
        assert [headers["x-trident-cache"] for _, headers, _ in (first, *found)] == ["miss", "hit", "hit", "hit"]
        assert all(answer["choices"] == first[2]["choices"] for *_, answer in found)
        status, headers, _ = await two.post(PATH, body, cache_control="max-age=0", **as_(ALICE))
        assert (status, headers["x-trident-cache"]) == (200, "miss")
        assert (await two.post(PATH, body, **as_(BOB)))[1]["x-trident-cache"] == "miss"
        assert replica.counts.started == 3
        two.service.shared_state._away_until_s = time.monotonic() + 60
        assert (await two.post(PATH, body | {"prompt": "new"}, **as_(ALICE)))[0] == 200
