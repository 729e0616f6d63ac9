"""A rolling upgrade: no worker is without a replica between the last one of a pool and its successor."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.hub import Hub
from gateway.admission.hub_link import HubLink
from gateway.routing import succession
from gateway.routing.replicas import Replicas
from tests.fakes.replica import FakeReplica
from tests.gateway.api.test_admin import REQUEST, TOKEN, call
from tests.gateway.running import Running, gateway, until


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Of a gateway at which replicas register."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return {"admin_token_file": path, "replicas": "registered"}


def used(running: Running) -> list[str]:
    return [replica.url for replica in running.service.replicas.ready()]


async def test_the_last_replica_leaves_after_the_first_probe_of_its_successor(options, monkeypatch):
    probe, probed = Replicas._probe, asyncio.Event()

    async def slow_probe(self, replica):
        if replica.url == new.url:
            await probed.wait()
        await probe(self, replica)

    monkeypatch.setattr(Replicas, "_probe", slow_probe)
    async with (
        FakeReplica() as old, FakeReplica() as new,
        gateway(**options) as running,
    ):  # fmt: skip
        await call(running, "PUT", "replicas/old", {"address": old.url})
        await until(lambda: bool(running.service.replicas.ready()))
        await call(running, "PUT", "replicas/new", {"address": new.url})
        leaving = asyncio.create_task(call(running, "PUT", "replicas/old", {"address": old.url, "state": "draining"}))
        await asyncio.sleep(0.1)
        assert [replica.url for replica in running.service.replicas.ready()] == [old.url] and not leaving.done()
        assert (await running.post("/v1/completions", REQUEST))[0] == 200
        probed.set()
        await leaving
        assert [replica.url for replica in running.service.replicas.ready()] == [new.url]


async def test_every_worker_has_probed_the_successor_when_the_last_replica_leaves(options, tmp_path, monkeypatch):
    hub, probe, probed = Hub(100, 60.0), Replicas._probe, asyncio.Event()
    links, slow = [], []

    async def slow_probe(self, replica):
        if self in slow and replica.url == new.url:
            await probed.wait()
        await probe(self, replica)

    monkeypatch.setattr(Replicas, "_probe", slow_probe)
    for number in range(2):
        own, end = socket.socketpair()
        await hub.attach(number, own)
        links.append(HubLink(number, end, tmp_path))
        await links[-1].start()
    options["workers"] = 2
    async with (
        FakeReplica() as old, FakeReplica() as new,
        gateway(link=links[0], **options) as told, gateway(link=links[1], **options) as other,
    ):  # fmt: skip
        slow.append(other.service.replicas)
        await call(told, "PUT", "replicas/old", {"address": old.url})
        await until(lambda: used(told) == used(other) == [old.url])
        await call(other, "PUT", "replicas/new", {"address": new.url})
        await until(lambda: new.url in used(told))
        leaving = asyncio.create_task(call(told, "PUT", "replicas/old", {"address": old.url, "state": "draining"}))
        await asyncio.sleep(0.1)
        assert used(other) == [old.url] and not leaving.done()
        probed.set()
        await leaving
        assert used(told) == [new.url] and new.url in used(other)
        await until(lambda: used(other) == [new.url])
    for link in links:
        link.close()
    await hub.close()


async def test_a_replica_whose_successor_is_never_checked_leaves_soon(options, monkeypatch):
    monkeypatch.setattr(succession, "SUCCESSOR_S", 0.1)
    silent = socket.create_server(("127.0.0.1", 0))  # accepts connections and never answers
    port = silent.getsockname()[1]
    async with FakeReplica() as old, gateway(**options) as running:
        await call(running, "PUT", "replicas/old", {"address": old.url})
        await until(lambda: bool(running.service.replicas.ready()))
        await call(running, "PUT", "replicas/new", {"address": f"127.0.0.1:{port}"})
        await call(running, "PUT", "replicas/old", {"address": old.url, "state": "draining"})
        assert not running.service.replicas.ready()
    silent.close()
