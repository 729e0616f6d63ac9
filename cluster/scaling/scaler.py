"""The law at work for every pool: decides at each reading, remembers, exports and tells what it decided."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from cluster.scaling.law import Load, decide
from cluster.scaling.reader import Reader
from cluster.scaling.rules import RulesFile
from cluster.scaling.settings import Settings

_LOG = logging.getLogger(__name__)
FORGET_S = 60.0  # a pool is forgotten that no rule and no page named for so long, while all pages were read
_GAUGES = {
    "wanted": "Replicas that the pool needs",
    "starting": "Replicas that were wanted and are not ready",
    "forecast": "Work expected when a replica ordered now would serve, tokens of decoding per second",
    "demand": "The forecast, and what waits too long, tokens of decoding per second",
    "capacity": "Work that one replica does, tokens of decoding per second; 0 if unknown",
}


class Scaler:
    """Decides for every pool that the gateways or the rules name. Also a Prometheus collector. decisions: the latest of
    each pool of which anything was ever known. loads: what was known then, None for nothing."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._rules = settings, RulesFile(settings.config)
        told = settings.consoles, settings.admin_token_file
        self.reader = Reader(settings.gateways.split(","), settings.stale_s, *told)
        self.decisions = self.reader.decisions
        self.loads: dict[str, Load | None] = {}
        self._states: dict[str, Any] = self._kept()
        self._named_s: dict[str, float] = {}  # when each pool was named, or may have been

    async def run(self) -> None:
        """Read and decide until cancelled."""
        await self.reader.watch(self.step, self._settings.interval_s)

    async def show(self, watch: bool) -> int:
        """Print the plan after two readings, since the first has no rates, or after each; return 1 if nothing is
        known."""
        left = asyncio.Queue[None]()
        reading = asyncio.create_task(self.reader.watch(lambda: left.put_nowait(None), self._settings.interval_s))
        try:
            for number in range(sys.maxsize if watch else 2):
                await left.get()
                self.step()
                if watch or number:
                    print(self.plan(), flush=True)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        return 0 if self.decisions else 1

    def step(self) -> None:
        """Decide for every pool by the latest reading."""
        self._rules.refresh()
        pools, now_s = self.reader.pools(), time.monotonic()
        for pool in sorted({*pools, *self._states}):
            if pool in pools or pool in self._rules.rules.pools or not self.reader.complete:
                self._named_s[pool] = now_s
            elif now_s - self._named_s.setdefault(pool, now_s) >= FORGET_S:
                _LOG.info("pool %r: no rule and no gateway names it any more", pool)
                for known in (self.decisions, self.loads, self._states, self._named_s):
                    known.pop(pool, None)
                continue
            load = self.loads[pool] = self.reader.load(pool)
            decision = decide(self._rules.rules.of(pool), load, self._states.get(pool), time.time())
            before = self.decisions.get(pool)
            if before is None or (before.wanted, before.rule) != (decision.wanted, decision.rule):
                _LOG.info("pool %r: %s", pool, decision.reason)
            self.decisions[pool], self._states[pool] = decision, decision.state
        if self._settings.state is not None:
            partial = self._settings.state.with_suffix(".partial")
            try:
                partial.write_text(json.dumps(self._states), "utf-8")
                os.replace(partial, self._settings.state)
            except OSError as exc:
                _LOG.error("the state cannot be kept: %s", exc)

    def _kept(self) -> dict[str, Any]:
        try:
            kept = json.loads(self._settings.state.read_text("utf-8")) if self._settings.state else {}
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}

    def collect(self) -> Iterator[Metric]:
        decisions = [*self.decisions.items()]  # in another thread than step
        for name, text in _GAUGES.items():
            family = GaugeMetricFamily(f"trident_scaler_{name}", text, labels=("pool",))
            for pool, decision in decisions:
                family.add_metric((pool,), getattr(decision, name))
            yield family
        rule = GaugeMetricFamily("trident_scaler_decision", "1 for what decided last", labels=("pool", "rule"))
        known = GaugeMetricFamily("trident_scaler_known", "1 if every gateway told the load", labels=("pool",))
        for pool, decision in decisions:
            rule.add_metric((pool, decision.rule), 1)
            known.add_metric((pool,), (load := self.loads.get(pool)) is not None and load.complete)
        yield from (rule, known)

    def plan(self) -> str:
        """Return the plan for people: a line for each pool, and for each page that cannot be read."""
        rows = [("pool", "ready", "starting", "queued", "running", "tokens/s", "a replica", "wanted", "because")]
        for pool, decision in self.decisions.items():
            load = self.loads[pool]
            ready = queued = running = demand = "?"
            if load is not None:
                ready, demand = str(load.ready), f"{decision.demand:.0f}"
                queued, running = (f"{sum(tokens.values()):.0f}" for tokens in (load.queued, load.running))
            capacity = f"{decision.capacity:.0f}" if decision.capacity else "?"
            row = (pool or "''", ready, str(decision.starting), queued, running, demand, capacity, str(decision.wanted))
            rows.append((*row, decision.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines + [f"{url}: {problem}" for url, problem in self.reader.problems().items()])
