"""A fleet under a real Ray: it scales, rolls out and loses processes while streams go on, and no stream is cut."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster import __main__ as command
from cluster.ray import fleet
from cluster.ray.application import checked
from contract.errors import InvalidArgument, Unavailable
from tests.cluster.ray.running import PYTHON, Running
from tests.stream_load import Load

SOAK_S = float(os.environ.get("SOAK_S") or 0)  # how long the soak lasts; 0: as short as it can be
ROOT = Path(__file__).resolve().parents[3]


def test_a_fleet_that_does_not_run_cannot_be_changed(tmp_path):
    with pytest.raises(Unavailable, match="no fleet runs in"):
        fleet.change(tmp_path, {}, {})
    for address in ("127.0.0.1:1", ""):  # of one that was killed; of one that starts
        (tmp_path / "fleet.json").write_text(f'{{"ray": "{address}"}}')
        with pytest.raises(Unavailable, match="no fleet runs in"):
            fleet.change(tmp_path, {}, {})


def test_a_verb_that_is_none_is_refused_with_all_that_there_are(capsys):
    with pytest.raises(SystemExit):
        command.main(["grow"])
    assert "{fleet,change,scale,keda,plan}" in capsys.readouterr().err


def test_the_command_says_what_is_missing_where_there_is_no_ray(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main(["fleet"]) == 2
    assert "make setup-fleet" in capsys.readouterr().err


def test_tokens_are_for_their_owner_alone_and_stay(tmp_path):
    path = fleet._token(tmp_path / "token")
    assert path.stat().st_mode & 0o777 == 0o600 and len(path.read_text()) == 64
    assert fleet._token(path).read_text() == path.read_text()


def test_a_gateway_that_does_not_answer_names_no_replica():
    assert fleet.registered("127.0.0.1:1", "token") == {}


@pytest.mark.parametrize(
    ("bounds", "problem"),
    [
        ({"min": 0, "max": 0}, "max: must be at least 1, got 0"),
        ({"min": 3, "max": 2}, "min: must be at least 0 and at most max, 2, got 3"),
        ({"min": 1, "max": 1, "scaling": "/none-such.toml"}, "/none-such.toml: must be a file that can be read"),
    ],
)
def test_bounds_and_rules_that_cannot_be_are_named(bounds, problem):
    arguments = {"engine": "demo", "register": "127.0.0.1:1", "token_file": "/token"}
    with pytest.raises(InvalidArgument, match=problem):
        fleet.Fleet("", "", arguments, **bounds).check()


def test_an_interpreter_that_is_not_there_is_named():
    arguments = {"engine": "demo", "register": "127.0.0.1:1", "token_file": "/token", "python": "/none-such"}
    with pytest.raises(InvalidArgument, match="python: must be an interpreter that can be run, got '/none-such'"):
        fleet.Fleet("", "", arguments, 1, 1).check()


def test_a_variable_of_the_servers_has_a_name_and_a_value(capsys):
    for words in (["NAME"], ["=value"]):
        with pytest.raises(SystemExit):
            command.main(["fleet", "--environ", *words])
        assert f"must be NAME=VALUE, got '{words[0]}'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_gateway_may_have_any_ports_and_is_asked_without_a_proxy(tmp_path, monkeypatch):
    for name in ("HTTP_PORT", "GRPC_PORT"):
        monkeypatch.setenv(f"TRIDENT_GATEWAY_{name}", "0")
    token = fleet._token(tmp_path / "token")
    arguments = {"engine": "demo", "register": "127.0.0.1:1", "token_file": str(token)}
    with fleet._gateway(token, checked(arguments)) as (process, http, metrics):
        with urllib.request.urlopen(metrics) as page:
            assert b"trident_gateway_pool_ready" in page.read()
        headers = {"authorization": f"Bearer {token.read_text()}"}
        body = json.dumps({"address": "127.0.0.1:1", "state": "starting"}).encode()
        beat = urllib.request.Request(f"http://{http}/admin/replicas/one", body, headers, method="PUT")
        urllib.request.urlopen(beat).close()
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which is not to get the token
        monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers the proxies
        assert fleet.registered(http, token.read_text()) == {"127.0.0.1:1": "starting"}
    process.stdout.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    if not PYTHON.exists():
        pytest.skip("Ray is not installed; `make setup-fleet` makes .venv-fleet with it")
    # Continuations would hide a stream that a drain has cut.
    running = Running(tmp_path_factory.mktemp("fleet"), TRIDENT_GATEWAY_CONTINUATIONS="0")
    try:
        while "Ctrl-C" not in running.output.read_text() and running.process.poll() is None:
            time.sleep(0.05)
        yield running
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(90) == 0, running.output.read_text()
        left = [one for one in psutil.process_iter(["cmdline"]) if str(running.folder) in str(one.info["cmdline"])]
        assert not left
    finally:
        running.process.kill()
        running.process.wait()


@pytest.mark.slow
async def test_no_stream_is_lost_whatever_happens_to_the_fleet(running: Running):
    await running.until(lambda: len(running.in_use()) == 1)
    load = Load()
    async with load.running(running.http_port, running.grpc_port, streams=2):
        await asyncio.to_thread(running.change, "--min", "3", "--max", "3")
        await running.until(lambda: len(running.in_use()) == 3)
        assert not load.failed, running.said()

        before, workers = running.in_use(), set(running.workers("ray::ServeReplica"))
        await running.kill("ray::ServeReplica")  # its server serves on, and the next worker adopts it
        await running.until(lambda: len(set(running.workers("ray::ServeReplica")) - workers) == 1)
        await running.until(lambda: ": 3 running; at the gateway" in running.said().splitlines()[-1])
        assert running.in_use() == before and not load.failed, running.said()

        await asyncio.to_thread(running.change, "--min", "1", "--max", "1")
        await running.until(lambda: len(running.in_use()) == 1)
        assert not load.failed, running.said()

        # Killed while replicas stop, the controller takes those for running ones when it is back, and stops others.
        await running.until(
            lambda: bool(re.search(r" running: 1 running; at the gateway: \S+ serves$", running.said()))
        )
        old = running.in_use()
        await running.kill("ray::ServeController")
        await asyncio.to_thread(running.change, "--environ", "TRIDENT_MODEL_REPOSITORY=/nowhere")
        await running.until(lambda: "deploy_failed" in running.output.read_text())
        assert running.in_use() == old and not load.failed, running.said()

        await asyncio.to_thread(running.change, "--environ", f"TRIDENT_MODEL_REPOSITORY={ROOT / 'model_repository'}")
        await running.until(lambda: bool(running.in_use()) and not running.in_use() & old)
    assert not load.failed and load.ended > 20, running.said()


@pytest.mark.slow
async def test_a_fleet_starts_ray_again_when_it_has_died(running: Running):
    await running.until(lambda: len(running.in_use()) == 1)
    before, load = running.in_use(), Load()
    async with load.running(running.http_port, running.grpc_port, streams=2):
        os.kill(running.find("raylet"), signal.SIGKILL)
        await running.until(lambda: "another one adopts its servers" in running.said())
        await running.until(lambda: ": 1 running; at the gateway" in running.said().splitlines()[-1])
        assert running.in_use() == before
        await asyncio.to_thread(running.change, "--min", "1", "--max", "2")  # it can be changed again
    assert not load.failed and load.ended, running.said()


class Notes:
    """What a load has come to, after each step; fails at the first stream that did not end in full."""

    def __init__(self, running: Running, load: Load) -> None:
        self._running, self._load, self._began_s = running, load, time.monotonic()

    def __call__(self, what: str) -> None:
        print(f"{time.monotonic() - self._began_s:6.1f} s, {self._load.ended} streams: {what}", flush=True)
        assert not self._load.failed, (self._load.failed[:3], self._running.said())


@pytest.mark.slow
async def test_streams_end_in_full_while_replicas_come_and_go_by_hand(running: Running):
    """SOAK_S=180 for a soak."""
    load = Load(tokens=24)
    note = Notes(running, load)
    await running.until(lambda: len(running.in_use()) == 1)
    async with load.running(running.http_port, running.grpc_port, streams=6):
        for replicas in (3, 1):
            await asyncio.to_thread(running.change, "--min", str(replicas), "--max", str(replicas))
            await running.until(lambda: len(running.in_use()) == replicas)  # noqa: B023
            await asyncio.sleep(SOAK_S / 3)
            note(f"{replicas} by hand")
        old = running.in_use()
        await asyncio.to_thread(running.change, "--environ", f"SOAK={time.monotonic()}")
        await running.until(lambda: bool(running.in_use()) and not running.in_use() & old)
        await asyncio.sleep(SOAK_S / 3)
        note("a rolling upgrade")
    note("end")
    assert load.ended > 100


@pytest.mark.slow
@pytest.mark.skipif(not SOAK_S, reason="takes minutes: `make soak-fleet`")
async def test_streams_end_in_full_while_replicas_come_and_go_by_the_law(running: Running):
    """Up to 100 tokens per second, and then none; a replica counts as 10."""
    load = Load(tokens=24)
    note = Notes(running, load)
    load.pause_s = 3.0
    await running.until(lambda: len(running.in_use()) == 1)
    async with load.running(running.http_port, running.grpc_port, streams=6):
        await asyncio.to_thread(running.change, "--min", "1", "--max", "3")
        await running.until(lambda: len(running.in_use()) == 3, 180)
        note("3 by the law")
        load.pause_s = 3600.0
        for replicas in (2, 1):
            await running.until(lambda: len(running.in_use()) <= replicas, 240)  # noqa: B023
            note(f"{replicas} by the law")
    note("end")


@pytest.mark.slow
def test_a_change_that_cannot_be_is_refused_and_changes_nothing(running: Running):
    wrong = {("--engine", "none-such"): "there is no engine", ("--min", "3", "--max", "2"): "min: must be at least 0"}
    for words, problem in wrong.items():
        command = running._command("change", *words)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and problem in done.stderr
