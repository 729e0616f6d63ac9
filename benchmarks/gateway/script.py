"""What a scripted source does with one request, said in the prompt, so that one process serves every load.

``pace 0.25 0.02 0.004`` in the prompt: the first token after 0.25 s, the others 0.02 s apart, each of these up to 4 ms
early or late. The number of tokens is the request's ``max_tokens``. Each token's text is the instant
it left the source, in nanoseconds of the monotonic clock, which all processes of a machine share: a reader that
subtracts it from its own instant of reading knows how long the token travelled.
"""

from __future__ import annotations

import random
import re
import time
from dataclasses import dataclass

_PACE = re.compile(rb"pace ([0-9.]+) ([0-9.]+) ([0-9.]+)")
STAMP = re.compile(rb"@(\d{16})")
STAMP_SIZE = 17


@dataclass(frozen=True)
class Pace:
    """Seconds. gap_s 0 is flat out."""

    first_s: float = 0.0
    gap_s: float = 0.0
    noise_s: float = 0.0

    def prompt(self) -> str:
        return f"pace {self.first_s:g} {self.gap_s:g} {self.noise_s:g}"

    def instants(self, tokens: int, began_s: float, rng: random.Random) -> list[float]:
        """When each token is due, on the clock of ``began_s``, in order: a late one delays no other."""
        first_s = began_s + self.first_s
        due = [first_s + n * self.gap_s for n in range(1, tokens)]
        if self.noise_s:
            due = sorted(max(first_s, at + rng.uniform(-self.noise_s, self.noise_s)) for at in due)
        return [first_s, *due]


def pace_of(data: bytes) -> Pace:
    """The pace said anywhere in a serialised request; flat out where none is."""
    found = _PACE.search(data)
    return Pace(*map(float, found.groups())) if found else Pace()


def stamp() -> bytes:
    """This instant, always of the same size."""
    return b"@%016d" % time.monotonic_ns()


def stamps(data: bytes) -> list[int]:
    """The instants in what was read, ns."""
    return [int(found) for found in STAMP.findall(data)]
