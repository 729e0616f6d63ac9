"""The open streams of the detokenizer: token increments of the engine in, deltas with text for the client out.

A stream ends with the engine's last increment. When a stop string matches earlier, the engine is asked to stop, text
that still arrives is dropped, and the engine's last increment carries the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from contract.errors import EngineFailed, to_text
from contract.generation import FinishReason, Timings, TokenDelta, Usage
from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.stop import StopStrings, TextStream
from python_backends.ensemble.request_tensors import StreamOptions
from python_backends.ensemble.token_increment import StreamEvent, StreamState, TokenIncrement, TopLogProbs


@dataclass
class _OpenStream:
    options: StreamOptions
    text: TextStream
    echoed_ids: int  # ids of an echoed prompt
    unarmed_ids: int  # ids until stop strings count: an echoed prompt's and min_tokens
    ids: int = 0
    cum_log_prob: float = 0.0
    stop: str | None = None
    stop_sent: bool = False
    held_text: list[str] = field(default_factory=list)
    held_ids: list[int] = field(default_factory=list)
    held_log_probs: list[float] = field(default_factory=list)
    held_top: list[TopLogProbs] = field(default_factory=list)

    def take(self, text: str) -> TokenDelta:
        """Return what is held, with this text."""
        top = tuple(tuple(zip(*position, strict=True)) for position in self.held_top)
        delta = TokenDelta(text, tuple(self.held_ids), tuple(self.held_log_probs), top_log_probs=top)
        self.held_ids, self.held_log_probs, self.held_top = [], [], []
        return delta


class Streams:
    """Decode every open stream."""

    def __init__(self, decoding: Decoding, request_stop: Callable[[StreamState], bool]) -> None:
        """request_stop: ask the engine to end the stream; returns whether the engine has the request."""
        self._decoding = decoding
        self._request_stop = request_stop
        self._open: dict[int, _OpenStream] = {}
        self._failed: set[int] = set()
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._open)

    def feed(self, increment: TokenIncrement, received_ns: int = 0) -> tuple[TokenDelta, float] | None:
        """Return what the client gets, and the sum of all generated ids' log probabilities so far; None if this
        increment adds nothing for it.

        received_ns: CLOCK_MONOTONIC, the increment came.
        """
        state = increment.state
        if state.epoch > self._epoch:  # a new engine: no stream of the earlier one will end
            self._open.clear()
            self._failed.clear()
            self._epoch = state.epoch
        elif state.epoch < self._epoch:  # late, of the earlier engine: its streams were dropped
            return (failed_delta("the engine was restarted", state), 0.0) if state.event.last else None
        if state.key in self._failed:
            if state.event.last:
                self._failed.discard(state.key)
            return None
        stream = self._open.get(state.key) or self._open_stream(increment)
        text = self._decode(stream, increment) if stream.stop is None else ""
        if stream.stop is not None and not stream.stop_sent and not state.event.last:
            stream.stop_sent = self._request_stop(state)
        if state.event.last:
            del self._open[state.key]
            return self._last(stream, increment, text, received_ns), stream.cum_log_prob
        if not text:
            return None  # ids wait for the text they are part of
        if not stream.options.stream:
            stream.held_text.append(text)
            return None
        delta = stream.take(text)
        if stream.ids == len(delta.token_ids):  # the first response
            delta.prompt_ids = stream.echoed_ids
        return delta, stream.cum_log_prob

    def fail(self, state: StreamState) -> None:
        """Drop a stream whose client was sent an error, and its later increments."""
        self._open.pop(state.key, None)
        if not state.event.last:
            self._failed.add(state.key)

    def _open_stream(self, increment: TokenIncrement) -> _OpenStream:
        options = StreamOptions.from_json(increment.options)
        echoed = increment.state.num_input_tokens if options.echo else 0
        unarmed = echoed + options.min_tokens
        shown = options.skip_special_tokens, options.include_stop
        text = TextStream(self._decoding, StopStrings(options.stop), *shown, armed=not unarmed)
        stream = self._open[increment.state.key] = _OpenStream(options, text, echoed, unarmed)
        _, stream.ids = self._feed(stream, options.replayed_ids)
        return stream

    @staticmethod
    def _feed(stream: _OpenStream, ids: Sequence[int]) -> tuple[str, int]:
        """Return the text of the ids, and how many of them belong to the output: those up to a stop string."""
        text, consumed = "", 0
        while consumed < len(ids) and stream.stop is None:
            part = ids[consumed:]
            if stream.unarmed_ids:
                part = part[: stream.unarmed_ids]
                stream.unarmed_ids -= len(part)
            added, used = stream.text.feed(part)
            text, consumed, stream.stop = text + added, consumed + used, stream.text.stop
            if not stream.unarmed_ids:
                stream.text.arm()
        return text, consumed

    def _decode(self, stream: _OpenStream, increment: TokenIncrement) -> str:
        """Return the text of the increment's ids; those that belong to the output are held with the stream."""
        ids, state = list(increment.token_ids), increment.state
        ended = state.event is StreamEvent.STOP and ids and ids[-1] == state.stop_id
        # A stop id of the caller's has no text; like every other id of the output it counts and has a log probability.
        without_text = [ids.pop()] if ended and state.stop_id in stream.options.hidden_ids else []
        text, consumed = self._feed(stream, ids)
        if stream.stop is None and state.event.last:
            text += stream.text.finish()
            stream.stop = stream.text.stop
        if stream.stop is None:
            ids += without_text
            consumed += len(without_text)
        # An echoed prompt's ids come first, with or without log probabilities.
        dropped = len(increment.token_ids) - consumed
        log_probs = increment.log_probs[: max(0, len(increment.log_probs) - dropped)]
        stream.ids += consumed
        if stream.options.replayed_ids and log_probs and not stream.cum_log_prob:
            # The sum of the ids before the cut is the engine's.
            stream.cum_log_prob = increment.cum_log_prob - sum(increment.log_probs)
        generated = min(consumed, max(0, stream.ids - stream.echoed_ids))
        stream.cum_log_prob += sum(log_probs[max(0, len(log_probs) - generated) :])
        stream.held_ids += ids[:consumed]
        stream.held_log_probs += log_probs
        stream.held_top += increment.top_log_probs[: len(log_probs)]
        return text

    @staticmethod
    def _last(stream: _OpenStream, increment: TokenIncrement, text: str, received_ns: int) -> TokenDelta:
        state, options = increment.state, stream.options
        delta = stream.take("".join(stream.held_text) + text)
        delta.finish_reason = FinishReason[state.event.name]
        delta.stop_reason = str(state.stop_id) if state.stop_id >= 0 else ""
        if stream.stop is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, stream.stop
        elif state.event is StreamEvent.ERROR:
            delta.error = increment.error
        generated = max(0, stream.ids - stream.echoed_ids)
        delta.usage = Usage(state.num_input_tokens, generated, state.num_cached_tokens)
        if options.timings and state.arrival_ns:
            engine = state.arrival_ns, state.first_scheduled_ns, state.first_token_ns, state.last_token_ns
            delta.timings = Timings(*engine, options.tokenized_ns, received_ns, time.monotonic_ns())
        return delta


def failed_delta(problem: str, state: StreamState | None = None) -> TokenDelta:
    """Return the end of a stream whose text could not be made. state: of the stream, if it is known."""
    usage = state and Usage(state.num_input_tokens, 0, state.num_cached_tokens)
    return TokenDelta(finish_reason=FinishReason.ERROR, error=to_text(EngineFailed(problem)), usage=usage)
