"""Pools and their shares in the configuration file, changed under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from gateway.config import configuration, pools
from gateway.config.pools import Pools
from gateway.config.settings import Settings
from gateway.routing.scoring import choose_pool
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import Running, gateway, until

START = Pools({"stable": "127.0.0.1:1", "canary": "127.0.0.1:2"})
REQUEST = {"model": "demo", "prompt": "x", "max_tokens": 8, "stream": True}


def found(tmp_path: Path, text: str, start: Pools = START) -> Pools:
    path = tmp_path / "gateway.toml"
    path.write_text(text, encoding="utf-8")
    return configuration.read(path, {}, start).pools


def test_a_pool_of_an_encoder_has_no_share_and_replaces_no_other(tmp_path: Path):
    encoder = '[pools]\nsmall = { kind = "encoder", replicas = "127.0.0.1:9" }'
    beside = found(tmp_path, encoder)
    assert beside.encoders == {"small"} and beside.shares == {"stable": 1.0, "canary": 1.0, "small": 0.0}
    single = found(tmp_path, encoder, Pools({"": "127.0.0.1:1"}))
    assert single.shares == {"": 1.0, "small": 0.0}
    weighed = found(tmp_path, f"{encoder}\nstable = 9\ncanary = 1")
    assert weighed.shares == {"stable": 9.0, "canary": 1.0, "small": 0.0} and weighed.encoders == {"small"}
    for wrong in ('{ kind = "encoder" }', '{ kind = "encoder", replicas = "a:1", weight = 1 }', '{ kind = "other" }'):
        with pytest.raises(InvalidArgument, match="pools.small"):
            found(tmp_path, f"[pools]\nsmall = {wrong}")


def test_the_file_wins_over_the_environment_and_says_only_what_it_says(tmp_path: Path):
    assert found(tmp_path, "").shares == {"stable": 1.0, "canary": 1.0}
    assert found(tmp_path, "[pools]\nstable = 95\ncanary = 5").shares == {"stable": 95.0, "canary": 5.0}
    weighed = Pools(START.sources, {"stable": 95.0, "canary": 5.0})
    assert found(tmp_path, "[pools]\ncanary = 20", weighed).shares == {"stable": 95.0, "canary": 20.0}
    new = found(tmp_path, '[pools.new]\nweight = 1\nreplicas = "127.0.0.1:3"', weighed)
    assert new.shares == {"stable": 95.0, "canary": 5.0, "new": 1.0} and new.sources["new"] == "127.0.0.1:3"
    moved = found(tmp_path, '[pools]\ncanary = { replicas = "127.0.0.1:4" }', weighed)
    assert moved.shares == weighed.shares and moved.sources["canary"] == "127.0.0.1:4"
    # Named pools take the place of the one without a name.
    assert found(tmp_path, '[pools]\na = { replicas = "127.0.0.1:4" }', Pools({"": "127.0.0.1:8001"})).shares == {
        "a": 1
    }


@pytest.mark.parametrize(("text", "message"), [
    ("[pools]\nold = 5\nstable = 1\ncanary = 1", "of TRIDENT_GATEWAY_REPLICAS, which names stable, canary"),
    ("[pools]\ncanary = 5", "pools.stable: has no weight while canary has one"),
    ("[pools]\nstable = 0\ncanary = 0", "pools: all weights are 0"),
    ("[pools]\nstable = -1\ncanary = 1", "pools.stable.weight: must be greater than or equal to 0"),
    ("[pools]\nstable = inf\ncanary = 1", "pools.stable.weight: must be"),
    ("[pools]\nstable = '9'\ncanary = 1", "pools.stable"),
    ("[pools]\nstable = true\ncanary = 1", "pools.stable"),
    ("[pools]\nstable = { weigth = 3 }", "pools.stable.weigth: is not known: must be one of weight, replicas, kind"),
    ("[pools]\nstable = { replicas = 'a:b:c' }", "pools.stable.replicas"),
    ("[pools]\nstable = { replicas = '' }", "pools.stable.replicas"),
    ("[shadow]\npool = 'next'\nfraction = 0.1", "shadow.pool: must be one of the pools"),
])  # fmt: skip
def test_what_cannot_be_is_named_with_what_is_allowed(tmp_path: Path, text: str, message: str):
    with pytest.raises(InvalidArgument) as caught:
        found(tmp_path, text)
    assert message in str(caught.value)


def test_the_pools_of_the_environment():
    assert pools.of(Settings(replicas="a=x:1;b=y:1")).shares == {"a": 1.0, "b": 1.0}
    assert pools.of(Settings(replicas="a=x:1;b=y:1", pool_weights={"a": "3"})).shares == {"a": 3.0, "b": 0.0}


@given(st.integers(1, 99), st.integers(1, 99), st.integers(0, 2**32))
def test_sessions_move_only_towards_the_pool_that_grows(before: int, after: int, session: int):
    there = {"stable": True, "canary": True}
    first, then = (
        choose_pool({"stable": 100.0 - canary, "canary": float(canary)}, "", there, None, str(session))
        for canary in (before, after)
    )
    assert first == then or then == ("canary" if after > before else "stable")


async def rewritten(running: Running, text: str) -> None:
    running.service.configuration.path.write_text(text, encoding="utf-8")
    await running.service.configuration.reload()
    assert not running.service.configuration.problem


@pytest.mark.slow
async def test_shares_follow_the_file_and_streams_under_way_are_not_touched():
    script = Script((" a",) * 8, gap_s=0.05)
    async with FakeReplica(lambda seen: script) as stable, FakeReplica(lambda seen: script) as canary:
        where = f"stable={stable.url};canary={canary.url}"
        config = "[pools]\nstable = 1\ncanary = 0\n"
        async with gateway(stable, canary, replicas=where, config=config) as running:
            wholes: list[asyncio.Future] = []

            async def stream(session: aiohttp.ClientSession, number: int) -> str:
                body = {**REQUEST, "prompt": f"x {number}"}
                async with session.post(f"{running.base_url}/v1/completions", json=body) as answer:
                    return await answer.text()

            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                counts = []
                for weights in ("", "[pools]\nstable = 1\ncanary = 1\n", "[pools]\nstable = 0\ncanary = 1\n"):
                    if weights:
                        await rewritten(running, weights)
                    before = Counter(stable=stable.counts.started, canary=canary.counts.started)
                    wholes += [asyncio.ensure_future(stream(session, n)) for n in range(40)]
                    total = sum(before.values()) + 40
                    await until(lambda total=total: stable.counts.started + canary.counts.started == total)
                    counts.append(Counter(stable=stable.counts.started, canary=canary.counts.started) - before)
                texts = await asyncio.gather(*wholes)
            assert all(text.count('"text":" a"') == 8 and text.endswith("[DONE]\n\n") for text in texts)
            assert counts[0] == {"stable": 40} and counts[2] == {"canary": 40}
            assert 5 <= counts[1]["canary"] <= 35  # of 40 drawn with 1/2: less or more comes once in 10^6


@pytest.mark.slow
async def test_pools_come_and_go_with_the_file_and_what_runs_there_ends_well():
    slow = Script((" a",) * 20, gap_s=0.02)
    async with FakeReplica(lambda seen: slow) as old, FakeReplica() as new:
        config = f'[pools]\nblue = {{ weight = 1, replicas = "{old.url}" }}\n'
        async with gateway(old, new, replicas=old.url, config=config) as running:
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{running.base_url}/v1/completions", json=REQUEST) as answer:
                    await until(lambda: old.counts.running == 1)
                    await rewritten(running, f'[pools]\ngreen = {{ weight = 1, replicas = "{new.url}" }}\n')
                    await until(lambda: [one.pool for one in running.service.replicas.ready()] == ["green"])
                    started = old.counts.started
                    assert (await running.post("/v1/completions", {**REQUEST, "stream": False}))[0] == 200
                    assert old.counts.started == started and new.counts.started == 1
                    text = await answer.text()
            assert text.count('"text":" a"') == 20 and text.endswith("[DONE]\n\n")
            assert (await running.metrics())[
                'trident_gateway_generations_total{end="stop",pool="blue",source="engine"}'
            ] == 1
            # A file that names a pool does not exist changes nothing.
            running.service.configuration.path.write_text("[pools]\nred = 1\n")
            await running.service.configuration.reload()
            assert "pools.red: must have replicas" in running.service.configuration.problem
            assert (await running.post("/v1/completions", {**REQUEST, "stream": False}))[0] == 200
