"""Run another project's load generator under a load, and read the figures that it wrote."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child_process import process
from contract.errors import EngineFailed

START_S = 300.0  # that a tool may take besides its load
TOKENS = (128, 64)  # of a prompt and of an answer
Found = dict[str, float]  # by the figure's name: requests/s, tokens/s; ms: TTFT, ITL and latency p50 and p95


@dataclass(frozen=True)
class Tool:
    """A load generator and the server that it is to load.

    concurrency, rate: options in front of a closed loop's requests in flight and of an open loop's requests per second;
        evenly: those of an open loop besides, for equal distances.
    command: returns the argv of the load's options, the number of requests, the seed, and the folder for its files.
    read: returns what it wrote there. Raises OSError, LookupError or ValueError if that is no result.
    """

    name: str
    concurrency: str
    rate: str
    evenly: tuple[str, ...]
    command: Callable[[Sequence[str], int, int, Path], list[str]]
    read: Callable[[Path], Found]
    environ: Mapping[str, str]

    def measure(self, load: Sequence[str], requests: int, seed: int, folder: Path, limit_s: float = START_S) -> Found:
        """Run one load. Raises EngineFailed with the end of its output, or if it takes longer than ``limit_s``."""
        folder.mkdir(parents=True, exist_ok=True)
        argv, log = self.command(load, requests, seed, folder), folder / "output.txt"
        print(shlex.join(argv), file=sys.stderr, flush=True)
        # Also what it started itself ends with it.
        with process(argv, log, self.environ, pipe_output=False) as child:
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired as error:
                raise EngineFailed(f"{self.name} took more than {limit_s:g} s") from error
        if code:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise EngineFailed(" | ".join(lines[-2:]) or f"{self.name} ended with code {code}")
        try:
            return self.read(folder)
        except (OSError, LookupError, ValueError) as error:
            raise EngineFailed(f"{self.name} wrote no result: {error!r}; see {log}") from error
