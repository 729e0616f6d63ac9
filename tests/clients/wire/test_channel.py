"""One asynchronous channel to a scripted replica."""

from __future__ import annotations

import asyncio

import pytest

from clients.wire import status
from clients.wire.channel import AsyncChannel
from clients.wire.connection import TLS, Connection
from contract.errors import InvalidArgument, Unavailable
from tests.fakes.replica import FakeReplica, replica_in_thread


async def test_a_unary_call_returns_the_response_and_raises_what_its_status_means(unused_tcp_port: int):
    async with FakeReplica() as replica:
        channel = AsyncChannel(Connection(replica.url))
        assert await channel.model_ready("ensemble", 30.0)
        replica.ready = False
        assert not status.read_flag(await channel.call(status.model_ready("ensemble"), 30.0))
        await channel.close()
    nobody = AsyncChannel(Connection(f"127.0.0.1:{unused_tcp_port}"))
    with pytest.raises(Unavailable, match=f"cannot reach 127.0.0.1:{unused_tcp_port}"):
        await nobody.model_ready("ensemble", 30.0)
    await nobody.close()


def test_the_channel_opens_again_on_another_event_loop():
    with replica_in_thread() as replica:
        channel = AsyncChannel(Connection(replica.url))

        async def once() -> bool:
            try:
                return await channel.model_ready("ensemble", 30.0)
            finally:
                await channel.close()

        assert asyncio.run(once()) and asyncio.run(once())


def test_a_stream_goes_to_the_loop_of_the_call_before_it():
    with replica_in_thread() as replica:
        channel = AsyncChannel(Connection(replica.url))

        async def both() -> None:
            assert await channel.model_ready("ensemble", 30.0)
            await channel.stop("mine", 30.0)

        asyncio.run(both())
        asyncio.run(both())
        assert replica.counts.stopped_ids == ["mine", "mine"]


async def test_stop_sends_the_id_to_the_engine():
    async with FakeReplica() as replica:
        channel = AsyncChannel(Connection(replica.url))
        await channel.stop("mine", 30.0)
        assert replica.counts.stopped_ids == ["mine"]
        with pytest.raises(InvalidArgument, match="request_id"):
            await channel.stop("é", 30.0)
        await channel.close()


def test_tls_files_are_read_when_the_channel_is_made(tmp_path):
    with pytest.raises(InvalidArgument, match="tls.root"):
        AsyncChannel(Connection("127.0.0.1:1", tls=TLS(root=tmp_path / "none.pem")))
