"""Servers listen where the settings say, and say which setting is wrong."""

from __future__ import annotations

import grpc.aio
import pytest

from contract.errors import InvalidArgument
from gateway.api import grpc_listener
from gateway.config.configuration import Configuration
from gateway.config.settings import Settings
from gateway.service import Service


def service(**settings: object) -> Service:
    return Service(Settings(**settings), Configuration(None, {}, {}))


async def test_a_server_listens_at_the_port_of_its_setting():
    server, port = await grpc_listener.listen(service(grpc_port=0), "grpc_port", 1024)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/none/None")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(None)


async def test_a_port_that_cannot_be_had_is_told_by_its_variable():
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_GRPC_PORT: cannot listen at 203.0.113.1:9"):
        await grpc_listener.listen(service(host="203.0.113.1", grpc_port=9), "grpc_port", 1024)
