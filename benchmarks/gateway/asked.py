"""One request of the load, as its reader saw it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from benchmarks.gateway import script


@dataclass
class Asked:
    """Instants in seconds on the monotonic clock. travelled_ns: of each token, from its source to us. gaps_ns: between
    tokens, as they were read. end: "ok", "refused" or what went wrong. hinted: a refusal said when to come back."""

    sent_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    ended_s: float = 0.0
    tokens: int = 0
    travelled_ns: list[int] = field(default_factory=list)
    gaps_ns: list[int] = field(default_factory=list)
    end: str = ""
    hinted: bool = False
    _last_ns: int = 0

    def read(self, data: bytes) -> None:
        """Some bytes came, with the instants of whole tokens in them."""
        sent = script.stamps(data)
        if not sent:
            return
        now_ns = time.monotonic_ns()
        if not self.tokens:
            self.first_s = now_ns / 1e9
        else:
            self.gaps_ns.append(now_ns - self._last_ns)
        self.gaps_ns += [0] * (len(sent) - 1)  # what was read together
        self._last_ns = now_ns
        self.tokens += len(sent)
        self.travelled_ns += [now_ns - one for one in sent]

    def over(self, end: str, hinted: bool = False) -> None:
        self.end, self.hinted, self.ended_s = end, hinted, time.monotonic()
