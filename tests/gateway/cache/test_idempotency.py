"""A retry attaches to the first try: running or finished, from where the reader was, and never across tenants."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contract.errors import EngineFailed, InvalidArgument, Overloaded
from contract.generation import FinishReason
from gateway.cache.idempotency import Idempotency
from gateway.choices import ChoiceDelta
from tests.gateway import scripted_source
from tests.gateway.scripted_source import ScriptedSource


def words(count: int, end: FinishReason | None = FinishReason.STOP) -> list[ChoiceDelta]:
    return [ChoiceDelta(0, delta) for delta in scripted_source.words(count, end)]


async def _settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def _all(reader: Any) -> list:
    return [delta async for delta in reader]


async def test_a_retry_attaches_to_the_running_stream_and_to_the_finished_one(clock: Any) -> None:
    known, source = Idempotency(clock), ScriptedSource(words(5), hold=True)
    first = known.follow("a", "k", "r", source)
    await anext(first)
    retry = asyncio.ensure_future(_all(known.follow("a", "k", "r", source)))
    source.go.set()
    assert await retry == words(5)
    await first.aclose()
    assert await _all(known.follow("a", "k", "r", source)) == words(5)
    assert source.opened == 1


async def test_a_dropped_reader_goes_on_where_it_was(clock: Any) -> None:
    known, source = Idempotency(clock), ScriptedSource(words(5), hold=True)
    dropped = known.follow("a", "k", "r", source)
    assert [(await anext(dropped)).delta.text, (await anext(dropped)).delta.text] == ["w0 ", "w1 "]
    await dropped.aclose()
    await _settle()
    assert not source.closed
    source.go.set()
    assert await _all(known.follow("a", "k", "r", source, start=2)) == words(5)[2:]
    assert source.opened == 1


async def test_keys_are_not_shared_across_tenants(clock: Any) -> None:
    known = Idempotency(clock)
    mine, theirs = ScriptedSource(words(2)), ScriptedSource(words(3))
    assert await _all(known.follow("a", "k", "r", mine)) == words(2)
    assert await _all(known.follow("b", "k", "r", theirs)) == words(3)
    with pytest.raises(InvalidArgument, match="^Last-Event-ID: "):
        known.follow("c", "k", "r", mine, start=1)


async def test_a_key_belongs_to_one_request(clock: Any) -> None:
    known, source = Idempotency(clock), ScriptedSource(words(2))
    await _all(known.follow("a", "k", "r", source))
    with pytest.raises(InvalidArgument, match="^Idempotency-Key: "):
        known.follow("a", "k", "other", source)


@pytest.mark.parametrize("key", ["", "x" * 256, "a\nb", "\x00"])
async def test_what_is_no_key_is_refused(clock: Any, key: str) -> None:
    with pytest.raises(InvalidArgument, match="^Idempotency-Key: "):
        Idempotency(clock).follow("a", key, "r", ScriptedSource(words(1)))


async def test_no_client_resumes_after_what_was_never_sent(clock: Any) -> None:
    known, source = Idempotency(clock), ScriptedSource(words(2))
    await _all(known.follow("a", "k", "r", source))
    assert await _all(known.follow("a", "k", "r", source, start=2)) == []
    with pytest.raises(InvalidArgument, match="^Last-Event-ID: "):
        known.follow("a", "k", "r", source, start=3)


async def test_a_stream_whose_beginning_was_dropped_is_refused_by_name(clock: Any) -> None:
    known, source = Idempotency(clock, max_stream_bytes=2000), ScriptedSource(words(20), hold=True)
    first = known.follow("a", "k", "r", source)
    for _ in range(19):
        await anext(first)
    for start, header in ((0, "Idempotency-Key"), (18, "Last-Event-ID")):
        with pytest.raises(InvalidArgument, match=f"^{header}: the beginning of this stream is not kept"):
            known.follow("a", "k", "r", source, start)
    source.go.set()
    assert (await _all(first))[0].delta.text == "w19 "


async def test_a_failed_try_is_tried_again(clock: Any) -> None:
    known = Idempotency(clock)
    with pytest.raises(EngineFailed):
        await _all(known.follow("a", "k", "r", ScriptedSource(words(2, None), failure=EngineFailed("broke"))))
    await _settle()
    assert await _all(known.follow("a", "k", "r", ScriptedSource(words(2)))) == words(2)


async def test_no_client_came_back_in_time_so_the_retry_is_a_new_try(clock: Any) -> None:
    known, source = Idempotency(clock, linger_s=0.0), ScriptedSource(words(3), hold=True)
    dropped = known.follow("a", "k", "r", source)
    await anext(dropped)
    await dropped.aclose()
    source.go.set()
    assert await _all(known.follow("a", "k", "r", source)) == words(3)
    await _settle()
    assert source.opened == 2 and len(known) == 1


async def test_finished_streams_are_forgotten_after_their_time(clock: Any) -> None:
    known, source = Idempotency(clock, ttl_s=60), ScriptedSource(words(2))
    await _all(known.follow("a", "k", "r", source))
    await _settle()
    clock.advance(60)
    await _all(known.follow("a", "k", "other", source))
    assert source.opened == 2


async def test_bounds_hold(clock: Any) -> None:
    known = Idempotency(clock, max_running=3, max_finished=2)
    source = ScriptedSource(words(2), hold=True)
    readers = [known.follow("a", str(number), "r", source) for number in range(3)]
    with pytest.raises(Overloaded, match="3/3 streams with an Idempotency-Key"):
        known.follow("a", "new", "r", source)
    source.go.set()
    for reader in readers:
        await _all(reader)
    await _settle()
    assert len(known) == 2
    small = Idempotency(clock, max_bytes=1)
    await _all(small.follow("a", "k", "r", source))
    await _settle()
    assert len(small) == 0 and small._finished.currsize == 0
