"""A form with a file in it, as it arrives: RFC 7578 read by aiohttp's parser, piece by piece, never whole in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from email.message import Message
from email.utils import collapse_rfc2231_value

from aiohttp import BodyPartReader, MultipartReader
from aiohttp.http import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from starlette.requests import ClientDisconnect, Request

from contract.errors import Cancelled, DeadlineExceeded, InvalidArgument

PIECE_BYTES = 256 * 1024
MAX_FIELD_BYTES = 1024
MAX_FIELDS = 16


@dataclass(frozen=True)
class Piece:
    """Some bytes of the form's file, whose fields so far are ``fields``. ``filename`` is as the caller sent it."""

    data: bytes
    filename: str
    fields: dict[str, str] = field(default_factory=dict)


async def pieces(request: Request, silence_s: float) -> AsyncIterator[Piece]:
    """The file of the form in pieces of at most PIECE_BYTES, and at the end an empty piece with all the fields.

    Raises InvalidArgument for what is not such a form, DeadlineExceeded when the caller is silent for so long,
    Cancelled when it went.
    """
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        raise InvalidArgument("content-type", "allowed is multipart/form-data")
    # As mixed, so that what is special to forms is read here and not by aiohttp (see _disposition).
    parameters = content_type[len("multipart/form-data") :]
    headers = CIMultiDictProxy(CIMultiDict({"content-type": "multipart/mixed" + parameters}))
    fields: dict[str, str] = {}
    filename = ""
    try:
        async for part in MultipartReader(headers, _Body(request, silence_s)):
            name, file = _disposition(part.headers.get("content-disposition", ""))
            if not isinstance(part, BodyPartReader) or not name or len(fields) == MAX_FIELDS:
                raise InvalidArgument("", f"allowed are at most {MAX_FIELDS} named fields, none of them nested")
            if name == "file":
                if filename:
                    raise InvalidArgument("file", "is there twice; allowed is one")
                filename = file or "file.jsonl"
                while data := await _read(part, PIECE_BYTES):
                    yield Piece(data, filename, fields)
            else:
                data = await _read(part, MAX_FIELD_BYTES + 1)
                if len(data) > MAX_FIELD_BYTES:
                    raise InvalidArgument(name, f"is longer than {MAX_FIELD_BYTES} bytes, the most allowed")
                fields[name] = data.decode("utf-8", "replace")
        if not filename:
            raise InvalidArgument("file", "is missing")
        yield Piece(b"", filename, fields)
    except (ValueError, LookupError, HttpProcessingError) as exc:
        raise InvalidArgument("", f"the form cannot be read: {exc}") from exc


def _disposition(header: str) -> tuple[str, str]:
    """name and filename. aiohttp's own reading of them warns of each header it cannot read, and Python keeps every
    warning it has seen: callers could fill the memory with them."""
    message = Message()
    message["content-disposition"] = header
    found = (message.get_param(word, "", "content-disposition") for word in ("name", "filename"))
    texts = (collapse_rfc2231_value(value).strip() for value in found)
    # What was no UTF-8 came as lone surrogates, which cannot be stored or sent.
    name, filename = (text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in texts)
    return name, filename


async def _read(part: BodyPartReader, most: int) -> bytes:
    """The next bytes of a part, as many as there are up to ``most``; none at its end."""
    data = bytearray()
    while len(data) < most and not part.at_eof():
        data += await part.read_chunk(most - len(data))
    return bytes(data)


class _Body:
    """A request's body as aiohttp's parser reads one; nothing is read from the caller before it is asked for."""

    def __init__(self, request: Request, silence_s: float) -> None:
        self._source, self._silence_s = request.stream(), silence_s
        self._held = bytearray()
        self._ended = False

    async def read(self, most: int) -> bytes:
        """At least one byte, except at the end."""
        while not self._held and not self._ended:
            await self._more()
        data = bytes(self._held[:most])
        del self._held[:most]
        return data

    async def readline(self, *, max_line_length: int = MAX_FIELD_BYTES * 8) -> bytes:
        while (end := self._held.find(b"\n")) < 0 and not self._ended:
            if len(self._held) > max_line_length:
                break
            await self._more()
        if (end if end >= 0 else len(self._held)) > max_line_length:
            raise ValueError(f"a line of its headers is longer than {max_line_length} bytes")
        return await self.read(end + 1 if end >= 0 else len(self._held) or 1)

    def unread_data(self, data: bytes) -> None:
        self._held[:0] = data

    def at_eof(self) -> bool:
        return self._ended and not self._held

    async def _more(self) -> None:
        try:
            self._held += await asyncio.wait_for(anext(self._source), self._silence_s)
        except StopAsyncIteration:
            self._ended = True
        except ClientDisconnect as exc:
            raise Cancelled("the caller went away") from exc
        except asyncio.TimeoutError as exc:
            raise DeadlineExceeded(f"nothing of the file arrived for {self._silence_s:g} s") from exc
