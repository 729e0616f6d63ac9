"""Virtual environments of other projects' tools, each in its own folder under ``.cache/peers``, made on first use."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.child_process import ROOT
from contract.errors import EngineFailed, NotFound

FOLDER = ROOT / ".cache" / "peers"
TIMEOUT_S, RUN_TIMEOUT_S = 1800, 300
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


def loads(
    concurrencies: Sequence[int], rates: Sequence[float], concurrency: str, rate: str, *poisson: str
) -> list[tuple[str, list[str], int]]:
    """Return every load of a tool: name, options, requests in flight.

    concurrency, rate, poisson: the tool's options.
    """
    closed = [(f"concurrency {n}", [concurrency, str(n)], n) for n in concurrencies]
    return [*closed, *((f"rate {r:g}", [rate, f"{r:g}", *poisson], 1) for r in rates)]


def measure(tool: str, runs: Iterable[tuple[str, Sequence[str], Path]], environ: Mapping[str, str]) -> list[str]:
    """Run a tool's loads one after the other, each echoed first; return a line for each that failed.

    runs: name, argv, and the file for the output.
    """
    failures = []
    for name, argv, log in runs:
        print(shlex.join(argv), file=sys.stderr, flush=True)
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
        log.write_text(done.stdout + done.stderr)
        if done.returncode:
            text = " | ".join(_lines(done)[-2:])
            failures.append(f"{name}: {text or f'{tool} ended with code {done.returncode}'}")
    return failures


def report_of(
    tool: str, rows: Sequence[Sequence[object]], header: Sequence[str], failures: list[str], out: Path
) -> int:
    """Print a tool's table and failures; return 0. Raises EngineFailed without rows."""
    if not rows:
        raise EngineFailed(f"{tool} measured nothing: " + " | ".join(failures))
    print(report.table(rows, (tool, *header)))
    for failure in failures:
        print(f"  failed: {failure}")
    print(f"  written: {out}")
    return 0


def _lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotFound(f"`{' '.join(command)[:120]}` failed: {exc}") from exc
    if done.returncode:
        relevant = [line for line in _lines(done) if "error" in line.lower()] or _lines(done)[-3:]
        raise NotFound(f"`{' '.join(command)[:120]}` failed: {' | '.join(relevant)[-400:]}")
