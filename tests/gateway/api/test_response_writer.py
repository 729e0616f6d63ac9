"""Responses of several requests on one gRPC stream."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import grpc.aio
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.response_writer import ResponseWriter


class Context:
    """A stream that takes one message at a time, as grpc.aio's does, and a turn of the loop for each, or for ever."""

    def __init__(self, reads: bool = True) -> None:
        self.reads, self.written = reads, list[bytes]()
        self.busy = False

    async def write(self, data: bytes) -> None:
        assert not self.busy
        self.busy = True
        try:
            await asyncio.sleep(0 if self.reads else 60)
            self.written.append(data)
        finally:
            self.busy = False

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        await self.write(metadata[0][1].encode())

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        pass


@given(left=st.sets(st.integers(0, 9)), after=st.integers(0, 12))
def test_responses_are_written_one_at_a_time_in_order_whoever_leaves(left: set[int], after: int) -> None:
    async def run() -> None:
        context = Context()
        writer = ResponseWriter(cast(Any, context), 1.0)
        tasks = [asyncio.create_task(writer.write(bytes([n]))) for n in range(10)]
        for _ in range(after):
            await asyncio.sleep(0)
        for n in left:
            tasks[n].cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        written = [data[0] for data in context.written]
        assert written == sorted(written) and set(written) >= set(range(10)) - left
        await writer.write(b"last")
        assert context.written[-1] == b"last"

    asyncio.run(run())


async def test_a_write_to_a_client_that_is_gone_cancels_its_request_and_the_next_one_has_its_turn() -> None:
    class Gone(Context):
        async def write(self, data: bytes) -> None:
            await super().write(data)
            raise grpc.aio.InternalError('Failed "execute_batch"')

    context = Gone()
    writer = ResponseWriter(cast(Any, context), 1.0)
    tasks = [asyncio.create_task(writer.write(data)) for data in (b"a", b"b")]
    await asyncio.wait(tasks, timeout=10)
    assert all(task.cancelled() for task in tasks) and context.written == [b"a", b"b"]


async def test_a_response_waits_for_the_metadata_of_another_request() -> None:
    context = Context()
    writer = ResponseWriter(cast(Any, context), 1.0)
    await asyncio.gather(
        writer.send_metadata({"name": "metadata"}), writer.write(b"response"), writer.send_metadata({"name": "late"})
    )
    assert context.written == [b"metadata", b"response"]


async def test_a_client_that_reads_nothing_ends_the_stream() -> None:
    context = Context(reads=False)
    writers: list[ResponseWriter] = []

    async def handle() -> None:
        writers.append(ResponseWriter(cast(Any, context), 5.0))
        await writers[0].write(b"unread")

    handler = asyncio.create_task(handle())
    await asyncio.sleep(0)
    began_s = writers[0]._writing_since_s
    writers[0].check(began_s + 4.0)
    assert not writers[0].stalled
    writers[0].check(began_s + 6.0)
    assert writers[0].stalled
    with contextlib.suppress(asyncio.CancelledError):
        await handler
    assert handler.cancelled()
