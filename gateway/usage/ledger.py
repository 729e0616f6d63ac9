"""The usage ledger of one gateway process: records in batches, off the event loop."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric

from gateway.config.settings import Settings
from gateway.usage.store import UsageRecord, UsageStore
from gateway.usage.writer import Writer


class UsageLedger:
    """``writer.add`` a record of each ended request. Needs ``settings.usage_db``."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        assert settings.usage_db is not None, "the ledger is off"
        self.path = settings.usage_db
        self.store = UsageStore(self.path, settings.usage_keep_days, settings.usage_sums_keep_days)
        self.writer: Writer[UsageRecord] = Writer(lambda batch: batch, self.store.add)
        registry.register(self)

    def describe(self) -> list[Metric]:
        return self.collect()

    def collect(self) -> list[Metric]:
        text = "Records of ended requests that were lost, since the usage database could not be written"
        return [CounterMetricFamily("trident_gateway_usage_lost", text, self.writer.lost)]

    async def close(self) -> None:
        """Write what was added."""
        await self.writer.aclose()
        self.store.close()
