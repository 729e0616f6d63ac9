"""A gRPC server of the gateway, at the address and with the certificate of the settings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import grpc
import grpc.aio

from contract.errors import InvalidArgument
from gateway.config.settings import variable
from gateway.service import Service

MAX_PENDING = 20_000  # calls that have arrived and are not handled yet, as in a burst


class GrpcEndpoint(ABC):
    """A gRPC server at one port of the settings. Extend it with the handlers of its services."""

    port_setting: str
    message_bytes = 0  # that a message may have where bodies may have fewer

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server: grpc.aio.Server | None = None
        self.port = 0  # that it listens on, after ``start``; workers share it

    @abstractmethod
    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        """Return the handlers of every service."""

    async def start(self) -> None:
        """Listen, unless the setting has no port; on the loop that serves. Raises: InvalidArgument (the setting)."""
        settings = self._service.settings
        port = getattr(settings, self.port_setting)
        if port is None:
            return
        options = [
            ("grpc.max_receive_message_length", max(self.message_bytes, settings.max_body_bytes)),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", 16 * 1024),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.so_reuseport", int(self._service.link is not None)),
            # gRPC drops calls over its own limits without an error; admission rejects them with one and a Retry-After.
            ("grpc.server.max_pending_requests", MAX_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
            ("grpc.server_max_unrequested_time_in_server", math.ceil(settings.request_timeout_s)),
        ]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers(self._handlers())
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{port}"
        try:
            if settings.tls_key is not None and settings.tls_cert is not None:
                pair = (settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())
                client_ca = settings.tls_client_ca
                credentials = grpc.ssl_server_credentials(
                    [pair], client_ca.read_bytes() if client_ca else None, require_client_auth=client_ca is not None
                )
                self.port = server.add_secure_port(address, credentials)
            else:
                self.port = server.add_insecure_port(address)
        except RuntimeError as exc:
            problem = f"cannot listen at {address}; is the port in use?"
            raise InvalidArgument(variable(self.port_setting), problem) from exc
        await server.start()
        self._server = server

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.5)
