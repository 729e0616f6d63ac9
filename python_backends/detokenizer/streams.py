"""The open streams of the detokenizer, under the names the engine gives them; pure of Triton.

A stream ends with the engine's last chunk. When a stop string matches earlier, the engine is asked to stop and the
text that still comes is dropped; its last chunk then carries the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from contract.errors import EngineFailed, to_text
from contract.generation import FinishReason
from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.stop import StopStrings
from python_backends.detokenizer.stream import TextStream
from python_backends.ensemble.stream_options import StreamOptions
from python_backends.ensemble.stream_state import StreamEvent, StreamState

_FINISH_REASONS = {
    StreamEvent.STOP: FinishReason.STOP,
    StreamEvent.LENGTH: FinishReason.LENGTH,
    StreamEvent.CANCELLED: FinishReason.CANCELLED,
    StreamEvent.ERROR: FinishReason.ERROR,
}


# The likeliest ids at one position and their log probabilities, likeliest first.
TopEntry = tuple[list[int], list[float]]


class EngineChunk(NamedTuple):
    """One engine response. log_probs, top: one entry per id, or empty. options: with a stream's first chunk. error:
    with ERROR."""

    state: StreamState
    token_ids: Sequence[int]
    log_probs: Sequence[float] = ()
    top: Sequence[TopEntry] = ()
    options: str = ""
    error: str = ""


class Piece(NamedTuple):
    """What one chunk adds for the client; the last one has a finish_reason. cum_log_prob is over all ids so far."""

    text: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    top: Sequence[TopEntry]
    cum_log_prob: float
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    error: str = ""
    num_output_tokens: int = 0
    timings: bool = False
    tokenized_ns: int = 0


@dataclass
class _OpenStream:
    options: StreamOptions
    text: TextStream
    unarmed_ids: int  # ids still to come before stop strings count: an echoed prompt's and min_tokens
    ids: int = 0
    cum_log_prob: float = 0.0
    stop: str | None = None
    stop_told: bool = False  # the engine has been told of it
    held_text: list[str] = field(default_factory=list)
    held_ids: list[int] = field(default_factory=list)
    held_log_probs: list[float] = field(default_factory=list)
    held_top: list[TopEntry] = field(default_factory=list)


class Streams:
    """``ask_to_stop`` tells the engine that a stop string matched in the stream of that state, and whether it could."""

    def __init__(self, decoding: Decoding, ask_to_stop: Callable[[StreamState], bool]) -> None:
        self._decoding = decoding
        self._ask_to_stop = ask_to_stop
        self._open: dict[int, _OpenStream] = {}
        self._failed: set[int] = set()
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._open)

    def feed(self, chunk: EngineChunk) -> Piece | None:
        """What the client is to get, or None when this chunk gives it nothing to see."""
        state = chunk.state
        if state.epoch > self._epoch:  # a new engine: streams of the old one will never end
            self._open.clear()
            self._failed.clear()
            self._epoch = state.epoch
        elif state.epoch < self._epoch:  # the old one's, and late: what it belongs to was dropped
            return failed_piece("the engine was restarted") if state.event.last else None
        if state.key in self._failed:
            if state.event.last:
                self._failed.discard(state.key)
            return None
        stream = self._stream(chunk)
        if stream.stop is None:
            text = self._take(stream, chunk)
        else:
            text = ""
        if stream.stop is not None and not stream.stop_told and not state.event.last:
            stream.stop_told = self._ask_to_stop(state)
        if state.event.last:
            del self._open[state.key]
            return self._last(stream, chunk, text)
        if not text:
            return None  # ids wait for the text they are part of
        if not stream.options.stream:
            stream.held_text.append(text)
            return None
        token_ids, stream.held_ids = stream.held_ids, []
        log_probs, stream.held_log_probs = stream.held_log_probs, []
        top, stream.held_top = stream.held_top, []
        return Piece(text, token_ids, log_probs, top, stream.cum_log_prob)

    def fail(self, state: StreamState) -> None:
        """The stream's end was told to the client as an error; whatever the engine still says of it is dropped."""
        self._open.pop(state.key, None)
        if not state.event.last:
            self._failed.add(state.key)

    def _stream(self, chunk: EngineChunk) -> _OpenStream:
        state = chunk.state
        stream = self._open.get(state.key)
        if stream is None:
            options = StreamOptions.from_json(chunk.options)
            stops = StopStrings(options.stop)
            echoed = state.num_input_tokens if options.echo else 0
            unarmed = echoed + options.min_tokens
            text = TextStream(
                self._decoding, stops, options.skip_special_tokens, options.include_stop, armed=not unarmed
            )
            stream = self._open[state.key] = _OpenStream(options, text, unarmed)
        return stream

    def _take(self, stream: _OpenStream, chunk: EngineChunk) -> str:
        """Decodes the chunk's ids; keeps those that belong to the output with the stream."""
        ids, state = list(chunk.token_ids), chunk.state
        if (
            state.event is StreamEvent.STOP
            and ids
            and ids[-1] == state.stop_id
            and ids[-1] in stream.options.hidden_ids
        ):
            ids.pop()
        text, consumed = "", 0
        while consumed < len(ids) and stream.stop is None:
            part = ids[consumed:]
            if stream.unarmed_ids:
                part = part[: stream.unarmed_ids]
                stream.unarmed_ids -= len(part)
            piece = stream.text.feed(part)
            consumed += piece.consumed
            text, stream.stop = text + piece.text, piece.stop
            if not stream.unarmed_ids:
                stream.text.arm()
        if stream.stop is None and state.event.last:
            piece = stream.text.finish()
            text, stream.stop = text + piece.text, piece.stop
        # An echoed prompt's ids come first and have no log probabilities.
        log_probs = chunk.log_probs[: max(0, len(chunk.log_probs) - (len(chunk.token_ids) - consumed))]
        stream.ids += consumed
        stream.cum_log_prob += sum(log_probs)
        stream.held_ids += ids[:consumed]
        stream.held_log_probs += log_probs
        stream.held_top += chunk.top[: len(log_probs)]
        return text

    def _last(self, stream: _OpenStream, chunk: EngineChunk, text: str) -> Piece:
        state = chunk.state
        finish_reason = _FINISH_REASONS[state.event]
        stop_reason = str(state.stop_id) if state.stop_id >= 0 else ""
        if stream.stop is not None:
            finish_reason, stop_reason = FinishReason.STOP, stream.stop
        echoed = state.num_input_tokens if stream.options.echo else 0
        return Piece(
            "".join(stream.held_text) + text,
            stream.held_ids,
            stream.held_log_probs,
            stream.held_top,
            stream.cum_log_prob,
            finish_reason,
            stop_reason,
            chunk.error if finish_reason is FinishReason.ERROR else "",
            max(0, stream.ids - echoed) + self._hidden(stream, chunk),
            stream.options.timings,
            stream.options.tokenized_ns,
        )

    @staticmethod
    def _hidden(stream: _OpenStream, chunk: EngineChunk) -> int:
        """A stop id that is kept out of the output was generated all the same, and counts."""
        hidden = chunk.state.event is StreamEvent.STOP and chunk.state.stop_id in stream.options.hidden_ids
        return int(hidden and stream.stop is None)


def failed_piece(problem: str) -> Piece:
    """The end of a stream whose text could not be made."""
    error = EngineFailed(problem)
    return Piece("", (), (), (), 0.0, FinishReason.ERROR, "", to_text(error))
