"""One engine stream, many readers: everyone gets all of it, at their own pace, and may leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from contract.errors import Cancelled, EngineFailed, InvalidArgument, Overloaded
from contract.generation import FinishReason
from gateway.cache.coalescing import Coalescer, Idempotency, SharedStream, size_bytes
from gateway.choices import ChoiceDelta
from tests.gateway import scripted_source
from tests.gateway.scripted_source import ScriptedSource


def words(count: int, end: FinishReason | None = FinishReason.STOP) -> list[ChoiceDelta]:
    return [ChoiceDelta(0, delta) for delta in scripted_source.words(count, end)]


async def _settle() -> None:
    for _ in range(30):
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
    assert source.opened == 1 and not coalescer._streams


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
    assert source.closed and not coalescer._streams


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
    assert not coalescer._streams


async def test_leaving_before_the_stream_took_its_first_step_cleans_up() -> None:
    coalescer, source = Coalescer(), ScriptedSource(words(5))
    await coalescer.follow("k", source).aclose()
    await _settle()
    assert not coalescer._streams


async def test_a_failure_reaches_every_reader_after_what_came_before_it() -> None:
    stream = SharedStream(ScriptedSource(words(3, None), failure=EngineFailed("broke"))())
    readers = [stream.follow() for _ in range(3)]
    for reader in readers:
        for delta in words(3, None):
            assert await anext(reader) == delta
        with pytest.raises(EngineFailed, match="broke"):
            await anext(reader)
    assert stream.done and not stream.complete and not stream._readers


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
    assert source.opened == 2 and len(known._finished) == 1


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
    assert len(known._finished) == 2
    small = Idempotency(clock, max_bytes=1)
    await _all(small.follow("a", "k", "r", source))
    await _settle()
    assert not small._running and small._finished.currsize == 0
