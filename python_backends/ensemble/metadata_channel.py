"""From the tokenizer to the detokenizer, past an engine that carries nothing for them.

The C++ ``tensorrtllm`` backend returns bare ids, and an ensemble may feed the detokenizer from nowhere else. So the
tokenizer leaves what the detokenizer must know under the request's id, which Triton gives to every step, and hears
whether that id is free: two live requests under one id would mix, here and in the backend's own table.
One datagram each way on abstract unix sockets, about 0.1 ms, before the engine has seen the request.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from contract.errors import InvalidArgument, Unavailable
from python_backends.ensemble import local_datagram

MAX_REQUEST_ID_BYTES = 256
_MAX_BYTES = 180_000  # a unix datagram must fit the default socket buffer
_REPLY_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class StreamMetadata:
    """options: StreamOptions as JSON. end_ids: every id that ends the output. Counts are tokens."""

    request_id: str
    options: str
    max_tokens: int
    num_input_tokens: int
    end_ids: tuple[int, ...]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, datagram: bytes) -> StreamMetadata:
        """Raises ValueError, TypeError or KeyError for anything that is not a metadata."""
        fields = json.loads(datagram)
        metadata = cls(**{**fields, "end_ids": tuple(fields["end_ids"])})
        if not isinstance(metadata.request_id, str) or not isinstance(metadata.options, str):
            raise TypeError("request_id and options are text")
        return metadata


def check_request_id(request_id: str) -> None:
    """Raises InvalidArgument unless the id can name a stream."""
    size = len(request_id.encode())
    if size == 0:
        raise InvalidArgument("request_id", "is empty; this engine tells streams apart by it, send a unique one")
    if size > MAX_REQUEST_ID_BYTES:
        raise InvalidArgument("request_id", f"has {size} bytes; allowed are 1 to {MAX_REQUEST_ID_BYTES}")


class MetadataSender:
    """The tokenizer's end; one per instance, used by one thread."""

    def __init__(self, name: str) -> None:
        self._socket = local_datagram.bind(f"{name}-reply-{os.getpid()}")
        self._address = "\0" + name

    def post(self, metadata: StreamMetadata) -> None:
        """Returns when the detokenizer holds the metadata. Raises InvalidArgument for an id that is in use or options
        too large to carry, Unavailable when the detokenizer does not answer."""
        check_request_id(metadata.request_id)
        datagram = metadata.encode()
        if len(datagram) > _MAX_BYTES:
            raise InvalidArgument("stop_words", f"take {len(datagram)} bytes; allowed are {_MAX_BYTES} in all")
        deadline_s = time.monotonic() + _REPLY_TIMEOUT_S
        try:
            self._socket.settimeout(_REPLY_TIMEOUT_S)
            self._socket.sendto(datagram, self._address)
            reply = self._reply_to(metadata, deadline_s)
        except OSError as exc:
            raise Unavailable(f"the detokenizer does not answer: {exc}") from exc
        if not reply["accepted"]:
            raise InvalidArgument("request_id", "is in use by a request that still runs; send a unique one")

    def _reply_to(self, metadata: StreamMetadata, deadline_s: float) -> dict:
        """Skips replies that came after their timeout, which are of earlier requests, and other users' datagrams.

        Raises:
            TimeoutError: there was none at ``deadline_s``, however many others came.
        """
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            received = local_datagram.receive(self._socket, _MAX_BYTES)
            if received is not None:
                reply = json.loads(received[0])
                if reply["request_id"] == metadata.request_id:
                    return reply
        raise TimeoutError("timed out")

    def close(self) -> None:
        self._socket.close()


class MetadataListener:
    """The detokenizer's end. ``accept(metadata)`` runs in its thread; True if the id is free."""

    def __init__(self, name: str, accept: Callable[[StreamMetadata], bool]) -> None:
        self._socket = local_datagram.bind(name)
        self._accept = accept
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="metadata", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing:
            received = local_datagram.receive(self._socket, _MAX_BYTES)
            if received is None:
                continue  # another user of this machine
            datagram, sender = received
            try:
                metadata = StreamMetadata.decode(datagram)
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
            reply = {"request_id": metadata.request_id, "accepted": self._accept(metadata)}
            try:
                self._socket.sendto(json.dumps(reply).encode(), sender)
            except OSError:
                pass  # the tokenizer that asked has gone

    def close(self) -> None:
        self._closing = True
        self._socket.shutdown(socket.SHUT_RD)  # wakes recv, also when the queue is full
        self._thread.join(timeout=1)
        self._socket.close()
