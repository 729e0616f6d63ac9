"""Request metadata from the tokenizer to the detokenizer, beside the C++ ``tensorrtllm`` backend.

That backend returns ids only, and Triton lets the detokenizer read only the engine's outputs. So the tokenizer sends
the metadata under the request's id, which Triton passes to every step, and learns whether that id is free: two live
requests with one id would be mixed, in the detokenizer and in the backend. One datagram each way on abstract unix
sockets, about 0.1 ms, before the engine has the request.

The tokenizer does not know which ensemble a request came through, so the model ``detokenizer`` gets all metadata, and
``detokenizer_packed`` takes that of a stream from it with the stream's first ids.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from contract.errors import InvalidArgument, Unavailable
from python_backends.ensemble import local_datagram

_MAX_REQUEST_ID_BYTES = 256
_UNIQUE = "must be unique among the live requests of this engine"
_MAX_BYTES = 180_000  # a unix datagram must fit the default socket buffer
_REPLY_TIMEOUT_S = 2.0
SEND_ADAPTER = 2  # in place of True: accepted, and the request must carry the weights of its adapter


@dataclass(frozen=True)
class StreamMetadata:
    """What the detokenizer must know of one request.

    options: StreamOptions as JSON.
    end_ids: every id that ends the output.
    adapter: number of the LoRA adapter, 0 for none.
    until_s: on the monotonic clock; later the tokenizer waits no more, and its client may have sent the id again.
    """

    request_id: str
    options: str
    max_tokens: int
    num_input_tokens: int
    end_ids: tuple[int, ...]
    adapter: int = 0
    until_s: float = field(default=math.inf, compare=False)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, datagram: bytes) -> StreamMetadata:
        """Raises ValueError, TypeError, KeyError: the datagram is not a request's metadata."""
        fields = json.loads(datagram)
        metadata = cls(**{**fields, "end_ids": tuple(fields["end_ids"])})
        if not isinstance(metadata.request_id, str) or not isinstance(metadata.options, str):
            raise TypeError("request_id, options: must be text")
        return metadata


class MetadataSender:
    """The end of the tokenizer, or of ``detokenizer_packed``; one per model instance, used by one thread."""

    def __init__(self, name: str) -> None:
        self._socket = local_datagram.bind(f"{name}-reply-{os.getpid()}")
        self._address = "\0" + name

    def post(self, metadata: StreamMetadata) -> bool:
        """Send the metadata; return whether the request must carry its adapter's weights.
        Raises InvalidArgument: the request id is in use, or the stop words are too large for a datagram.
        Raises Unavailable: the detokenizer does not answer.
        """
        size = len(metadata.request_id.encode())
        if size == 0:
            raise InvalidArgument("request_id", f"{_UNIQUE}, got an empty one")
        if size > _MAX_REQUEST_ID_BYTES:
            raise InvalidArgument("request_id", f"must have 1 to {_MAX_REQUEST_ID_BYTES} bytes, got {size}")
        datagram = replace(metadata, until_s=time.monotonic() + _REPLY_TIMEOUT_S).encode()
        if len(datagram) > _MAX_BYTES:
            raise InvalidArgument("stop_words", f"must take at most {_MAX_BYTES} bytes in all, got {len(datagram)}")
        accepted = self._reply_to(datagram, metadata.request_id)["accepted"]
        if not accepted:
            raise InvalidArgument("request_id", f"{_UNIQUE}, got one in use")
        return accepted == SEND_ADAPTER

    def take(self, request_id: str) -> StreamMetadata | None:
        """Return what the tokenizer sent of a stream, None if nothing; ``end`` frees its id. Raises Unavailable."""
        reply = self._reply_to(json.dumps({"take": request_id}).encode(), request_id)
        return StreamMetadata(**reply) if "options" in reply else None

    def end(self, request_id: str) -> None:
        """Say that a stream that was taken has ended."""
        with contextlib.suppress(OSError):  # without the detokenizer the server is restarted
            self._socket.sendto(json.dumps({"end": request_id}).encode(), self._address)

    def _reply_to(self, datagram: bytes, request_id: str) -> dict:
        """Return the reply to ``datagram``; skip late ones and other users'. Raises Unavailable."""
        deadline_s = time.monotonic() + _REPLY_TIMEOUT_S
        try:
            self._socket.settimeout(_REPLY_TIMEOUT_S)
            self._socket.sendto(datagram, self._address)
            while (remaining_s := deadline_s - time.monotonic()) > 0:
                self._socket.settimeout(remaining_s)
                received = local_datagram.receive(self._socket, _MAX_BYTES)
                if received is not None and (reply := json.loads(received[0]))["request_id"] == request_id:
                    return reply
            raise TimeoutError("timed out")
        except OSError as exc:
            raise Unavailable(f"the detokenizer does not answer: {exc}") from exc

    def close(self) -> None:
        self._socket.close()


class MetadataListener(local_datagram.Listener):
    """The end of the model ``detokenizer``. What it calls runs in its thread.

    accept: takes a request's metadata; returns whether its id is free, or SEND_ADAPTER.
    take: returns the metadata of a stream that ``detokenizer_packed`` serves. end: that stream has ended.
    """

    def __init__(
        self,
        name: str,
        accept: Callable[[StreamMetadata], int],
        take: Callable[[str], StreamMetadata | None] = lambda request_id: None,
        end: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        def handle(datagram: bytes) -> bytes | None:
            try:
                fields = json.loads(datagram)
                if "end" in fields:
                    end(fields["end"])
                    return None
                if "take" in fields:
                    taken = take(fields["take"])
                    return taken.encode() if taken else json.dumps({"request_id": fields["take"]}).encode()
                metadata = StreamMetadata.decode(datagram)
                if time.monotonic() >= metadata.until_s:
                    return None
            except (ValueError, TypeError, KeyError, RecursionError):
                return None
            return json.dumps({"request_id": metadata.request_id, "accepted": accept(metadata)}).encode()

        super().__init__(name, _MAX_BYTES, "metadata", handle)
