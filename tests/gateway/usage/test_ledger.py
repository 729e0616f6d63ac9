"""A closed ledger has written everything, and its metric says what was lost."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from gateway.config.settings import Settings
from gateway.usage import store
from gateway.usage.ledger import UsageLedger
from gateway.usage.store import Filter
from tests.gateway.usage.test_store import NOW_S, record


async def test_a_closed_ledger_has_written_everything(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    ledger = UsageLedger(Settings(usage_db=tmp_path / "usage", usage_keep_days=30_000), registry)
    for tokens in range(50):
        ledger.writer.add(record(tokens=tokens))
    await ledger.close()
    with store.reading(tmp_path / "usage") as db:
        assert [one.prompt_tokens for _, one in store.records(db, Filter(0, 2 * NOW_S), 0, 99)] == list(range(50))
    assert b"trident_gateway_usage_lost_total 0.0" in generate_latest(registry)
