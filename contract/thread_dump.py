"""Where the threads of a process that hangs stand: it writes their Python stacks to the server's log at a signal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from pathlib import Path

SIGNAL = signal.SIGUSR1


def write_on_signal() -> None:
    """Have this process write the stacks of its threads to stderr at SIGNAL, also while one holds the interpreter."""
    faulthandler.register(SIGNAL, all_threads=True)


def write() -> None:
    """Write the stacks of this process's threads to stderr. No thread runs Python meanwhile."""
    faulthandler.dump_traceback(2, all_threads=True)


def request(pid: int) -> bool:
    """Have another process write its stacks; return False, with nothing sent, if it would not: the signal would end it.

    Its threads run on meanwhile, and one that starts, ends or calls a function just then may crash it: only for one
    that is to be ended.
    """
    with contextlib.suppress(OSError):
        handled = (
            Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        )  # signals, as bits from 1 on
        if int(handled, 16) >> (SIGNAL - 1) & 1:
            os.kill(pid, SIGNAL)
            return True
    return False
