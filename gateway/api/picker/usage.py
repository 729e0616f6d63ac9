"""Read the tokens of a response while Envoy relays it: JSON of OpenAI and Triton, whole or as events, and gRPC."""

from __future__ import annotations

import re

from clients.wire.response_reader import ResponseReader
from contract.errors import TridentError
from contract.generation import GenerationRequest, Usage
from gateway.api.picker.request import FRAME

# A text that quotes these names has a backslash in front of each quotation mark.
_TOLD = re.compile(rb'(?<!\\)"(?:num_)?(prompt|input|completion|output)_tokens"\s*:\s*(\d+)[,}\s]')
_EVENT = re.compile(rb"\ndata: ?\{")  # JSON escapes the line ends in texts
_LONGEST_MATCH = 64
_INPUT = (b"prompt", b"input")


class ResponseUsage:
    """What a response has used so far.

    tokens: counted, an event as one where ids are not read. cached_tokens: of the prompt, as a replica told over gRPC;
    None where that is not known. error: that a gRPC response carried in band.
    """

    def __init__(self, request: GenerationRequest, content_type: str) -> None:
        self._reader = ResponseReader(request) if content_type.startswith("application/grpc") else None
        self._events = content_type.startswith("text/event-stream")
        self._kept = b"\n" if self._events else b""
        self._input = self._output = 0  # as the endpoint told them
        self.tokens = 0
        self.cached_tokens: int | None = None
        self.error: TridentError | None = None

    @property
    def usage(self) -> Usage | None:
        """As the endpoint told it; None before."""
        return Usage(self._input, self._output, self.cached_tokens or 0) if self._output else None

    def feed(self, data: bytes) -> None:
        """Read the next bytes."""
        known = len(self._kept)
        self._kept += data
        if self._reader is not None:
            self._read_frames(self._reader)
            return
        self.tokens += sum(event.end() > known for event in _EVENT.finditer(self._kept)) if self._events else 0
        for match in _TOLD.finditer(self._kept):
            count = int(match[2])
            if match[1] in _INPUT:  # Triton's events have 0 before the last
                self._input = count or self._input
            else:
                self._output = count or self._output
        self._kept = self._kept[-_LONGEST_MATCH:]

    def _read_frames(self, reader: ResponseReader) -> None:
        while len(self._kept) >= FRAME.size:
            compressed, size = FRAME.unpack_from(self._kept)
            end = FRAME.size + size
            if len(self._kept) < end:
                return
            message, self._kept = self._kept[FRAME.size : end], self._kept[end:]
            try:
                delta = None if compressed else reader.read(message)
            except TridentError as error:
                self.error = error
                continue
            if delta is not None:
                self.tokens += len(delta.token_ids)
                self._input += delta.usage.input_tokens if delta.usage else 0  # of each request of the stream
                self._output += delta.usage.output_tokens if delta.usage else 0
                if delta.usage:
                    self.cached_tokens = (self.cached_tokens or 0) + delta.usage.cached_tokens
