"""The pace of a scripted source, carried in the prompt, so that one process serves every load.

``pace 0.25 0.02 0.004`` in the prompt: the first token after 0.25 s, the others 0.02 s apart, each of these up to 4 ms
early or late. Each token's text is the instant at which the source wrote it, in nanoseconds of the monotonic clock,
which all processes of a machine share: the reader's own instant minus it is the token's transit time.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass

from benchmarks.record import Record

_PACE = re.compile(rb"pace ([0-9.]+) ([0-9.]+) ([0-9.]+)")
STAMP = re.compile(rb"@(\d{19})")  # as many digits as 63 bits need
STAMP_SIZE = 20


@dataclass(frozen=True)
class Pace:
    """Seconds to the first token, between tokens, and of jitter; gap_s 0 is as fast as possible."""

    first_s: float = 0.0
    gap_s: float = 0.0
    noise_s: float = 0.0

    def prompt(self) -> str:
        return f"pace {self.first_s:g} {self.gap_s:g} {self.noise_s:g}"

    def instants(self, tokens: int, began_s: float, rng: random.Random) -> list[float]:
        """Return when each token is due, on the clock of ``began_s``, in order: a late token delays no other."""
        first_s = began_s + self.first_s
        due = [first_s + n * self.gap_s for n in range(1, tokens)]
        if self.noise_s:
            due = sorted(max(first_s, at + rng.uniform(-self.noise_s, self.noise_s)) for at in due)
        return [first_s, *due]


def pace_of(data: bytes) -> Pace:
    """Find the pace anywhere in a serialized request; as fast as possible if there is none."""
    found = _PACE.search(data)
    return Pace(*map(float, found.groups())) if found else Pace()


def stamp() -> bytes:
    """Return this instant as STAMP_SIZE bytes."""
    return b"@%019d" % time.monotonic_ns()


def record_tokens(data: bytes, record: Record) -> int:
    """Add the tokens whose stamps are in ``data`` to the record, as one message; return the offset behind the last."""
    if not (stamps := list(STAMP.finditer(data))):
        return 0
    now_ns = time.monotonic_ns()
    record.messages.append((now_ns / 1e9, len(stamps)))
    record.transit_s += [(now_ns - int(stamp[1])) / 1e9 for stamp in stamps]
    return stamps[-1].end()


@dataclass(frozen=True)
class PacedPrompts:
    """A source of prompts that all carry one pace."""

    pace: Pace

    def text(self, rng: random.Random, tokens: int, prefix: str = "") -> str:
        return self.pace.prompt()
