"""The fleet's parts that need no server."""

import os
import signal
import time

from chaos import fleet
from chaos.fleet import Process
from gateway.config.configuration import Configuration


def test_the_gateways_accept_the_configuration(tmp_path):
    file = tmp_path / "gateway.toml"
    file.write_text(fleet.configuration("redis://127.0.0.1:1/0"))
    keys = ",".join(f"{tenant}/chaos/one={key}" for tenant, key in fleet.KEYS.items())
    found = Configuration(file, {"TRIDENT_GATEWAY_API_KEYS": keys}, {"": 1.0})
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
