"""Show the progress of a run in one terminal line; nothing if the output is not a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from benchmarks.driver import Progress


class ProgressLine:
    """A context manager; call it with every Progress. Leaving the block clears the line."""

    def __init__(self, label: str, output: TextIO = sys.stderr) -> None:
        self._label, self._output = label, output
        self._last: Progress | None = None
        self._width = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._write("")
        if self._output.isatty():
            self._output.write("\r")

    def __call__(self, now: Progress) -> None:
        before = self._last or Progress(0.0, 0, 0, 0, 0)
        rate = (now.tokens - before.tokens) / max(1e-9, now.elapsed_s - before.elapsed_s)
        self._last = now
        failed = f"  {now.failed} failed" if now.failed else ""
        counts = f"{now.running} in flight  {now.done} done{failed}"
        self._write(f"  {self._label}  {now.elapsed_s:5.1f} s  {counts}  {rate:,.0f} tok/s")

    def _write(self, text: str) -> None:
        if self._output.isatty():
            self._output.write("\r" + text.ljust(self._width))
            self._output.flush()
            self._width = len(text)
