"""Which Python runs which command: torch and ModelOpt have an environment of their own, and serving has neither."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from build.base import layout
from build.recipe import commands
from contract.errors import Unavailable

BUILD_PYTHON = layout.ROOT / ".venv-build" / "bin" / "python"
NEEDS_TORCH = ("build.quantise.quantize",)
PYTHONS = ("python", commands.PYTHON, commands.BUILD_PYTHON)


def run_by(argv: Sequence[str]) -> list[str]:
    """A plan's Python command as it runs here, with this interpreter or the build environment's. Raises Unavailable
    where it needs torch and ModelOpt and there are none."""
    if argv[0] not in PYTHONS:
        return list(argv)
    python = build_python() if argv[2] in NEEDS_TORCH else Path(sys.executable)
    return [str(layout.relative(python)), *argv[1:]]


def build_python() -> Path:
    """The interpreter that has ModelOpt: .venv-build's, or this one where it has it (in the image, for one)."""
    if BUILD_PYTHON.exists():
        return BUILD_PYTHON
    if importlib.util.find_spec("modelopt") is not None:
        return Path(sys.executable)
    needed = "torch, ModelOpt and optimum-intel are needed, in an environment of their own"
    raise Unavailable(f"{needed}: run `make setup-build` once")
