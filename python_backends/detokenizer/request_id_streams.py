"""An engine that sends bare ids (the C++ ``tensorrtllm`` backend): whose they are, when a stream ends, how to stop it.

The backend marks no last response for this step, so the end is inferred: an end id, the token budget, or a response
without ids, which is how it answers a stop. A stream whose end never comes (the backend failed it, or never took it)
is forgotten ``_FORGET_NS`` after its last sign of life; until then its id is in use.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from contract.errors import EngineFailed
from python_backends.detokenizer.streams import EngineChunk
from python_backends.ensemble.metadata_channel import MetadataListener, StreamMetadata
from python_backends.ensemble.stream_state import StreamEvent, StreamState
from python_backends.triton_io import Inputs, log_error, stop_request

_FORGET_NS = 600_000_000_000

_TIMES = {
    "arrival_ns": "arrival_time_ns",
    "first_scheduled_ns": "first_scheduled_time_ns",
    "first_token_ns": "first_token_time_ns",
    "last_token_ns": "last_token_time_ns",
}


@dataclass
class _Live:
    key: int
    metadata: StreamMetadata
    seen: int = 0
    touched_ns: int = 0
    cancelled: bool = False


class RequestIdTable:
    """Thread-safe: known come in the listener's thread, ids in Triton's."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._live: OrderedDict[str, _Live] = OrderedDict()  # least recently touched first
        self._request_ids: dict[int, str] = {}  # of live streams, by key
        self._next_key = 0

    def accept(self, metadata: StreamMetadata) -> bool:
        """Opens a stream under the metadata's id; False while another one lives there."""
        now_ns = self._clock_ns()
        with self._lock:
            while self._live and now_ns - next(iter(self._live.values())).touched_ns >= _FORGET_NS:
                self._forget(next(iter(self._live)))
            if metadata.request_id in self._live:
                return False
            self._next_key += 1
            self._live[metadata.request_id] = _Live(self._next_key, metadata, touched_ns=now_ns)
            self._request_ids[self._next_key] = metadata.request_id
            return True

    def request_id(self, key: int) -> str | None:
        """Of a live stream."""
        with self._lock:
            return self._request_ids.get(key)

    def mark_cancelled(self, request_id: str) -> bool:
        """True the first time for a live stream."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None or live.cancelled:
                return False
            live.cancelled = True
            return True

    def state(self, request_id: str, token_ids: Sequence[int]) -> tuple[StreamState, str]:
        """How the stream stands after these ids, and its options with its first ids. Raises EngineFailed for ids
        under a request id that no stream has."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None:
                raise EngineFailed(f"the engine sent tokens for the request id {request_id!r}, which no stream has")
            options = live.metadata.options if live.seen == 0 else ""
            first = int(live.seen == 0)
            live.seen += len(token_ids)
            live.touched_ns = self._clock_ns()
            self._live.move_to_end(request_id)
            event, stop_id = self._event(live, token_ids)
            if event.last:
                self._forget(request_id)
        state = StreamState(0, live.key, event, stop_id, live.metadata.num_input_tokens, first=first)
        return state, options

    def _forget(self, request_id: str) -> None:
        del self._request_ids[self._live.pop(request_id).key]

    @staticmethod
    def _event(live: _Live, token_ids: Sequence[int]) -> tuple[StreamEvent, int]:
        if not token_ids:
            return (StreamEvent.CANCELLED if live.cancelled else StreamEvent.STOP), -1
        if token_ids[-1] in live.metadata.end_ids:
            return StreamEvent.STOP, token_ids[-1]
        if live.seen >= live.metadata.max_tokens:
            return StreamEvent.LENGTH, -1
        return StreamEvent.RUNNING, -1


class RequestIdStreams:
    """The engine as the detokenizer sees it when ids come under request ids; see InBandStreams for the other kind."""

    def __init__(self, metadata_socket: str, model: str = "engine") -> None:
        self._model = model
        self._streams = RequestIdTable()
        self._metadata_channel = MetadataListener(metadata_socket, self._streams.accept)
        # The stop request goes through Triton and is answered there: not in the thread that serves tokens.
        self._stops = ThreadPoolExecutor(max_workers=2, thread_name_prefix="stop")

    def chunk(self, request, inputs: Inputs) -> EngineChunk:
        request_id = request.request_id()
        token_ids = inputs.integers("output_ids")[: sum(inputs.integers("sequence_length"))]
        state, options = self._streams.state(request_id, token_ids)
        times = {field: inputs.scalar(name, 0) for field, name in _TIMES.items()}
        state = state._replace(**times)
        return EngineChunk(state, token_ids, inputs.floats("output_log_probs")[: len(token_ids)], options=options)

    def stop(self, state: StreamState) -> bool:
        """A stop string matched. True: Triton carries the word."""
        request_id = self._streams.request_id(state.key)
        if request_id is not None:
            self._stops.submit(self._send_stop, request_id)
        return True

    def cancel(self, state: StreamState) -> bool:
        """The client has gone. True: Triton carries the word."""
        request_id = self._streams.request_id(state.key)
        if request_id is not None and self._streams.mark_cancelled(request_id):
            self._stops.submit(self._send_stop, request_id)
        return True

    def _send_stop(self, request_id: str) -> None:
        try:
            stop_request(self._model, request_id)
        except Exception as exc:  # a thread of its own: nobody else would hear of it
            log_error(f"the stop of request {request_id!r} did not reach the engine: {exc!r}")

    def close(self) -> None:
        self._metadata_channel.close()
        self._stops.shutdown(wait=False)
