"""Faults that ``TRIDENT_FAILPOINTS`` arms in a process, for ``make chaos`` (docs/chaos.md); without it there are none.

``NAME@FILE`` is there while FILE exists, ``NAME`` always; ``NAME=NUMBER@FILE`` has a value. Commas join
several.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from contract.errors import InvalidArgument

VARIABLE = "TRIDENT_FAILPOINTS"
# What each does, and its value where none is given.
POINTS = {
    "engine.step": ("a step of the CPU engine raises", 0.0),
    "engine.kv": ("the engine's scheduler finds no free KV cache block", 0.0),
    "disk.slow": ("a write takes so many seconds longer", 0.2),
    "disk.full": ("a write fails with ENOSPC", 0.0),
    "redis.away": ("every call of Redis fails", 0.0),
    "metrics.lie": ("replicas seem idle to the gateway and to have so many slots", 1000.0),
    "clock.jump": ("time.time() is so many seconds ahead", 3600.0),
    "descriptors.few": ("so many files or sockets can be opened", 0.0),
}
_POLL_S = 0.05


class _Armed(NamedTuple):
    value: float
    file: Path | None

    def active(self) -> bool:
        return self.file is None or self.file.exists()


def parse(text: str) -> dict[str, _Armed]:
    """Read the variable. Raises InvalidArgument."""
    armed = {}
    for item in filter(None, text.split(",")):
        setting, _, file = item.partition("@")
        name, _, number = setting.partition("=")
        try:
            _, usual = POINTS[name]
            armed[name] = _Armed(float(number) if number else usual, Path(file) if file else None)
        except (KeyError, ValueError):
            known = ", ".join(POINTS)
            raise InvalidArgument(VARIABLE, f"must be NAME=NUMBER@FILE with a name of {known}, got {item!r}") from None
    return armed


try:
    _ARMED = parse(os.environ.get(VARIABLE, ""))
except InvalidArgument as exc:  # at the import of any program, none of which has begun to tell errors
    raise SystemExit(f"error: {exc}") from None


def value(name: str) -> float | None:
    """Return the value of a fault that is there now, else None."""
    armed = _ARMED.get(name)
    return armed.value if armed is not None and armed.active() else None


def write_to_disk() -> None:
    """Call before a write: be slow, or raise the OSError of a full disk."""
    if not _ARMED:
        return
    time.sleep(value("disk.slow") or 0.0)
    if value("disk.full") is not None:
        raise OSError(28, "No space left on device")


def _jump(armed: _Armed, real: Callable[[], float]) -> Callable[[], float]:
    with contextlib.suppress(ImportError):
        # gRPC subtracts time.time() from deadlines of its C core, whose clock does not jump here.
        vars(importlib.import_module("grpc._cython.cygrpc"))["time"] = types.SimpleNamespace(**vars(time))
    return lambda: real() + (armed.value if armed.active() else 0.0)


def _limit_descriptors(armed: _Armed) -> None:
    """Take every descriptor but so many while the fault is there, and give them back."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = int(armed.value)
    while True:
        while not armed.active():
            time.sleep(_POLL_S)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        taken = [os.open(os.devnull, os.O_RDONLY)]
        while taken[-1] < highest:  # the free numbers below the highest that is open
            taken.append(os.open(os.devnull, os.O_RDONLY))
        first_free = taken.pop()
        os.close(first_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(first_free + left, soft), hard))
        while armed.active():
            time.sleep(_POLL_S)
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if "clock.jump" in _ARMED:
    time.time = _jump(_ARMED["clock.jump"], time.time)
if "descriptors.few" in _ARMED:
    threading.Thread(target=_limit_descriptors, args=(_ARMED["descriptors.few"],), daemon=True).start()
