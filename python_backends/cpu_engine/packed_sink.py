"""Streams of the model ``ensemble_packed``: the engine decodes them itself, as a step that does would double the cost.

One step must follow nevertheless, since Triton 2.51 shows a disconnected client to such a step's requests only:
``client_watch``. Its input says which stream to look for, and Triton keeps its answers. So with the input that says
none the answer comes from the cache, within the call that sends the response, and the model does not run.

A response with text never asks for a look: the model would run, and a later response of the stream overtake it. For the
same reason the answer must be in the cache before the first text, and stay there although every look adds an entry that
may push out the one used longest ago: it is requested again every second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from contract import packed_delta
from contract.errors import TridentError
from contract.generation import TokenDelta
from python_backends.cpu_engine.request import EngineRequest
from python_backends.detokenizer.streams import Streams, failed_delta
from python_backends.ensemble.token_increment import TokenIncrement
from python_backends.triton_io import FINAL, ResponseSender, error_response, response, row

MODEL = "client_watch"
OUTPUTS = {packed_delta.OUTPUT, packed_delta.WATCH}  # what that ensemble requests
_NO_STREAM = row([0, 0, 0], np.int64)
# A look costs about a response, of which 32 streams of a real model get 500 a second. So a stream's looks are 10 ms for
# each stream apart, up to 320 ms; beyond 64 streams 5 ms, so that all together never cause more than 200 a second, of
# which the cache (server/triton_command.py) holds those of many seconds.
_LEAST_NS, _PER_STREAM_NS, _PER_MANY_NS, _FEW_AT_MOST_NS = 80_000_000, 10_000_000, 5_000_000, 320_000_000
_KEPT_NS = 1_000_000_000


class CachedAnswer:
    """Keeps the answer of ``client_watch`` for no stream in Triton's cache."""

    def __init__(self, infer: Callable[[str, dict[str, np.ndarray], str], None]) -> None:
        """infer: make a request to a model of this server, with these inputs, for one output; wait for the response."""
        self._infer = infer
        self._lock = threading.Lock()
        self._requested_ns = 0

    def keep(self, now_ns: int) -> None:
        """Return once it is there. now_ns: CLOCK_MONOTONIC. Raises EngineFailed: Triton cannot answer."""
        if now_ns - self._requested_ns < _KEPT_NS:
            return
        with self._lock:
            if now_ns - self._requested_ns >= _KEPT_NS:
                self._infer(MODEL, {packed_delta.WATCH: _NO_STREAM}, packed_delta.WATCHED)
                self._requested_ns = now_ns


class PackedSink:
    """Decode a stream's responses and write each as the output ``packed_delta``."""

    def __init__(
        self,
        sender: ResponseSender,
        streams: Streams,
        answer: CachedAnswer,
        live: Callable[[], int],
        decoded: Callable[[float], None],
    ) -> None:
        """
        streams: of this stream alone, as threads take turns to send.
        live: return how many streams the engine has.
        decoded: called with the seconds that the first token's text took.
        """
        self._sender, self._streams, self._answer = sender, streams, answer
        self._live, self._decoded = live, decoded
        self._looked_ns = time.monotonic_ns()
        self._broken = False

    def send(self, increment: TokenIncrement, request: EngineRequest) -> None:
        now_ns, state = time.monotonic_ns(), increment.state
        last = state.event.last
        delta = self._delta(increment, now_ns)
        if state.first:
            self._decoded((time.monotonic_ns() - now_ns) / 1e9)
        if delta is not None:
            self._send(delta, last)
        live = self._live()
        between_ns = max(_LEAST_NS, min(live * _PER_STREAM_NS, _FEW_AT_MOST_NS), live * _PER_MANY_NS)
        if not last and now_ns - self._looked_ns >= between_ns:
            self._looked_ns = now_ns
            self._sender.send(response({packed_delta.WATCH: row([state.epoch, state.key, now_ns], np.int64)}))

    def refuse(self, error: TridentError) -> None:
        self._sender.send(error_response(error), flags=FINAL)

    def close(self) -> None:
        try:
            self._send(failed_delta("a response could not be sent"), last=True)
        except Exception:
            self._sender.send(flags=FINAL)  # without it Triton would keep the request for ever
            raise

    def _delta(self, increment: TokenIncrement, received_ns: int) -> TokenDelta | None:
        """Return what the client gets, None for nothing yet. After a failure the engine ends the stream."""
        if self._broken:
            return failed_delta("the text could not be made", increment.state) if increment.state.event.last else None
        self._broken = True
        decoded = self._streams.feed(increment, received_ns)
        self._broken = False
        return None if decoded is None else decoded[0]

    def _send(self, delta: TokenDelta, last: bool) -> None:
        self._answer.keep(time.monotonic_ns())
        packed = np.frombuffer(packed_delta.pack(delta), dtype=np.uint8)[None]
        outputs = {packed_delta.OUTPUT: packed, packed_delta.WATCH: _NO_STREAM}
        self._sender.send(response(outputs), flags=FINAL if last else 0)
