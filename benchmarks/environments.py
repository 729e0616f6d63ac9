"""Environments of other people's tools, each in a folder of its own under ``.cache/peers``, made on first use."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.served import ROOT
from contract.errors import NotFound

FOLDER = ROOT / ".cache" / "peers"
PATIENCE_S = 1800
_STAMP = ".installed"


@dataclass(frozen=True)
class Environment:
    """A virtual environment and what pip puts into it, one command for each of ``installs``.

    The order matters: torch comes first, alone, or pip may bring a build for CUDA. ``then``: commands run in the
    folder afterwards; ``{python}`` stands for the environment's interpreter, ``{bin}`` for the folder it is in.
    """

    name: str
    installs: tuple[tuple[str, ...], ...]
    then: tuple[tuple[str, ...], ...] = ()

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def wanted(self) -> str:
        """What the stamp of a finished installation says; another one is made again."""
        return "\n".join(" ".join(words) for words in (*self.installs, *self.then)) + "\n"

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    def ready(self) -> bool:
        stamp = self.folder / _STAMP
        return stamp.exists() and stamp.read_text() == self.wanted

    def ensure(self) -> None:
        """Installs unless that is done. Raises NotFound with the failing command and its last words."""
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
        (self.folder / _STAMP).write_text(self.wanted)


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotFound(f"`{' '.join(command)[:120]}` did not work: {exc}") from exc
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        told = [line for line in lines if "error" in line.lower()] or lines[-3:]
        raise NotFound(f"`{' '.join(command)[:120]}` failed: {' | '.join(told)[-400:]}")
