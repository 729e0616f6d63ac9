"""HTTP callers that left before their answer was complete, which Triton's HTTP endpoint does not notice.

Triton 2.51 does not read a connection while its request runs, and tells no model which connection a request came by. A
connection whose caller has closed it stays in CLOSE_WAIT until its request ends, and every such connection has one
request. So when there are as many of them as requests in the engine, every one of these was left; with fewer of them it
cannot be known which (docs/decisions/0016).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection
from pathlib import Path

_CHECK_EVERY_NS = 1_000_000_000
_CLOSE_WAIT = "08"  # TCP_CLOSE_WAIT of the kernel's tcp_states.h
_MAX_LIVE = 64  # with more it is out of the question that all have left, and the tables are long


def count_close_wait(port: int, tables: Collection[Path] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))) -> int:
    """Returns how many connections to the local ``port`` the other side has closed and ours has not."""
    row = re.compile(rf":{port:04X} [0-9A-F]+:[0-9A-F]{{4}} {_CLOSE_WAIT} ")
    count = 0
    for table in tables:
        with contextlib.suppress(OSError):  # no IPv6, or no /proc
            count += len(row.findall(table.read_text()))
    return count


class HttpDisconnects:
    """``count_close_wait``: see :func:`count_close_wait`."""

    def __init__(self, count_close_wait: Callable[[], int]) -> None:
        self._count = count_close_wait
        self._checked_ns = 0
        self._suspects: frozenset[int] = frozenset()

    def due(self, now_ns: int) -> bool:
        return now_ns - self._checked_ns >= _CHECK_EVERY_NS

    def check(self, live: frozenset[int], now_ns: int) -> frozenset[int]:
        """Returns the keys of the live requests that were left: all or none.

        They were left if at two checks in a row, a second apart, the same requests were live and as many connections
        were half closed. live: keys of every request in the engine. now_ns: any monotonic clock.
        """
        self._checked_ns = now_ns
        before, self._suspects = self._suspects, frozenset()
        if 0 < len(live) <= _MAX_LIVE and self._count() == len(live):
            self._suspects = live
        return live if live == before == self._suspects else frozenset()
