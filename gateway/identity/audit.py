"""The audit log: what operators and tenant admins did, a line of JSON each, without secrets."""

from __future__ import annotations

import asyncio
import getpass
import logging
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from contract.errors import InvalidArgument
from gateway.config.settings import variable

REFUSALS_S = 10.0  # in which REFUSALS refusals of one caller, or of all unknown ones, are written at most
REFUSALS = 20
_LOG = logging.getLogger(__name__)


def at_the_command_line() -> str:
    """Return who runs a command, for the audit log."""
    try:
        return f"command line of {getpass.getuser()}"
    except (KeyError, OSError):  # a uid without an entry in passwd, as in a container
        return f"command line of uid {os.getuid()}"


class Audit:
    """Writes to a file, if there is one, and to the log. Raises: InvalidArgument if the file cannot be written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._refused, self._window_s = Counter[str](), 0.0
        try:
            self._write(b"")
        except OSError as exc:
            raise InvalidArgument(variable("audit_log"), f"cannot be written: {exc.strerror}") from exc

    async def write(self, who: str, role: str, action: str, target: str, result: str, **more: Any) -> None:
        """Write a line. more: fields that are left out where they are empty, such as before, after and request_id."""
        if role == "none" or result.startswith(("Unauthenticated", "PermissionDenied")):
            now_s = time.monotonic()
            if now_s - self._window_s >= REFUSALS_S:
                self._refused, self._window_s = Counter(), now_s
            self._refused[who] += 1
            if self._refused[who] > REFUSALS:
                return
        fields = {"who": who, "role": role, "action": action, "target": target, "result": result}
        fields |= {name: value for name, value in more.items() if value not in (None, "", {}, [])}
        _LOG.info("audit", extra={"fields": fields})
        try:
            await asyncio.to_thread(self._write, orjson.dumps({"time": time.time(), **fields}, default=str) + b"\n")
        except OSError as exc:
            _LOG.error("the audit log cannot be written: %s: %s", exc.strerror, fields)

    def _write(self, line: bytes) -> None:
        """Append in one call, so that lines of several processes stay whole; a file that was moved is made anew."""
        if self._path is not None:
            with open(self._path, "ab", 0, opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(line)
