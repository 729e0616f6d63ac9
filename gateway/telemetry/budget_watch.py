"""Tell callers, the log and the metrics where the budgets of days and months stand."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric

from gateway.admission.budgets import Standing

WARNING = "x-trident-budget-warning"
MAX_SERIES = 500  # budgets with a gauge of their own; further ones have none
_LOG = logging.getLogger(__name__)


class BudgetWatch:
    """What is reserved counts as used. A warning is logged once by each gateway process, and once more at the limit."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._used: dict[tuple[str, str], tuple[float, float]] = {}  # (level, limit): used part, end in Unix time
        self._told: dict[str, float] = {}  # bucket: part that was logged
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
            name = demand.level, demand.limit
            if name in self._used or len(self._used) < MAX_SERIES or self._forget():
                self._used[name] = part, time.time() + demand.left_s
            if part >= demand.warn_at:
                told.append(f"{demand.level} {demand.limit} {100 * part:.0f}%")
                self._log(standing, part)
        return {WARNING: ", ".join(told)} if told else {}

    def _log(self, standing: Standing, part: float) -> None:
        demand = standing.demand
        reached = 1.0 if part >= 1.0 else demand.warn_at
        if self._told.get(demand.bucket, 0.0) >= reached:
            return
        if len(self._told) > 10 * MAX_SERIES:
            self._told.clear()
        self._told[demand.bucket] = reached
        self._warnings.labels(demand.limit, "limit" if reached == 1.0 else "warn_at").inc()
        fields = {"level": demand.level, "limit": demand.limit, "used_part": round(part, 4)}
        _LOG.warning("a budget is used up to %.0f %%", 100 * part, extra={"fields": fields})

    def _forget(self) -> bool:
        """Forget the budgets of periods that are over; return whether there is room."""
        now_s = time.time()
        self._used = {name: used for name, used in self._used.items() if used[1] > now_s}
        return len(self._used) < MAX_SERIES

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        self._forget()
        text = "Used and reserved part of a budget of the current day or month, as of its latest request"
        gauge = GaugeMetricFamily("trident_gateway_budget_used_ratio", text, labels=("level", "limit"))
        for name, (part, _) in self._used.items():
            gauge.add_metric(name, part)
        return [gauge]
