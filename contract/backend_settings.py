"""Settings of the Python backends, from TRIDENT_* environment variables; the supervisor checks them before it starts.

A small reader of its own: every stub imports it, and pydantic-settings would add 0.2 s to the start of each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contract.errors import InvalidArgument
from contract.watchdog import LIMIT_S, STALL_S


@dataclass(frozen=True)
class Settings:
    """The settings of all Python models.

    engine_dir: the engine folder to serve.
    control_socket: abstract unix datagram socket on which the engine receives commands (ensemble/control.py).
    max_waiting: requests that may wait for a slot.
    sender_threads: threads that send responses to Triton.
    max_coalesce_s: longest time that tokens wait for each other; 0 sends each in a response of its own.
    max_prompt_bytes: longest text_input or messages.
    drain_file: while it exists, requests are refused.
    stall_s: seconds without an engine step and without CPU use that make the engine process hung.
    step_limit_s: seconds without an engine step that make it hung, with CPU use.
    http_port: port of Triton's HTTP endpoint, 0 if unknown.
    grammar_timeout_s: seconds of the CPU for compiling the grammar of one request.
    grammar_stall_s: longest time that a grammar may hold up the other requests of an engine.
    whole_answer_timeout_s: longest time of a request with stream=false, waiting included; 0 for no limit.
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
        """Read the environment.

        Raises:
            InvalidArgument: a variable holds a value that is not allowed.
        """
        engine_dir = environ.get("TRIDENT_ENGINE_DIR")
        if not engine_dir:
            raise InvalidArgument("TRIDENT_ENGINE_DIR", "must be set to the engine folder, e.g. engines/demo")
        return cls(
            engine_dir=Path(engine_dir),
            control_socket=environ.get("TRIDENT_CONTROL_SOCKET") or "trident-engine",
            max_waiting=_count(environ, "TRIDENT_MAX_WAITING", 1024),
            sender_threads=_count(environ, "TRIDENT_SENDER_THREADS", 4),
            max_coalesce_s=_count(environ, "TRIDENT_MAX_COALESCE_MS", 50, least=0) / 1e3,
            max_prompt_bytes=_count(environ, "TRIDENT_MAX_PROMPT_BYTES", 4 * 1024 * 1024),
            http_port=_count(environ, "TRIDENT_HTTP_PORT", 0, least=0),
            whole_answer_timeout_s=_count(environ, "TRIDENT_WHOLE_ANSWER_TIMEOUT_S", 0, least=0),
            grammar_timeout_s=_count(environ, "TRIDENT_GRAMMAR_TIMEOUT_MS", 2000) / 1e3,
            grammar_stall_s=_count(environ, "TRIDENT_GRAMMAR_STALL_MS", 250) / 1e3,
            drain_file=Path(path) if (path := environ.get("TRIDENT_DRAIN_FILE")) else None,
            stall_s=_seconds(environ, "TRIDENT_STALL_S", STALL_S),
            step_limit_s=_seconds(environ, "TRIDENT_STEP_LIMIT_S", LIMIT_S),
        )


def _count(environ: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < least:
        raise InvalidArgument(name, f"must be a whole number from {least}, got {text!r}")
    return int(text)


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 3 <= value <= 86_400:
        raise InvalidArgument(name, f"must be a number of seconds from 3 to 86400, got {text!r}")
    return value
