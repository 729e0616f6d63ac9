"""Set gRPC's environment variables. It reads them once, when it is first imported; values that are set already stay."""

from __future__ import annotations

import os
import sys

_VERBOSITY, _EXPERIMENTS = "GRPC_VERBOSITY", "GRPC_EXPERIMENTS"


def for_command() -> None:
    """Silence gRPC's own log on standard error: its errors reach the caller as exceptions."""
    os.environ.setdefault(_VERBOSITY, "NONE")


def for_library() -> None:
    """Do as ``for_command`` if the package is imported by ``python -m``. Programs that import it keep the log."""
    if sys.argv[:1] == ["-m"]:  # as long as ``python -m`` imports the package
        for_command()


def for_gateway() -> None:
    """Log errors only, and use the polling engine.

    The newer event engine hands every message through two threads of its own; without it one thread polls, which takes
    a third off the CPU time of a relayed token.
    """
    os.environ.setdefault(_EXPERIMENTS, "-event_engine_client,-event_engine_listener")
    os.environ.setdefault(_VERBOSITY, "ERROR")
