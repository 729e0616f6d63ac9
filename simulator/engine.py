"""The model of an engine on the simulation's clock."""

from __future__ import annotations

import asyncio
import math
import random

from cluster.plan import engine
from cluster.plan.engine import Sequence
from simulator.scenario import Pool


class Engine(engine.Engine):
    """One engine of a pool, whose spans end by themselves."""

    def __init__(self, pool: Pool, rng: random.Random) -> None:
        super().__init__(pool.kind, pool.send_s, pool.noise, rng)
        self.pool, self._loop = pool, asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, sequence: Sequence, now_s: float) -> None:
        super().submit(sequence, now_s)
        self._arm()

    def cancel(self, sequence: Sequence, now_s: float) -> None:
        super().cancel(sequence, now_s)
        self._arm()

    def stop(self) -> None:
        super().stop()
        self._arm()

    def resume(self, now_s: float) -> None:
        super().resume(now_s)
        self._arm()

    def finish(self) -> None:
        self._timer = None
        super().finish()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            if self._timer.when() == self.due_s:
                return
            self._timer.cancel()
        self._timer = None if self.due_s == math.inf else self._loop.call_at(self.due_s, self.finish)
