"""Reach a replica: address, TLS, credentials, keepalive, and the metadata of every call."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from contract import pem
from contract.errors import InvalidArgument

DEFAULT_URL = "127.0.0.1:8001"
DEFAULT_MODEL = "ensemble"
DEFAULT_TIMEOUT_S = 600.0

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    # A dead peer is noticed in 40 s at most. Only while a call is running: Triton counts idle pings as abuse.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Of any ping, those that measure the way included: while one is out, gRPC sends none for keepalive. Else a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Retries are ours: they stop at the first token, have a budget and honour the server's hints.
    ("grpc.enable_retries", 0),
    # A replica that comes back is found within a second, not after two minutes of backing off.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)

# W3C: servers ignore a version ff and ids of zeros alone, so they would begin a trace of their own.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class TLS:
    """Files in PEM. root: who to trust, None for the system's store. cert and key: ours, for mutual TLS.

    server_name: the name the server's certificate carries, where it is not the address.
    """

    root: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises InvalidArgument for a file that cannot be read or is no PEM, or a certificate without its key."""
        if (self.cert is None) != (self.key is None):
            raise InvalidArgument("tls", "cert and key go together; set both for mutual TLS, or neither")
        # gRPC accepts any bytes and reports unusable ones only as a failed connection.
        pem.check_authority("tls.root", self.root)
        pem.check_pair("tls.cert", self.cert, self.key)
        files = (self.root, self.key, self.cert)
        return grpc.ssl_channel_credentials(*(None if file is None else Path(file).read_bytes() for file in files))


@dataclass(frozen=True)
class Connection:
    """Everything about reaching one server.

    url: HOST:PORT, or any target gRPC resolves (``dns:///name:8001``, ``unix:/path``). api_key goes as
    ``authorization: Bearer …``; metadata is added to every call, keys in lower case.
    """

    url: str = DEFAULT_URL
    tls: TLS | None = None
    api_key: str = ""
    metadata: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not _is_target(self.url):
            problem = f"must be HOST:PORT of the server's gRPC endpoint, such as {DEFAULT_URL}, got {self.url!r}"
            raise InvalidArgument("url", problem)
        for key, value in self.metadata:
            if not isinstance(key, str) or not re.fullmatch(r"[0-9a-z_.-]+", key):
                raise InvalidArgument("metadata", f"got the key {key!r}; gRPC allows a-z, 0-9, '_', '-' and '.'")
            if key.startswith("grpc-") or key.endswith("-bin"):
                problem = f"got the key {key!r}; gRPC keeps 'grpc-…' for itself and '…-bin' for bytes"
                raise InvalidArgument("metadata", problem)
            if not sendable(value):
                raise InvalidArgument("metadata", f"the value of {key!r} has characters that are not printable ASCII")
        if not isinstance(self.api_key, str):
            raise InvalidArgument("api_key", f"must be text, got {type(self.api_key).__name__}")
        if not sendable(self.api_key):
            raise InvalidArgument("api_key", "it has characters that are not printable ASCII, perhaps a line end")

    def options(self) -> list[tuple[str, int | str]]:
        """Channel arguments for grpc and grpc.aio."""
        named = [("grpc.ssl_target_name_override", self.tls.server_name)] if self.tls and self.tls.server_name else []
        return [*CHANNEL_OPTIONS, *named]

    def opened(self, api: Any, credentials: grpc.ChannelCredentials | None, options: list) -> Any:
        """Open a channel. api: ``grpc`` or ``grpc.aio``."""
        if credentials is None:
            return api.insecure_channel(self.url, options)
        return api.secure_channel(self.url, credentials, options)

    def call_metadata(self, request_id: str = "", traceparent: str = "") -> tuple[tuple[str, str], ...]:
        """What one call carries: the trace context always, the credentials and the caller's own if any."""
        carried: tuple[tuple[str, str], ...] = (("traceparent", traceparent or new_traceparent()),)
        if request_id:
            carried += (("x-request-id", request_id),)
        if self.api_key:
            carried += (("authorization", f"Bearer {self.api_key}"),)
        return carried + self.metadata


def connection(
    url: str | Connection | None,
    tls: TLS | bool | None,
    api_key: str,
    metadata: Mapping[str, str] | Iterable[tuple[str, str]],
) -> Connection:
    """A Connection out of a client's arguments. ``url`` None is $TRIDENT_URL or the default; ``tls`` True is TLS()."""
    if isinstance(url, Connection):
        return url
    if not isinstance(tls, TLS | bool | None):
        raise InvalidArgument("tls", f"must be True or TLS(...), got {tls!r}")
    secure = TLS() if tls is True else tls or None
    # An empty url is a mistake; an empty variable is one that is not set.
    where = (os.environ.get("TRIDENT_URL") or DEFAULT_URL) if url is None else url
    return Connection(where, secure, api_key, pairs(metadata))


def pairs(metadata: Mapping[str, str] | Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return metadata as names and values. Raises InvalidArgument."""
    items = metadata.items() if isinstance(metadata, Mapping) else metadata
    try:
        return tuple((key, value) for key, value in items)
    except (TypeError, ValueError) as exc:
        # The value is not shown: it may hold credentials.
        problem = f"must be a dict, or pairs of a name and a value, got {type(metadata).__name__}"
        raise InvalidArgument("metadata", problem) from exc


def _is_target(url: str) -> bool:
    _, colon, port = url.rpartition(":")
    number = port.isdecimal() and not (colon and 0 < int(port) < 65_536)  # gRPC takes 65537 for 1
    return bool(url) and "://" not in url.removeprefix("dns://") and not number


def sendable(value: str) -> bool:
    """Whether gRPC takes ``value`` as metadata."""
    return isinstance(value, str) and value.isascii() and (value.isprintable() or not value)


def trace_context(traceparent: str) -> str:
    """``traceparent`` if there is one, else a fresh one. Raises InvalidArgument for one that is not W3C's."""
    if traceparent and not (isinstance(traceparent, str) and _TRACEPARENT.fullmatch(traceparent)):
        problem = f"must be W3C's form 00-<32 hex>-<16 hex>-<2 hex>, neither id all zeros, got {traceparent!r}"
        raise InvalidArgument("traceparent", problem)
    return traceparent or new_traceparent()


def new_request_id() -> str:
    return os.urandom(16).hex()


def new_traceparent() -> str:
    """A fresh W3C trace context. Not sampled: whether to trace is then the server's own choice."""
    ids = os.urandom(24).hex()
    return f"00-{ids[:32]}-{ids[32:]}-00"
