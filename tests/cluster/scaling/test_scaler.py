"""The scaler on real pages: what it decides, keeps, exports and prints."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cluster.scaling.scaler import Scaler
from cluster.scaling.settings import Settings
from contract.errors import InvalidArgument
from tests.cluster.scaling.test_reader import Pages, page, pages, session  # noqa: F401


@pytest.fixture
async def served(pages: Pages) -> AsyncIterator[Pages]:  # noqa: F811
    pages.texts = {"1": page(queued=1e6, speed=100)}
    yield pages


async def read(scaler: Scaler) -> None:
    async with session() as http:
        await scaler.reader.read(http)
    scaler.step()


def made(served: Pages, **more: object) -> Scaler:
    return Scaler(Settings(gateways=f"{served.base}/1", **more))


async def test_it_decides_for_every_pool_of_the_pages(served: Pages):
    scaler = made(served)
    await read(scaler)
    assert scaler.decisions["main"].wanted == 9
    served.texts["1"] = page(queued=0).replace('"main"', '"other"')
    await read(scaler)
    assert scaler.decisions["other"].wanted == 1
    assert scaler.decisions["main"].wanted == 9 and scaler.decisions["main"].rule == "unknown"


async def test_a_pool_that_is_gone_is_forgotten(served: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state, rules = tmp_path / "state.json", tmp_path / "rules.toml"
    rules.write_text("[pools.kept]\nmin_replicas = 2\n")
    scaler, registry = made(served, state=state, config=str(rules)), CollectorRegistry()
    registry.register(scaler)
    served.texts["1"] = page() + page().replace('"main"', '"kept"')
    await read(scaler)
    served.texts["1"] = page().replace('"main"', '"other"')
    await read(scaler)  # it was named a moment ago
    assert scaler.decisions.keys() == {"main", "kept", "other"}
    monkeypatch.setattr("cluster.scaling.scaler.FORGET_S", 0.0)
    scaler.reader._stale_s = 0.0  # a page that cannot be read may name it
    scaler.step()
    assert scaler.decisions.keys() == {"main", "kept", "other"}
    scaler.reader._stale_s = 1e9
    scaler.step()
    assert scaler.decisions.keys() == scaler.loads.keys() == {"kept", "other"}
    assert json.loads(state.read_text()).keys() == {"kept", "other"}
    assert registry.get_sample_value("trident_scaler_known", {"pool": "main"}) is None
    assert registry.get_sample_value("trident_scaler_known", {"pool": "kept"}) == 0


async def test_the_state_outlives_a_restart(served: Pages, tmp_path: Path):
    path = tmp_path / "state.json"
    scaler = made(served, state=path)
    await read(scaler)
    assert json.loads(path.read_text())["main"]["wanted"] == 9
    served.texts["1"] = 503
    again = made(served, state=path)
    await read(again)
    assert again.decisions["main"].wanted == 9 and again.decisions["main"].rule == "unknown"
    for broken in ("", "[]", "{", '{"main": 3}'):
        path.write_text(broken)
        await read(made(served, state=path))


async def test_a_state_that_cannot_be_kept_does_not_stop_it(served: Pages, tmp_path: Path, caplog):
    scaler = made(served, state=tmp_path / "missing" / "state.json")
    await read(scaler)
    assert scaler.decisions["main"].wanted == 9 and "the state cannot be kept" in caplog.text


async def test_of_what_was_never_known_there_is_no_decision(served: Pages):
    served.texts["1"] = 503
    scaler = made(served)
    await read(scaler)
    assert not scaler.decisions
    assert "1: 503, message='Service Unavailable'" in scaler.plan()


async def test_it_exports_what_it_decided(served: Pages):
    scaler, registry = made(served), CollectorRegistry()
    registry.register(scaler)
    assert generate_latest(registry)
    await read(scaler)
    sample = registry.get_sample_value
    pool = {"pool": "main"}
    assert sample("trident_scaler_wanted", pool) == 9 and sample("trident_scaler_starting", pool) == 8
    assert sample("trident_scaler_forecast", pool) == 0 and sample("trident_scaler_demand", pool) > 1000
    assert sample("trident_scaler_capacity", pool) == 100 and sample("trident_scaler_known", pool) == 1
    assert sample("trident_scaler_decision", {**pool, "rule": "load"}) == 1
    served.texts["1"] = 503
    scaler.reader._stale_s = 0.0
    await read(scaler)
    assert sample("trident_scaler_known", pool) == 0
    assert sample("trident_scaler_decision", {**pool, "rule": "unknown"}) == 1


async def test_the_plan_is_a_line_for_each_pool_with_its_reason(served: Pages):
    scaler = made(served)
    await read(scaler)
    head, line = scaler.plan().splitlines()
    assert head.split() == "pool ready starting queued running tokens/s a replica wanted because".split()
    assert line.split()[:5] == ["main", "1", "8", "1000000", "40"] and "1 → 9: " in line
    scaler.reader._stale_s = 0.0
    scaler.step()
    assert scaler.plan().splitlines()[1].split()[:5] == ["main", "?", "8", "?", "?"]


def test_wrong_settings_are_named():
    for field, values in (
        ("TRIDENT_SCALER_INTERVAL_S", {"interval_s": 0}),
        ("TRIDENT_SCALER_GRPC_PORT", {"grpc_port": 70_000}),
        ("gateways", {"gateways": "nowhere"}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            Scaler(Settings(**values))
        assert caught.value.field == field
