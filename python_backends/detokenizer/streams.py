"""The open streams of the detokenizer: token increments of the engine in, text increments for the client out.

A stream ends with the engine's last increment. When a stop string matches earlier, the engine is asked to stop, text
that still arrives is dropped, and the engine's last increment carries the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from contract.errors import EngineFailed, to_text
from contract.generation import FinishReason, Timings, TokenDelta, Usage
from python_backends.detokenizer.decoding import Decoding
from python_backends.detokenizer.stop import StopStrings
from python_backends.detokenizer.stream import TextStream
from python_backends.ensemble.stream_options import StreamOptions
from python_backends.ensemble.stream_state import StreamEvent, StreamState
from python_backends.ensemble.token_increment import TokenIncrement, TopLogProbs

_FINISH_REASONS = {
    StreamEvent.STOP: FinishReason.STOP,
    StreamEvent.LENGTH: FinishReason.LENGTH,
    StreamEvent.CANCELLED: FinishReason.CANCELLED,
    StreamEvent.ERROR: FinishReason.ERROR,
}


class TextIncrement(NamedTuple):
    """What one response adds for the client; the last one has a finish_reason.

    token_ids: the ids that ``text`` was made of.
    log_probs, top_log_probs: one entry per generated id, or empty if not requested.
    cum_log_prob: sum over all generated ids so far.
    stop_reason: the stop string or id that matched.
    num_output_tokens: generated ids of the whole stream; the last increment only.
    timings: the client requested the instants of every step.
    tokenized_ns: CLOCK_MONOTONIC, the prompt's ids were ready.
    echoed_ids: how many of ``token_ids`` are an echoed prompt's; not told by the last increment.
    """

    text: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    top_log_probs: Sequence[TopLogProbs]
    cum_log_prob: float
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    error: str = ""
    num_output_tokens: int = 0
    timings: bool = False
    tokenized_ns: int = 0
    echoed_ids: int = 0

    def delta(self, state: StreamState | None = None, received_ns: int = 0, decoded_ns: int = 0) -> TokenDelta:
        """Return it as clients read it.

        state: of its stream.
        received_ns, decoded_ns: CLOCK_MONOTONIC, the decoder got the engine's increment and had made its text.
        """
        top = tuple(tuple(zip(*position, strict=True)) for position in self.top_log_probs)
        delta = TokenDelta(
            self.text, tuple(self.token_ids), tuple(self.log_probs), self.finish_reason, top_log_probs=top
        )
        if self.finish_reason is None:
            delta.prompt_ids = self.echoed_ids
            return delta
        delta.stop_reason, delta.error = self.stop_reason, self.error
        if state is not None:
            delta.usage = Usage(state.num_input_tokens, self.num_output_tokens, state.num_cached_tokens)
            if self.timings and state.arrival_ns:
                engine = state.arrival_ns, state.first_scheduled_ns, state.first_token_ns, state.last_token_ns
                delta.timings = Timings(*engine, self.tokenized_ns, received_ns, decoded_ns)
        return delta


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


class Streams:
    """Decode every open stream."""

    def __init__(self, decoding: Decoding, request_stop: Callable[[StreamState], bool]) -> None:
        """
        decoding: the tokenizer's decoder.
        request_stop: ask the engine to end the stream; returns whether the engine has the request.
        """
        self._decoding = decoding
        self._request_stop = request_stop
        self._open: dict[int, _OpenStream] = {}
        self._failed: set[int] = set()
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._open)

    def feed(self, increment: TokenIncrement) -> TextIncrement | None:
        """Return what the client gets, or None if this increment adds nothing for it."""
        state = increment.state
        if state.epoch > self._epoch:  # a new engine: no stream of the earlier one will end
            self._open.clear()
            self._failed.clear()
            self._epoch = state.epoch
        elif state.epoch < self._epoch:  # late, of the earlier engine: its streams were dropped
            return failed_increment("the engine was restarted") if state.event.last else None
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
            return self._last(stream, increment, text)
        if not text:
            return None  # ids wait for the text they are part of
        if not stream.options.stream:
            stream.held_text.append(text)
            return None
        token_ids, stream.held_ids = stream.held_ids, []
        log_probs, stream.held_log_probs = stream.held_log_probs, []
        top, stream.held_top = stream.held_top, []
        echoed = stream.echoed_ids if stream.ids == len(token_ids) else 0  # in the first response
        return TextIncrement(text, token_ids, log_probs, top, stream.cum_log_prob, echoed_ids=echoed)

    def fail(self, state: StreamState) -> None:
        """Drop a stream whose client was sent an error, and its later increments."""
        self._open.pop(state.key, None)
        if not state.event.last:
            self._failed.add(state.key)

    def _open_stream(self, increment: TokenIncrement) -> _OpenStream:
        options = StreamOptions.from_json(increment.options)
        echoed = increment.state.num_input_tokens if options.echo else 0
        unarmed = echoed + options.min_tokens
        text = TextStream(
            self._decoding,
            StopStrings(options.stop),
            options.skip_special_tokens,
            options.include_stop,
            armed=not unarmed,
        )
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
        if (
            state.event is StreamEvent.STOP
            and ids
            and ids[-1] == state.stop_id
            and ids[-1] in stream.options.hidden_ids
        ):
            ids.pop()
        text, consumed = self._feed(stream, ids)
        if stream.stop is None and state.event.last:
            text += stream.text.finish()
            stream.stop = stream.text.stop
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
    def _last(stream: _OpenStream, increment: TokenIncrement, text: str) -> TextIncrement:
        state, options = increment.state, stream.options
        finish_reason = _FINISH_REASONS[state.event]
        stop_reason = str(state.stop_id) if state.stop_id >= 0 else ""
        # A stop id that is kept out of the output was generated and counts.
        hidden = int(state.event is StreamEvent.STOP and state.stop_id in options.hidden_ids and stream.stop is None)
        if stream.stop is not None:
            finish_reason, stop_reason = FinishReason.STOP, stream.stop
        return TextIncrement(
            "".join(stream.held_text) + text,
            stream.held_ids,
            stream.held_log_probs,
            stream.held_top,
            stream.cum_log_prob,
            finish_reason,
            stop_reason,
            increment.error if finish_reason is FinishReason.ERROR else "",
            max(0, stream.ids - stream.echoed_ids) + hidden,
            options.timings,
            options.tokenized_ns,
        )


def failed_increment(problem: str) -> TextIncrement:
    """Return the end of a stream whose text could not be made."""
    return TextIncrement("", (), (), (), 0.0, FinishReason.ERROR, "", to_text(EngineFailed(problem)))
