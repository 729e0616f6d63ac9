"""Servers listen where the settings say, and say which setting is wrong."""

from __future__ import annotations

import grpc.aio
import pytest

from contract.errors import InvalidArgument
from gateway.api.grpc_endpoint import GrpcEndpoint
from gateway.config.configuration import Configuration
from gateway.config.pools import Pools
from gateway.config.settings import Settings
from gateway.service import Service


class Nothing(GrpcEndpoint):
    port_setting = "picker_port"

    def _handlers(self):
        return []


def endpoint(**settings: object) -> Nothing:
    return Nothing(Service(Settings(**settings), Configuration(None, {}, Pools({}))))


async def test_a_server_listens_at_the_port_of_its_setting():
    server = endpoint(picker_port=0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/none/None")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop()


async def test_without_a_port_there_is_no_server():
    server = endpoint()
    await server.start()
    assert server.port == 0
    await server.stop()


async def test_a_port_that_cannot_be_had_is_told_by_its_variable():
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_PICKER_PORT: cannot listen at 203.0.113.1:9"):
        await endpoint(host="203.0.113.1", picker_port=9).start()
