"""Say on a terminal what is being measured; nothing if standard error is none."""

from __future__ import annotations

import sys


def show(label: str) -> None:
    if sys.stderr.isatty():
        print(f"  measuring: {label}", file=sys.stderr, flush=True)
