"""Tell callers, the log and the metrics where the budgets of days and months stand."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from cachetools import LRUCache, TLRUCache
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric

from gateway.admission.budgets import Standing

WARNING = "x-trident-budget-warning"
MAX_SERIES = 500  # budgets with a gauge; those used longest ago lose theirs
_LOG = logging.getLogger(__name__)


class BudgetWatch:
    """What is reserved counts as used. A warning is logged once by each gateway process, and once more at the limit."""

    def __init__(self, registry: CollectorRegistry) -> None:
        # (level, limit): used part, end in Unix time
        self._used: TLRUCache[tuple[str, str], tuple[float, float]] = TLRUCache(
            MAX_SERIES, ttu=lambda name, used, now_s: used[1], timer=lambda: time.time()
        )
        self._told: LRUCache[str, float] = LRUCache(10 * MAX_SERIES)  # bucket: part that was logged
        text = "Budgets of a day or month that passed warn_at, or their limit, by limit"
        self._warnings = Counter("trident_gateway_budget_warnings", text, ("limit", "at"), registry=registry)
        registry.register(self)

    def observe(self, standings: Sequence[Standing]) -> Mapping[str, str]:
        """Take note of the budgets of a reservation; return the response's headers."""
        told = []
        for standing in standings:
            demand = standing.demand
            if not demand.left_s:
                continue
            part = 1.0 - standing.balance / demand.capacity
            self._used[demand.level, demand.limit] = part, time.time() + demand.left_s
            if part < demand.warn_at:
                continue
            told.append(f"{demand.level} {demand.limit} {100 * part:.0f}%")
            reached = 1.0 if part >= 1.0 else demand.warn_at
            if self._told.get(demand.bucket, 0.0) < reached:
                self._told[demand.bucket] = reached
                self._warnings.labels(demand.limit, "limit" if reached == 1.0 else "warn_at").inc()
                fields = {"budget": demand.level, "limit": demand.limit, "used_part": round(part, 4)}
                _LOG.warning("a budget is used up to %.0f %%", 100 * part, extra={"fields": fields})
        return {WARNING: ", ".join(told)} if told else {}

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        text = "Used and reserved part of a budget of the current day or month, as of its latest request"
        gauge = GaugeMetricFamily("trident_gateway_budget_used_ratio", text, labels=("level", "limit"))
        for name, (part, _) in list(self._used.items()):
            gauge.add_metric(name, part)
        return [gauge]
