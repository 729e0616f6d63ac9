"""The running Python interpreter: how a user starts it, so that printed commands work, and ``python -m``."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path


def command() -> str:
    """Return the shell word that starts this interpreter from the working directory.

    ``python`` where that is this interpreter (an activated environment), else its path: relative below the working
    directory (``.venv/bin/python``), absolute elsewhere, quoted for a shell.
    """
    # Not resolved: a virtual environment's python links to one without its packages.
    this, found, here = Path(os.path.abspath(sys.executable)), shutil.which("python"), Path.cwd()
    if found and os.path.abspath(found) == str(this):
        return "python"
    return shlex.quote(str(this.relative_to(here) if this.is_relative_to(here) else this))


def end_quietly() -> None:
    """Let Ctrl-C end ``python -m`` without a traceback wherever it comes, also while modules are imported.

    "-m" is what sys.argv[0] holds while ``python -m`` imports the package; other programs keep their hook.
    """
    if sys.argv[:1] == ["-m"]:
        before = sys.excepthook
        sys.excepthook = lambda kind, *rest: None if kind is KeyboardInterrupt else before(kind, *rest)


def require(module: str) -> None:
    """Exit with a message if ``python -m module`` runs without our dependencies; silence gRPC's own log there.

    A program that imports ``module`` as a library gets the ImportError instead, and keeps the log.
    """
    end_quietly()
    if sys.argv[:1] == ["-m"]:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when gRPC is imported; its errors come as exceptions
        if importlib.util.find_spec("grpc") is None:
            sys.exit(
                f"{module}: the package 'grpc' is not installed for {sys.executable}; "
                f"run `make setup` once, then `.venv/bin/python -m {module}`"
            )
