"""Settings of the Python backends, from TRIDENT_* environment variables; the supervisor checks them before it starts.

A small reader of its own: every stub imports it, and pydantic would add 0.2 s to the start of each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import InvalidArgument
from contract.watchdog import LIMIT_S, STALL_S

# Variables with whole numbers: the default, the least value, and what it is; docs/environment.md lists them. Fields of
# Settings are named after them, and are in seconds where these are in milliseconds.
COUNTS = {
    "TRIDENT_MAX_WAITING": (1024, 1, "requests that may wait for a slot of one engine"),
    "TRIDENT_SENDER_THREADS": (4, 1, "threads that send responses to Triton"),
    "TRIDENT_MAX_COALESCE_MS": (50, 0, "longest time that tokens wait for each other, ms; 0: each is a response"),
    "TRIDENT_MAX_PROMPT_BYTES": (4 * 1024 * 1024, 1, "longest `text_input` or `messages`, bytes"),
    "TRIDENT_WHOLE_ANSWER_TIMEOUT_S": (0, 0, "longest time of a request with `stream=false`, seconds; 0: no limit"),
    "TRIDENT_GRAMMAR_TIMEOUT_MS": (2000, 1, "time of the CPU for compiling the grammar of one request, ms"),
    "TRIDENT_GRAMMAR_STALL_MS": (250, 1, "longest time that a grammar may hold up the other requests, ms"),
}


@dataclass(frozen=True)
class Settings:
    """The settings of all Python models. COUNTS has the others.

    engine_dir: the engine folder to serve.
    control_socket: abstract unix datagram socket on which the engine receives commands (ensemble/control.py).
    drain_file: while it exists, requests are refused.
    stall_s: seconds without an engine step and without CPU use that make the engine process hung.
    step_limit_s: seconds without an engine step that make it hung, with CPU use.
    http_port: port of Triton's HTTP endpoint, 0 if unknown.
    """

    engine_dir: Path
    control_socket: str
    max_waiting: int = 1024
    sender_threads: int = 4
    max_coalesce_s: float = 0.05
    max_prompt_bytes: int = 4 * 1024 * 1024
    drain_file: Path | None = None
    stall_s: float = STALL_S
    step_limit_s: float = LIMIT_S
    http_port: int = 0
    whole_answer_timeout_s: int = 0
    grammar_timeout_s: float = 2.0
    grammar_stall_s: float = 0.25

    @property
    def metadata_socket(self) -> str:
        """Name of the abstract unix datagram socket of the metadata channel (metadata_channel.py)."""
        return f"{self.control_socket}-metadata"

    @property
    def supervisor_socket(self) -> str:
        """Name of the abstract unix datagram socket on which the supervisor receives heartbeats (heartbeat.py)."""
        return f"{self.control_socket}-supervisor"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the environment. Raises InvalidArgument for a variable whose value is not allowed."""
        engine_dir = environ.get("TRIDENT_ENGINE_DIR")
        if not engine_dir:
            raise InvalidArgument("TRIDENT_ENGINE_DIR", "must be set to the engine folder, e.g. engines/demo")
        return cls(
            engine_dir=Path(engine_dir),
            control_socket=environ.get("TRIDENT_CONTROL_SOCKET") or "trident-engine",
            http_port=_count(environ, "TRIDENT_HTTP_PORT"),
            drain_file=Path(path) if (path := environ.get("TRIDENT_DRAIN_FILE")) else None,
            stall_s=_seconds(environ, "TRIDENT_STALL_S", STALL_S),
            step_limit_s=_seconds(environ, "TRIDENT_STEP_LIMIT_S", LIMIT_S),
            **{name[len("TRIDENT_") :].lower().replace("_ms", "_s"): _count(environ, name) for name in COUNTS},
        )


def _count(environ: Mapping[str, str], name: str) -> Any:
    default, least, _ = COUNTS.get(name, (0, 0, ""))
    text = environ.get(name) or str(default)
    if len(text) > 12:
        raise InvalidArgument(name, f"must have at most 12 digits, got {len(text)}")
    if not text.isdecimal() or int(text) < least:
        raise InvalidArgument(name, f"must be a whole number from {least}, got {text!r}")
    return int(text) / 1e3 if name.endswith("_MS") else int(text)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 3 <= value <= 86_400:
        raise InvalidArgument(name, f"must be a number of seconds from 3 to 86400, got {text!r}")
    return value
