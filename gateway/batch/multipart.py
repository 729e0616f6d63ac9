"""Read an uploaded form (RFC 7578) with aiohttp's parser as it arrives; it is never whole in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader
from aiohttp.http import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from starlette.requests import ClientDisconnect, Request

from contract.errors import Cancelled, DeadlineExceeded, InvalidArgument
from gateway.batch.store import FileTooLarge

CHUNK_BYTES = 256 * 1024
MAX_FIELD_BYTES = 1024
MAX_FIELDS = 16
OVERHEAD_BYTES = MAX_FIELDS * MAX_FIELD_BYTES  # of a form, besides its file
MIN_BYTES_PER_S = 64 * 1024


@dataclass(frozen=True)
class FileChunk:
    """Some bytes of the form's file, its name as the client sent it, and the form's other fields so far."""

    data: bytes
    filename: str
    fields: dict[str, str] = field(default_factory=dict)


async def file_chunks(
    request: Request, timeout_s: float, max_bytes: int, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[FileChunk]:
    """Yield the form's file in chunks of CHUNK_BYTES or a little more, then an empty chunk with all the fields.

    timeout_s: how far the client may fall behind MIN_BYTES_PER_S, so also its longest silence. max_bytes: of the file.
    Raises: InvalidArgument, FileTooLarge, DeadlineExceeded (too slow), Cancelled (the client disconnected).
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        raise InvalidArgument("content-type", f"must be multipart/form-data, got {content_type!r:.50}")
    # As multipart/mixed: aiohttp would parse content-disposition of a form by itself (see _disposition).
    parameters = content_type[len("multipart/form-data") :]
    headers = CIMultiDictProxy(CIMultiDict({"content-type": "multipart/mixed" + parameters}))
    fields: dict[str, str] = {}
    filename = ""
    try:
        reader = MultipartReader(headers, cast(StreamReader, _Body(request, timeout_s, max_bytes, clock)))
        async for part in reader:
            assert part is not None, "the iterator ends instead"
            name, file = _disposition(part.headers.get("content-disposition", ""))
            if not isinstance(part, BodyPartReader) or not name or len(fields) == MAX_FIELDS:
                raise InvalidArgument("", f"the form must have at most {MAX_FIELDS} named fields, none of them nested")
            if name == "file":
                if filename:
                    raise InvalidArgument("file", "must be sent once, got two")
                filename = file or "file.jsonl"
                while data := await _read(part, CHUNK_BYTES):
                    yield FileChunk(data, filename, fields)
            else:
                data = await _read(part, MAX_FIELD_BYTES + 1)
                if len(data) > MAX_FIELD_BYTES:
                    raise InvalidArgument(name, f"must be at most {MAX_FIELD_BYTES} bytes")
                fields[name] = data.decode("utf-8", "replace")
        if not filename:
            raise InvalidArgument("file", "must be sent, got none")
        yield FileChunk(b"", filename, fields)
    except (ValueError, LookupError, HttpProcessingError) as exc:
        raise InvalidArgument("", f"the form cannot be read: {exc}") from exc


def _disposition(header: str) -> tuple[str, str]:
    """Return name and filename. aiohttp's own parser fills the memory with a warning for each malformed header."""
    message = Message()
    message["content-disposition"] = header
    found = (message.get_param(word, "", "content-disposition") for word in ("name", "filename"))
    texts = (collapse_rfc2231_value(value).strip() for value in found)
    # Bytes that are not UTF-8 arrive as lone surrogates, which can be neither stored nor sent.
    name, filename = (text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in texts)
    return name, filename


async def _read(part: BodyPartReader, min_bytes: int) -> bytes:
    """Return at least ``min_bytes`` bytes of a part, or what is left of it; less than ``part.chunk_size`` too many."""
    data = bytearray()
    while len(data) < min_bytes and not part.at_eof():
        data += await part.read_chunk()  # of a constant size: aiohttp takes none that is shorter than the boundary
    return bytes(data)


class _Body:
    """A request's body with the methods that aiohttp's parser calls. It is received as it is read."""

    def __init__(self, request: Request, timeout_s: float, max_bytes: int, clock: Callable[[], float]) -> None:
        self._source, self._timeout_s, self._max_bytes, self._clock = request.stream(), timeout_s, max_bytes, clock
        self._buffer = bytearray()
        self._received = 0
        self._left_s = timeout_s  # for the client to send more: used up while it is waited for, regained by each byte
        self._ended = False

    async def read(self, max_bytes: int) -> bytes:
        """Return 1 to ``max_bytes`` bytes; none at the end."""
        while not self._buffer and not self._ended:
            await self._receive()
        data = bytes(self._buffer[:max_bytes])
        del self._buffer[:max_bytes]
        return data

    async def readline(self, *, max_line_length: int = MAX_FIELD_BYTES * 8) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0 and not self._ended:
            if len(self._buffer) > max_line_length:
                break
            await self._receive()
        if (end if end >= 0 else len(self._buffer)) > max_line_length:
            raise ValueError(f"a header line must be at most {max_line_length} bytes")
        return await self.read(end + 1 if end >= 0 else len(self._buffer) or 1)

    def unread_data(self, data: bytes) -> None:
        self._buffer[:0] = data

    def at_eof(self) -> bool:
        return self._ended and not self._buffer

    async def _receive(self) -> None:
        began_s = self._clock()
        try:
            data = await asyncio.wait_for(anext(self._source), self._left_s)
            self._buffer += data
            self._received += len(data)
            left_s = self._left_s - (self._clock() - began_s) + len(data) / MIN_BYTES_PER_S
            self._left_s = min(self._timeout_s, left_s)
        except StopAsyncIteration:
            self._ended = True
        except ClientDisconnect as exc:
            raise Cancelled("the client disconnected") from exc
        except asyncio.TimeoutError as exc:
            rate = f"fewer than {MIN_BYTES_PER_S} bytes per second"
            raise DeadlineExceeded(f"{rate} of the file arrived for {self._timeout_s:g} s") from exc
        if self._received > self._max_bytes + OVERHEAD_BYTES:
            raise FileTooLarge(self._max_bytes)
