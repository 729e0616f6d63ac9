"""How every program of this folder ends: what stops it from outside is one line, not a stack."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from contract.errors import TridentError

INTERRUPTED = 128 + signal.SIGINT


def run(main: Callable[[], int], name: str) -> int:
    """The exit status of ``main``: 130 for Ctrl-C, 1 for an error of ours, and where disk or memory gives out."""
    try:
        return main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except TridentError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
    except OSError as exc:  # a full or read-only disk, a file without permission
        where = f"{exc.filename}: " if exc.filename else ""
        print(f"{name}: {where}{exc.strerror or exc}", file=sys.stderr)
    except MemoryError:
        print(f"{name}: out of memory; take a smaller model or a machine with more", file=sys.stderr)
    return 1
