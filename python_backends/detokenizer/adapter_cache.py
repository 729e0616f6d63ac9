"""Which LoRA adapters TensorRT-LLM's C++ backend has in its cache, inferred from requests and tokens.

A request with ``lora_task_id`` alone fails unless the backend has the adapter. It keeps the weights that came with an
earlier request until, for lack of room, it drops the adapter whose requests ended longest ago. It reports neither, and
a failed request ends before the detokenizer. So requests carry the weights unless a token shows that the backend had
them, and too few other adapters ran since to displace them.
"""

from __future__ import annotations

from collections.abc import Container

# Should the inference be wrong, as after the backend alone was loaded again, requests without weights fail. So one that
# has had no token for this long makes later ones carry them, under any adapter.
DOUBT_NS = 100_000_000


class AdapterCache:
    """The backend's cache of ``capacity`` adapters, which are known by their numbers. One thread at a time."""

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
        others = [
            other for other, ns in self._used.items() if other != adapter and (ns >= shown_ns or other in running)
        ]
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
