"""How a user starts the running Python interpreter, so that the commands we print work as printed."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path


def command(executable: str | None = None, directory: str | None = None, path: str | None = None) -> str:
    """Return the shell word that starts this interpreter from the working directory.

    ``python`` where that is this interpreter (an activated environment), else its path: relative below the working
    directory (``.venv/bin/python``), absolute elsewhere, quoted for a shell.

    executable: the interpreter, default ``sys.executable``.
    directory: the working directory, default the current one.
    path: value of ``PATH`` to look ``python`` up in, default the environment's.
    """
    executable = executable or sys.executable
    found = shutil.which("python", path=path)
    # Not resolved: a virtual environment's python links to one without its packages.
    if found and os.path.abspath(found) == os.path.abspath(executable):
        return "python"
    inside = Path(os.path.abspath(executable))
    here = Path(directory or os.getcwd())
    return shlex.quote(str(inside.relative_to(here) if inside.is_relative_to(here) else inside))


def end_quietly() -> None:
    """Let Ctrl-C end ``python -m`` without a traceback wherever it comes, also while modules are imported.

    "-m" is what sys.argv[0] holds while ``python -m`` imports the package; other programs keep their hook.
    """
    if sys.argv[:1] == ["-m"]:
        before = sys.excepthook
        sys.excepthook = lambda kind, *rest: None if kind is KeyboardInterrupt else before(kind, *rest)


def require(package: str, module: str) -> None:
    """Exit with a message if ``python -m module`` runs under an interpreter without our dependencies.

    A program that imports ``module`` as a library gets the ImportError instead.

    package: a dependency, by the name it is imported by.
    """
    end_quietly()
    if sys.argv[:1] == ["-m"] and importlib.util.find_spec(package) is None:
        sys.exit(
            f"{module}: the package {package!r} is not installed for {sys.executable}; "
            f"run `make setup` once, then `.venv/bin/python -m {module}`"
        )
