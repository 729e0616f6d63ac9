"""Virtual environments of other projects' tools, each in its own folder under ``.cache/peers``, made on first use."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child_process import ROOT, last_lines, stop
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
        """The content of a finished installation's stamp, a line a step; a different one is installed again."""
        return "\n".join(" ".join(words) for words in (*self.installs, *self.then)) + "\n"

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name

    def ready(self) -> bool:
        stamp = self.folder / _STAMP
        return stamp.exists() and stamp.read_text() == self.specification

    def ensure(self) -> None:
        """Install what is not done, from the step on that failed. Raises NotFound with that command and its output."""
        if self.ready():
            return
        print(f"installing {self.name} into {self.folder} (once)", file=sys.stderr, flush=True)
        stamp, python = self.folder / _STAMP, str(self.program("python"))
        done = stamp.read_text() if stamp.exists() else ""
        if not done or not self.specification.startswith(done):
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            _run([sys.executable, "-m", "venv", str(self.folder)], FOLDER)
            done = ""
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        commands = [*((*pip, *packages) for packages in self.installs), *self.then]
        steps = zip(commands, self.specification.splitlines(keepends=True), strict=True)
        for command, line in itertools.islice(steps, done.count("\n"), None):
            _run([word.format(python=python, bin=self.folder / "bin") for word in command], self.folder)
            with stamp.open("a") as finished:
                finished.write(line)


def _run(command: Sequence[str], folder: Path) -> None:
    log = folder / "installation.log"
    try:
        with log.open("w") as output:
            child = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=output, text=True, start_new_session=True
            )
            try:
                code = child.wait(TIMEOUT_S)
            finally:
                stop(child)  # also what it started itself, as a compiler
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotFound(f"`{' '.join(command)[:120]}` failed: {exc}") from exc
    if code:
        raise NotFound(f"`{' '.join(command)[:120]}` failed: {last_lines(log)}")
