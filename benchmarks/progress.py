"""One line on the terminal that tells how a run goes; nothing where nobody watches."""

from __future__ import annotations

import sys
from typing import TextIO

from benchmarks.driver import Progress


class ProgressLine:
    """Call it with every Progress; leave the block to wipe the line."""

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
        pace = (now.tokens - before.tokens) / max(1e-9, now.elapsed_s - before.elapsed_s)
        self._last = now
        failed = f"  {now.failed} failed" if now.failed else ""
        counts = f"{now.running} under way  {now.done} done{failed}"
        self._write(f"  {self._label}  {now.elapsed_s:5.1f} s  {counts}  {pace:,.0f} tok/s")

    def _write(self, text: str) -> None:
        if self._output.isatty():
            self._output.write("\r" + text.ljust(self._width))
            self._output.flush()
            self._width = len(text)
