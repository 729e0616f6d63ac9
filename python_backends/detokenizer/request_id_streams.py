"""Streams of the C++ ``tensorrtllm`` backend, which returns token ids under a request id and nothing else.

The backend marks no last response for this step, so the end of a stream is inferred: an end id, the token limit, or a
response without ids, which is the backend's answer to a stop. A stream whose end never arrives (the backend failed it,
or never accepted it) is removed ``_EXPIRY_NS`` after its last response; until then its request id is in use.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from contract.errors import EngineFailed
from python_backends.ensemble.metadata_channel import SEND_ADAPTER, MetadataListener, MetadataSender, StreamMetadata
from python_backends.ensemble.token_increment import INSTANTS, StreamEvent, StreamState, TokenIncrement
from python_backends.triton_io import Inputs, Request, log_error, stop_request

_EXPIRY_NS = 600_000_000_000
# Should the inference be wrong, as after the backend alone was loaded again, requests without weights fail. So one that
# has had no token for this long makes later ones carry them, under any adapter.
DOUBT_NS = 100_000_000


class AdapterCache:
    """Which LoRA adapters the backend has in its cache of ``capacity``, inferred from requests and tokens.

    A request with ``lora_task_id`` alone fails unless the backend has the adapter. It keeps the weights that came with
    an earlier request until, for lack of room, it drops the adapter whose requests ended longest ago. It reports
    neither, and a failed request ends before the detokenizer. So requests carry the weights unless a token shows that
    the backend had them, and too few other adapters ran since to displace them.

    Not thread-safe. Adapters are known by their numbers.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Instants in ns, by adapter.
        self._used: dict[int, int] = {}  # the last request, token or end
        self._shown: dict[int, int] = {}  # the last token; 0 once others may have displaced the adapter
        self._open: dict[int, int] = {}  # the first request without weights since then

    def send_cause(self, adapter: int, now_ns: int, running: Container[int] = ()) -> str:
        """Return why a request that comes now must carry the adapter's weights: first, again; empty if it need not.

        running: adapters of requests that have not ended. They keep their room, so that others are dropped.
        """
        shown_ns = self._shown.get(adapter, 0)
        others = [n for n, ns in self._used.items() if n != adapter and (ns >= shown_ns or n in running)]
        if shown_ns and len(others) >= self._capacity:
            shown_ns = self._shown[adapter] = 0
        self._used[adapter] = now_ns
        if shown_ns and now_ns - self._open.setdefault(adapter, now_ns) <= DOUBT_NS:
            return ""
        if shown_ns:  # what the backend had before that request it may have lost too
            self._shown = {other: ns if ns > self._open[adapter] else 0 for other, ns in self._shown.items()}
        return "again" if adapter in self._shown else "first"

    def generated(self, adapter: int, now_ns: int) -> None:
        """Note a token of a request with the adapter: the backend has it."""
        self._used[adapter] = self._shown[adapter] = now_ns
        self._open.pop(adapter, None)

    def ended(self, adapter: int, now_ns: int) -> None:
        """Note the end of a request with the adapter, with or without a token."""
        self._used[adapter] = now_ns


@dataclass
class _LiveStream:
    key: int
    metadata: StreamMetadata
    received: int = 0  # generated ids
    touched_ns: int = 0
    cancelled: bool = False


class RequestIdTable:
    """The live streams by request id. Thread-safe: metadata arrives in the listener's thread, ids in Triton's."""

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        adapter_cache: int = 0,
        on_adapter: Callable[[int, str], None] = lambda number, send_cause: None,
        on_end: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        """adapter_cache: how many adapters the backend holds. on_adapter: called for each request with one. on_end:
        called for each stream that ends or expires."""
        self._on_end = on_end
        self._taken: dict[str, int] = {}  # adapters of streams that detokenizer_packed serves, by request id
        self._clock_ns, self._on_adapter, self._cache = clock_ns, on_adapter, AdapterCache(adapter_cache)
        self._lock = threading.Lock()
        self._live: OrderedDict[str, _LiveStream] = OrderedDict()  # least recently used first
        self._request_ids: dict[int, str] = {}  # of live streams, by key
        self._next_key = 0

    def accept(self, metadata: StreamMetadata) -> int:
        """Open a stream; return whether its request id was free, or SEND_ADAPTER."""
        now_ns = self._clock_ns()
        with self._lock:
            while self._live and now_ns - next(iter(self._live.values())).touched_ns >= _EXPIRY_NS:
                self._remove(next(iter(self._live)))
            if metadata.request_id in self._live or metadata.request_id in self._taken:
                return False
            self._next_key += 1
            self._live[metadata.request_id] = _LiveStream(self._next_key, metadata, touched_ns=now_ns)
            self._request_ids[self._next_key] = metadata.request_id
            if not metadata.adapter:
                return True
            for adapter in filter(None, self._taken.values()):
                self._cache.generated(adapter, now_ns)
            running = {live.metadata.adapter for live in self._live.values()}
            cause = self._cache.send_cause(metadata.adapter, now_ns, running)
        self._on_adapter(metadata.adapter, cause)
        return SEND_ADAPTER if cause else True

    def take(self, request_id: str) -> StreamMetadata | None:
        """Give up a live stream, and return its metadata; its request id stays in use until ``end``."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None:
                return None
            del self._request_ids[live.key], self._live[request_id]
            self._taken[request_id] = live.metadata.adapter
            return live.metadata

    def end(self, request_id: str) -> None:
        """Free the request id of a stream that was given up."""
        with self._lock:
            if adapter := self._taken.pop(request_id, 0):
                self._cache.generated(adapter, self._clock_ns())

    def __contains__(self, request_id: str) -> bool:
        with self._lock:
            return request_id in self._live

    def request_id(self, key: int) -> str | None:
        """Return the request id of a live stream, None once it has ended."""
        with self._lock:
            return self._request_ids.get(key)

    def mark_cancelled(self, request_id: str) -> bool:
        """Mark a live stream as cancelled; return False if it has ended or was marked before."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None or live.cancelled:
                return False
            live.cancelled = True
            return True

    def advance(self, request_id: str, token_ids: Sequence[int]) -> tuple[StreamState, str]:
        """Return the stream's state after these ids, and its options if they are its first. Raises EngineFailed: no
        stream has this request id."""
        with self._lock:
            live = self._live.get(request_id)
            if live is None:
                raise EngineFailed(f"the engine sent tokens for the request id {request_id!r}, which no stream has")
            first = live.received == 0
            options = live.metadata.options if first else ""
            live.received += len(token_ids)
            live.touched_ns = self._clock_ns()
            if token_ids and live.metadata.adapter:
                self._cache.generated(live.metadata.adapter, live.touched_ns)
            self._live.move_to_end(request_id)
            event, stop_id = self._event(live, token_ids)
            if event.last:
                self._remove(request_id)
        state = StreamState(0, live.key, event, stop_id, live.metadata.num_input_tokens, first=int(first))
        return state, options

    def _remove(self, request_id: str) -> None:
        live = self._live.pop(request_id)
        del self._request_ids[live.key]
        if live.metadata.adapter:
            self._cache.ended(live.metadata.adapter, self._clock_ns())
        self._on_end(request_id)

    @staticmethod
    def _event(live: _LiveStream, token_ids: Sequence[int]) -> tuple[StreamEvent, int]:
        if not token_ids:
            return (StreamEvent.CANCELLED if live.cancelled else StreamEvent.STOP), -1
        if token_ids[-1] in live.metadata.end_ids:
            return StreamEvent.STOP, token_ids[-1]
        if live.received >= live.metadata.max_tokens:
            return StreamEvent.LENGTH, -1
        return StreamEvent.RUNNING, -1


class RequestIdStreams:
    """Read the engine's responses and stop or cancel its streams; see InBandStreams for the Python engines."""

    def __init__(self, metadata_socket: str, table: RequestIdTable | None) -> None:
        """table: None where the model ``detokenizer`` has it, from which the metadata of each stream is taken."""
        self._sender = MetadataSender(metadata_socket) if table is None else None
        if self._sender is not None:
            table = RequestIdTable(on_end=self._sender.end)
        assert table is not None
        self._table = table
        self._channel = self._sender or MetadataListener(metadata_socket, table.accept, table.take, table.end)
        # A stop request blocks until Triton has answered it, so it is not sent by the thread that serves tokens.
        self._stops = ThreadPoolExecutor(max_workers=2, thread_name_prefix="stop")

    def read(self, request: Request, inputs: Inputs) -> TokenIncrement:
        """Return the increment that the detokenizer's input tensors hold.
        Raises EngineFailed: no stream has the request's id.
        Raises Unavailable: the model ``detokenizer`` does not answer.
        """
        token_ids = inputs.values("output_ids")[: sum(inputs.values("sequence_length"))]
        request_id = request.request_id()
        if self._sender is not None and request_id not in self._table:
            if (metadata := self._sender.take(request_id)) is not None:
                self._table.accept(metadata)
        state, options = self._table.advance(request_id, token_ids)
        state = state._replace(**{field: inputs.scalar(name, 0) for field, name in INSTANTS.items()})
        return TokenIncrement(state, token_ids, inputs.values("output_log_probs")[: len(token_ids)], options=options)

    def stop(self, state: StreamState) -> bool:
        """End a stream in whose text a stop string matched; return True: Triton delivers the request."""
        request_id = self._table.request_id(state.key)
        if request_id is not None:
            self._stops.submit(self._send_stop, request_id)
        return True

    def cancel(self, state: StreamState) -> bool:
        """End a stream whose client has disconnected; return True: Triton delivers the request."""
        request_id = self._table.request_id(state.key)
        if request_id is not None and self._table.mark_cancelled(request_id):
            self._stops.submit(self._send_stop, request_id)
        return True

    def close(self) -> None:
        self._channel.close()
        self._stops.shutdown(wait=False)

    def _send_stop(self, request_id: str) -> None:
        try:
            stop_request("engine", request_id)
        except Exception as exc:  # the thread's outer edge: no caller waits for the result
            log_error(f"stop request failed: request_id={request_id!r} error={exc!r}")
