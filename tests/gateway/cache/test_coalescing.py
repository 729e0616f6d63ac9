"""One engine stream, many readers: everyone gets all of it, at their own pace, and may leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from contract.errors import Cancelled, EngineFailed, Overloaded
from contract.generation import FinishReason
from gateway.cache.coalescing import Coalescer, SharedStream, size_bytes
from gateway.choices import ChoiceDelta
from tests.gateway import scripted_source
from tests.gateway.scripted_source import ScriptedSource


def words(count: int, end: FinishReason | None = FinishReason.STOP) -> list[ChoiceDelta]:
    return [ChoiceDelta(0, delta) for delta in scripted_source.words(count, end)]


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def _all(reader: AsyncIterator[ChoiceDelta]) -> list[ChoiceDelta]:
    return [delta async for delta in reader]


async def test_many_readers_share_one_stream_and_each_gets_all_of_it() -> None:
    coalescer, source, script = Coalescer(), None, words(40)
    source = ScriptedSource(script, hold=True)
    rng = random.Random(2)

    async def read(reader: AsyncIterator[ChoiceDelta]) -> list[ChoiceDelta]:
        seen = []
        async for delta in reader:
            seen.append(delta)
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        return seen

    first = [asyncio.ensure_future(read(coalescer.follow("k", source))) for _ in range(20)]
    await _settle()
    late = asyncio.ensure_future(read(coalescer.follow("k", source)))
    await _settle()
    source.go.set()
    assert all(seen == script for seen in await asyncio.gather(*first, late))
    assert (source.opened, len(coalescer)) == (1, 0)


async def test_other_keys_and_finished_streams_are_not_joined() -> None:
    coalescer, source = Coalescer(), ScriptedSource(words(3))
    await asyncio.gather(_all(coalescer.follow("a", source)), _all(coalescer.follow("b", source)))
    await _all(coalescer.follow("a", source))
    assert source.opened == 3


async def test_one_who_leaves_takes_nothing_from_the_others() -> None:
    coalescer, script = Coalescer(), words(5)
    source = ScriptedSource(script, hold=True)
    stays, leaves = coalescer.follow("k", source), coalescer.follow("k", source)
    assert await anext(leaves) == script[0]
    await leaves.aclose()
    await leaves.aclose()
    await _settle()
    assert not source.closed
    source.go.set()
    assert await _all(stays) == script


async def test_a_reader_cancelled_while_it_waits_has_left() -> None:
    coalescer, source = Coalescer(), ScriptedSource(words(1), hold=True)
    task = asyncio.ensure_future(_all(coalescer.follow("k", source)))
    await _settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _settle()
    assert source.closed and len(coalescer) == 0


async def test_the_last_one_to_leave_frees_the_engine_and_the_next_begins_anew() -> None:
    coalescer, source = Coalescer(), ScriptedSource(words(5), hold=True)
    one, other = coalescer.follow("k", source), coalescer.follow("k", source)
    await anext(one)
    await one.aclose()
    await other.aclose()
    again = coalescer.follow("k", source)  # in the moment between: it must not join what is being cancelled
    await _settle()
    assert source.closed and source.opened == 2
    source.go.set()
    assert await _all(again) == words(5)
    assert len(coalescer) == 0


async def test_leaving_before_the_stream_took_its_first_step_cleans_up() -> None:
    coalescer, source = Coalescer(), ScriptedSource(words(5))
    await coalescer.follow("k", source).aclose()
    await _settle()
    assert len(coalescer) == 0


async def test_a_failure_reaches_every_reader_after_what_came_before_it() -> None:
    stream = SharedStream(ScriptedSource(words(3, None), failure=EngineFailed("broke"))())
    readers = [stream.follow() for _ in range(3)]
    for reader in readers:
        for delta in words(3, None):
            assert await anext(reader) == delta
        with pytest.raises(EngineFailed, match="broke"):
            await anext(reader)
    assert stream.done and not stream.complete and stream.readers == 0


async def test_the_log_is_bounded_and_who_is_too_slow_is_told() -> None:
    script = words(100)
    source = ScriptedSource(script)
    bound = 10 * size_bytes(script[0].delta)
    stream = SharedStream(source(), max_bytes=bound)
    slow, fast = stream.follow(), asyncio.ensure_future(_all(stream.follow()))
    assert await fast == script
    assert stream.bytes <= bound and len(stream) == 100 and not stream.joinable and not stream.complete
    with pytest.raises(Overloaded, match="too slow"):
        await anext(slow)
    assert await _all(stream.follow(95)) == script[95:]


async def test_when_all_readers_are_behind_the_engine_waits_for_the_fastest() -> None:
    script = words(100)
    source = ScriptedSource(script)
    stream = SharedStream(source(), max_bytes=10 * size_bytes(script[0].delta))
    reader = stream.follow()
    await _settle()
    await _settle()
    assert len(stream) == 11 and not stream.done
    assert await _all(reader) == script and stream.done


async def test_a_stream_that_is_waited_for_is_cancelled_when_its_last_reader_leaves() -> None:
    source = ScriptedSource(words(100))
    stream = SharedStream(source(), max_bytes=1)
    reader = stream.follow()
    await _settle()
    await reader.aclose()
    await _settle()
    assert source.closed and stream.done


async def test_what_all_have_read_is_kept_for_others_only_so_far() -> None:
    script = words(100)
    stream = SharedStream(ScriptedSource(script, hold=True)(), keep_bytes=10 * size_bytes(script[0].delta))
    reader = stream.follow()
    assert [await anext(reader) for _ in range(99)] == script[:99]
    assert stream.bytes <= 11 * size_bytes(script[0].delta) and not stream.joinable
    stream.cancel()


async def test_a_stream_lingers_for_its_reader_to_come_back() -> None:
    source = ScriptedSource(words(4), hold=True)
    stream = SharedStream(source(), linger_s=60)
    first = stream.follow()
    assert (await anext(first)).delta.text == "w0 "
    await first.aclose()
    await _settle()
    assert not source.closed
    again = stream.follow(1)
    source.go.set()
    assert await _all(again) == words(4)[1:]


async def test_a_stream_no_client_comes_back_for_is_cancelled() -> None:
    source = ScriptedSource(words(2), hold=True)
    stream = SharedStream(source(), linger_s=0.01)
    await stream.follow().aclose()
    while not stream.done:
        await asyncio.sleep(0.005)
    with pytest.raises(Cancelled):
        await _all(stream.follow(1))
    assert source.closed
