"""Read the tokens of a response while Envoy relays it: JSON of OpenAI and Triton, whole or as events, and gRPC."""

from __future__ import annotations

import re

from clients.wire.response_reader import ResponseReader
from contract.errors import TridentError
from contract.generation import GenerationRequest, Usage
from gateway.api.picker.request import FRAME

# A text that quotes these names has a backslash in front of each quotation mark.
_TOLD = re.compile(rb'(?<!\\)"(?:num_)?(prompt|input|completion|output)_tokens"\s*:\s*(\d+)[,}\s]')
_LONGEST_MATCH = 64
_INPUT = (b"prompt", b"input")


class ResponseUsage:
    """What a response has used so far.

    tokens: counted, an event as one where ids are not read. error: that a gRPC response carried in band.
    """

    def __init__(self, request: GenerationRequest, content_type: str) -> None:
        self._reader = ResponseReader(request) if content_type.startswith("application/grpc") else None
        self._events = content_type.startswith("text/event-stream")
        self._kept = b""
        self._told = {True: 0, False: 0}  # input tokens, output tokens
        self.tokens = 0
        self.error: TridentError | None = None

    @property
    def usage(self) -> Usage | None:
        """As the endpoint told it; None before."""
        if self._reader is not None:
            return self._reader.last.usage if self._reader.last is not None else None
        return Usage(self._told[True], self._told[False]) if self._told[False] else None

    def feed(self, data: bytes) -> None:
        """Read the next bytes."""
        if self._reader is not None:
            self._read_frames(self._reader, data)
            return
        self.tokens += data.count(b"data:") - data.count(b"data: [DONE]") if self._events else 0
        for match in _TOLD.finditer(self._kept + data):
            if int(match[2]):  # Triton's events have 0 before the last
                self._told[match[1] in _INPUT] = int(match[2])
        self._kept = (self._kept + data)[-_LONGEST_MATCH:]

    def _read_frames(self, reader: ResponseReader, data: bytes) -> None:
        self._kept += data
        while len(self._kept) >= FRAME.size:
            compressed, size = FRAME.unpack_from(self._kept)
            end = FRAME.size + size
            if len(self._kept) < end:
                return
            message, self._kept = self._kept[FRAME.size : end], self._kept[end:]
            try:
                if not compressed:
                    reader.read(message)
            except TridentError as error:
                self.error = error
        self.tokens = reader.tokens
