"""How every program of this folder ends: what stops it from outside is one line, not a stack."""

import signal
import sys
from collections.abc import Callable

from contract.errors import TridentError

Notify = Callable[[str], None]  # takes a line on how far a program has come


def run(main: Callable[[], int], name: str) -> int:
    """The exit status of ``main``: 130 for Ctrl-C, 1 for an error of ours, and where disk or memory gives out."""
    try:
        return main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except TridentError as exc:
        print(f"{name}: {exc}", file=sys.stderr)
    except OSError as exc:  # a full or read-only disk, a file without permission
        where = f"{exc.filename}: " if exc.filename else ""
        print(f"{name}: {where}{exc.strerror or exc}", file=sys.stderr)
    except MemoryError:
        print(f"{name}: out of memory; take a smaller model or a machine with more", file=sys.stderr)
    return 1
