"""Requests whose HTTP client has disconnected, which Triton's HTTP endpoint does not detect.

Triton 2.51 does not read a connection while its request runs, and no model learns which connection a request came by. A
connection that the client has closed stays in CLOSE_WAIT until its request ends, or has a response, and each has one
request. So when there are as many of them as requests in the engine without a response, the clients of all these have
disconnected; when there are fewer, it cannot be known which (docs/decisions/0013). Streams among them are only counted,
not ended: other calls, such as a probe of a server that is loading a model, leave such connections too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection
from pathlib import Path

CHECK_EVERY_NS = 1_000_000_000
_CLOSE_WAIT = "08"  # TCP_CLOSE_WAIT of the kernel's tcp_states.h
_TABLES = Path("/proc/net/tcp"), Path("/proc/net/tcp6")
_MAX_LIVE = 64  # with more it is improbable that all have disconnected, and reading the tables takes long


def half_closed(port: int, tables: Collection[Path] = _TABLES) -> frozenset[str]:
    """Return the connections to the local ``port`` that clients have closed and the server has not, by address."""
    row = re.compile(rf":{port:04X} ([0-9A-F]+:[0-9A-F]{{4}}) {_CLOSE_WAIT} ")
    found: set[str] = set()
    for table in tables:
        with contextlib.suppress(OSError):  # no IPv6, or no /proc
            found.update(row.findall(table.read_text()))
    return frozenset(found)


class HttpDisconnects:
    """Compare the half-closed connections with the live requests, once a second."""

    def __init__(self, half_closed: Callable[[], Collection[str]]) -> None:
        """half_closed: return the connections in CLOSE_WAIT."""
        self._half_closed = half_closed
        self._checked_ns = 0
        self._suspects: tuple[frozenset[int], frozenset[str]] = frozenset(), frozenset()

    def due(self, now_ns: int) -> bool:
        """Whether a second has passed since the last check."""
        return now_ns - self._checked_ns >= CHECK_EVERY_NS

    def check(self, live: frozenset[int], now_ns: int, silent: int = 0) -> frozenset[int]:
        """Return the keys of the live requests whose clients have disconnected: all or none.

        They have if at two checks in a row, a second apart, the same requests were live and the same connections, as
        many as these and the silent streams, were half closed. A connection of a health check is so for a moment, also
        twice in a row.

        live: keys of the requests in the engine that answer once.
        now_ns: any monotonic clock.
        silent: streams that have sent nothing for CHECK_EVERY_NS, whose connections may be half closed too.
        """
        self._checked_ns = now_ns
        before, self._suspects = self._suspects, (frozenset(), frozenset())
        if 0 < len(live) <= _MAX_LIVE and len(closed := frozenset(self._half_closed())) == len(live) + silent:
            self._suspects = live, closed
        return live if self._suspects[0] and before == self._suspects else frozenset()
