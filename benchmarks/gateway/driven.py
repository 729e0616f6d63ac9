"""A plan put on a door by a process of its own, and what the contender behind the door used meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gateway.contenders import Contender
from benchmarks.gateway.lifetime import first_line, process
from benchmarks.gateway.load import Plan, Seen
from contract.errors import EngineFailed

LOOK_S = 0.25
PATIENCE_S = 240.0


@dataclass
class Driven:
    """cpu_s and peak_rss_bytes: of the contender's process tree, while the plan ran. highest: of each watched gauge."""

    seen: Seen
    cpu_s: float = 0.0
    rss_before_bytes: int = 0
    peak_rss_bytes: int = 0
    highest: dict[str, float] = field(default_factory=dict)
    alive: bool = True

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.cpu_s / self.seen.tokens if self.seen.tokens else float("nan")

    def ended(self, end: str) -> int:
        return self.seen.ends.get(end, 0)

    @property
    def errors(self) -> dict[str, int]:
        return {end: count for end, count in self.seen.ends.items() if end not in ("ok", "refused")}


def drive(plan: Plan, contender: Contender | None, logs: Path, gauges: tuple[str, ...] = ()) -> Driven:
    """Runs to the plan's end. Without a contender, nothing but what the load saw."""
    [found] = drive_all([plan], contender, logs, gauges)
    return found


def drive_all(plans: list[Plan], contender: Contender | None, logs: Path, gauges: tuple[str, ...] = ()) -> list[Driven]:
    """Several plans at once, a process each; what the contender used is of all of them together, in each."""
    with ExitStack() as stack:
        loads = []
        for n, plan in enumerate(plans):
            log = logs / f"load-{n}.log"
            one = stack.enter_context(process([sys.executable, "-m", "benchmarks.gateway.load"], log))
            one.stdin.write(plan.to_json() + "\n")
            one.stdin.flush()
            loads.append((one, log))
        for one, log in loads:
            first_line(one, log)
        before = contender.use() if contender else None
        peak, highest = 0, dict.fromkeys(gauges, 0.0)
        give_up_s = time.monotonic() + PATIENCE_S
        answers = [_Answer(one) for one, _ in loads]
        while not all(answer.whole for answer in answers):
            if time.monotonic() > give_up_s:
                raise EngineFailed(f"the load did not end within {PATIENCE_S:g} s")
            time.sleep(LOOK_S)
            if contender is not None and contender.alive():
                peak = max(peak, contender.use().rss_bytes)
                for name in gauges:
                    highest[name] = max(highest[name], contender.gauge(name))
        after = contender.use() if contender and contender.alive() else before
        seen = [Seen(**json.loads(answer.line)) for answer in answers]
    if before is None:
        return [Driven(one) for one in seen]
    used_s, alive = after.cpu_s - before.cpu_s, contender.alive()
    return [Driven(one, used_s, before.rss_bytes, peak, highest, alive) for one in seen]


class _Answer:
    """The second line of a load, read beside."""

    def __init__(self, one: subprocess.Popen[str]) -> None:
        self.line, self.whole = "", False
        self._one = one
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        self.line = self._one.stdout.readline()
        self.whole = True
