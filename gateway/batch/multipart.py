"""Read an uploaded form (RFC 7578) with aiohttp's parser as it arrives; it is never whole in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from email.message import Message
from email.utils import collapse_rfc2231_value
from typing import cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader
from aiohttp.http import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from starlette.requests import ClientDisconnect, Request

from contract.errors import Cancelled, DeadlineExceeded, InvalidArgument

CHUNK_BYTES = 256 * 1024
MAX_FIELD_BYTES = 1024
MAX_FIELDS = 16


@dataclass(frozen=True)
class FileChunk:
    """Some bytes of the form's file.

    filename: as the client sent it.
    fields: the form's other fields so far.
    """

    data: bytes
    filename: str
    fields: dict[str, str] = field(default_factory=dict)


async def file_chunks(request: Request, timeout_s: float) -> AsyncIterator[FileChunk]:
    """Yield the form's file in chunks of at most CHUNK_BYTES, then an empty chunk with all the fields.

    timeout_s: longest silence of the client.
    Raises: InvalidArgument (not such a form), DeadlineExceeded (silence), Cancelled (the client disconnected).
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
        reader = MultipartReader(headers, cast(StreamReader, _Body(request, timeout_s)))
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
    """Return name and filename. aiohttp's own parser warns of each malformed header, and Python keeps every distinct
    warning: clients could fill the memory with them."""
    message = Message()
    message["content-disposition"] = header
    found = (message.get_param(word, "", "content-disposition") for word in ("name", "filename"))
    texts = (collapse_rfc2231_value(value).strip() for value in found)
    # Bytes that are not UTF-8 arrive as lone surrogates, which can be neither stored nor sent.
    name, filename = (text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in texts)
    return name, filename


async def _read(part: BodyPartReader, max_bytes: int) -> bytes:
    """Return up to ``max_bytes`` bytes of a part; none at its end."""
    data = bytearray()
    while len(data) < max_bytes and not part.at_eof():
        data += await part.read_chunk(max_bytes - len(data))
    return bytes(data)


class _Body:
    """A request's body with the methods that aiohttp's parser calls. It is received as it is read."""

    def __init__(self, request: Request, timeout_s: float) -> None:
        self._source, self._timeout_s = request.stream(), timeout_s
        self._buffer = bytearray()
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
        try:
            self._buffer += await asyncio.wait_for(anext(self._source), self._timeout_s)
        except StopAsyncIteration:
            self._ended = True
        except ClientDisconnect as exc:
            raise Cancelled("the client disconnected") from exc
        except asyncio.TimeoutError as exc:
            raise DeadlineExceeded(f"no bytes of the file arrived for {self._timeout_s:g} s") from exc
