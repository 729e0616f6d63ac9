"""Virtual environments of other projects' tools, each in its own folder under ``.cache/peers``, made on first use."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child_process import ROOT
from contract.errors import NotFound

FOLDER = ROOT / ".cache" / "peers"
TIMEOUT_S = 1800
_STAMP = ".installed"


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    installs: arguments of one pip install each. torch comes first and alone, or pip may install a build for CUDA.
    then: commands run in the folder afterwards; ``{python}`` is the environment's interpreter, ``{bin}`` its folder.
    """

    name: str
    installs: tuple[tuple[str, ...], ...]
    then: tuple[tuple[str, ...], ...] = ()

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def specification(self) -> str:
        """The content of a finished installation's stamp; a different one is installed again."""
        return "\n".join(" ".join(words) for words in (*self.installs, *self.then)) + "\n"

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    def ready(self) -> bool:
        stamp = self.folder / _STAMP
        return stamp.exists() and stamp.read_text() == self.specification

    def ensure(self) -> None:
        """Install unless that is done. Raises NotFound with the failing command and its output."""
        if self.ready():
            return
        print(f"installing {self.name} into {self.folder} (once)", file=sys.stderr, flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, "-m", "venv", str(self.folder)], FOLDER)
        python = str(self.program("python"))
        for packages in self.installs:
            _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], self.folder)
        for command in self.then:
            _run([word.format(python=python, bin=self.folder / "bin") for word in command], self.folder)
        (self.folder / _STAMP).write_text(self.specification)


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotFound(f"`{' '.join(command)[:120]}` failed: {exc}") from exc
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        relevant = [line for line in lines if "error" in line.lower()] or lines[-3:]
        raise NotFound(f"`{' '.join(command)[:120]}` failed: {' | '.join(relevant)[-400:]}")
