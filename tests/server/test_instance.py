"""Failing starts of a server instance, with other processes as tritonserver; test_supervisor.py has the rest."""

import asyncio
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from server import liveness_probe, ports, process, stubs, triton_log
from server.installation import Installation
from server.instance import ServerInstance
from server.liveness_probe import Outcome, ProbeResult
from server.recovery import StartFailed
from server.repository import Model, Pipeline
from server.server_metrics import ServerMetrics
from server.settings import Settings

PIPELINE = Pipeline((Model("tokenizer", 1, False), Model("engine", 1, True), Model("detokenizer", 1, True)))


@pytest.fixture
def start(tmp_path):
    """``start(script, **settings)``: the event of a start with the shell ``script`` as tritonserver, and its pid."""

    def start(script, **settings):
        root = tmp_path / "image"
        backend = root / "backends" / "python"
        backend.mkdir(parents=True)
        (root / "bin").mkdir()
        tritonserver = root / "bin" / "tritonserver"
        tritonserver.write_text(f"#!/bin/sh\n{script}\n")
        tritonserver.chmod(0o755)
        listen = dict(zip(("grpc_port", "http_port", "metrics_port"), ports.free(3), strict=True))
        made = Settings(state_dir=tmp_path, **listen, **settings)
        log = triton_log.path(made.state_dir, made.grpc_port)
        log.parent.mkdir()
        log.touch()
        installation = Installation(tritonserver, backend, backend / "stub", root / "caches", "")
        prefix = f"trident_test_{os.getpid()}_{made.grpc_port}_"

        async def run():
            events = []
            instance = ServerInstance(made, installation, PIPELINE, Path("/none"), prefix, events.append)
            assert instance.pid == 0 and not instance.is_serving
            event = await asyncio.wait_for(instance.start(), 60)
            pid = instance.pid
            await instance.stop()
            assert instance.pid == 0 and not instance.is_serving and events == []
            return event, pid

        return asyncio.run(run())

    return start


def test_an_exit_before_readiness_fails_the_start_with_the_errors_of_the_log(start):
    event, _ = start("echo 'error: creating server: no such flag' >&2; exit 3")
    assert event == StartFailed("tritonserver exited with code 3\nerror: creating server: no such flag", crashed=False)


def test_an_exit_by_a_signal_is_a_crash(start):
    event, _ = start("kill -ABRT $$")
    assert event.crashed and event.reason.startswith("tritonserver exited with signal 6")


def test_a_server_that_is_not_ready_in_time_fails_the_start_and_is_killed(start):
    event, pid = start("sleep 600", start_timeout_s=0.5)
    assert event == StartFailed("no token in 0.5 s") and not process.is_running(pid)


@pytest.mark.slow
def test_a_stub_that_exits_before_its_first_message_fails_the_start(start):
    # The shell execs a process that never waits for the child it inherits, as tritonserver does not for such a stub.
    event, _ = start("sh -c 'exit 1' & exec sleep 600", start_timeout_s=60)
    assert "exited before it could load the model" in event.reason


@pytest.fixture
def made(tmp_path):
    """``made(events)``: an instance that is not started and reports to the list ``events``."""
    backend = tmp_path / "image" / "backends" / "python"
    backend.mkdir(parents=True)
    installation = Installation(tmp_path / "tritonserver", backend, backend / "stub", tmp_path / "caches", "")

    def made(events):
        settings = Settings(state_dir=tmp_path)
        return ServerInstance(settings, installation, PIPELINE, Path("/none"), "trident_test_", events.append)

    return made


def test_a_full_server_whose_metrics_come_later_than_its_readiness_becomes_ready(made, monkeypatch):
    pages = iter([None, None, ServerMetrics(0, 0), *(ServerMetrics(9 * n, 0, 0, 9 * n) for n in range(9))])

    async def run():
        instance = made([])
        monkeypatch.setattr(stubs, "find", lambda pid: [])
        monkeypatch.setattr(instance, "_pipeline", Pipeline(()))
        monkeypatch.setattr(instance, "admin", SimpleNamespace(is_ready=partial(asyncio.sleep, 0, True)))
        monkeypatch.setattr(instance, "_metrics_or_none", lambda: asyncio.sleep(0, next(pages)))
        full = ProbeResult(Outcome.BUSY, "no slot")
        monkeypatch.setattr(liveness_probe, "probe", lambda *arguments: asyncio.sleep(0, full))
        await asyncio.wait_for(instance._wait_until_ready(), 60)
        instance._exits.close()

    asyncio.run(run())


def test_a_periodic_check_in_the_middle_of_a_reload_reports_no_missing_stub(made, monkeypatch):
    found = [stubs.Stub(os.getpid(), model, f"{model}_0", 1) for model in ("tokenizer", "engine", "detokenizer")]
    running = list(found)
    monkeypatch.setattr(stubs, "find", lambda pid: list(running))
    monkeypatch.setattr(process, "is_running", lambda pid: True)

    async def run() -> None:
        events = []
        instance = made(events)
        instance._ready = True

        async def unload(model: str) -> None:
            running.remove(found[0])
            instance._watch_stubs()  # as a liveness probe does every few seconds

        async def load(model: str, timeout_s: float) -> None:
            running.insert(0, found[0])

        async def probe() -> str:
            return ""

        monkeypatch.setattr(instance, "admin", SimpleNamespace(unload=unload, load=load))
        monkeypatch.setattr(instance, "_probe", probe)
        await instance.reload("tokenizer")
        assert events == []
        running.remove(found[0])
        instance._watch_stubs()
        assert [event.model for event in events] == ["tokenizer"]
        instance._exits.close()

    asyncio.run(run())


def test_an_old_stub_that_outlives_the_reload_is_not_watched_again(made, monkeypatch):
    old, new = (stubs.Stub(os.getpid(), "tokenizer", "tokenizer_0", started) for started in (1, 2))
    others = [stubs.Stub(os.getpid(), model, f"{model}_0", 1) for model in ("engine", "detokenizer")]
    running = [old, *others]
    monkeypatch.setattr(stubs, "find", lambda pid: list(running))

    async def run():
        instance = made([])
        instance._watch_stubs()
        assert set(instance._exits.watched) == {old, *others}

        async def load(*arguments) -> None:
            running.append(new)

        monkeypatch.setattr(instance, "admin", SimpleNamespace(unload=lambda model: asyncio.sleep(0), load=load))
        monkeypatch.setattr(instance, "_probe", lambda: asyncio.sleep(0, ""))
        await instance.reload("tokenizer")
        assert set(instance._exits.watched) == {new, *others}
        instance._exits.close()

    asyncio.run(run())
