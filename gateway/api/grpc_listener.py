"""Listen for gRPC calls, at the address and with the certificate of the settings."""

from __future__ import annotations

import math

import grpc
import grpc.aio

from contract.errors import InvalidArgument
from gateway.config.settings import variable
from gateway.service import Service

MAX_PENDING = 20_000  # calls that have arrived and are not handled yet, as in a burst


async def listen(
    service: Service, port: str, most_bytes: int, *handlers: grpc.GenericRpcHandler
) -> tuple[grpc.aio.Server, int]:
    """Return a server that has started, and its port, which workers share.

    port: the setting with it. most_bytes: of a message that arrives.
    Raises: InvalidArgument that names the setting.
    """
    settings = service.settings
    options = [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", int(service.link is not None)),
        # gRPC drops calls over its own limits without an error; admission rejects them with one and a Retry-After.
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
        ("grpc.server_max_unrequested_time_in_server", math.ceil(settings.request_timeout_s)),
    ]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers(handlers)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{getattr(settings, port)}"
    try:
        if settings.tls_key is not None and settings.tls_cert is not None:
            pair = (settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())
            client_ca = settings.tls_client_ca
            credentials = grpc.ssl_server_credentials(
                [pair], client_ca.read_bytes() if client_ca else None, require_client_auth=client_ca is not None
            )
            bound = server.add_secure_port(address, credentials)
        else:
            bound = server.add_insecure_port(address)
    except RuntimeError as exc:
        raise InvalidArgument(variable(port), f"cannot listen at {address}; is the port in use?") from exc
    await server.start()
    return server, bound
