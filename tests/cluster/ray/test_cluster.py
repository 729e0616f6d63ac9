"""`serve deploy` on a Ray cluster of two nodes: replicas on both; no death of a node or a head cuts a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from cluster.ray import application, fleet
from server import ports
from tests.stream_load import Load

ROOT = Path(__file__).resolve().parents[3]
BIN = ROOT / ".venv-fleet" / "bin"
pytestmark = pytest.mark.skipif(not os.environ.get("SOAK_S"), reason="takes minutes: `make soak-fleet`")
RIGHT = "127.0.0.2"  # Ray replaces 127.0.0.1 by an address of the machine


class Cluster:
    """A gateway, and Ray's processes of two nodes: "left" with the head, and "right"."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.redis_port = folder, 0
        self.http_port, self.grpc_port, monitoring_port, self.gcs_port, self.dashboard_port, *rest = ports.free(8)
        self.more_ports = dict(zip(("client", "left", "right"), rest, strict=True))
        token = fleet._token(folder / "token")
        self.environ = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(fleet._token(folder / "ray-token")),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_LOG_TO_STDERR": "0",
            "PYTHONPATH": str(ROOT),
        }
        gateway = {
            **os.environ,
            "TRIDENT_GATEWAY_MODEL": "demo",
            "TRIDENT_TOKENIZER": str(ROOT / "engines" / "demo" / "tokenizer.json"),
            "TRIDENT_GATEWAY_REPLICAS": "registered",
            "TRIDENT_GATEWAY_ADMIN_TOKEN_FILE": str(token),
            "TRIDENT_GATEWAY_HTTP_PORT": str(self.http_port),
            "TRIDENT_GATEWAY_GRPC_PORT": str(self.grpc_port),
            "TRIDENT_GATEWAY_MONITORING_PORT": str(monitoring_port),
            "TRIDENT_GATEWAY_CONTINUATIONS": "0",  # which would hide a stream that was cut
        }
        with (folder / "gateway.log").open("wb") as log:
            command = [str(ROOT / ".venv" / "bin" / "python"), "-m", "gateway"]
            self.gateway = subprocess.Popen(command, cwd=ROOT, env=gateway, stdout=log, stderr=log)
        [app] = self.config()["applications"]
        self.args = {
            **app["args"],
            "register": f"127.0.0.1:{self.http_port}",
            "token_file": str(token),
            "drain_s": 30,
            "orphan_s": 150,  # a restart of Ray takes a minute where others use the machine
            "environ": {"TRIDENT_STATE_DIR": str(folder / "state")},
        }
        self.policy = {"gateways": [f"http://127.0.0.1:{monitoring_port}/metrics"]}

    def config(self) -> dict[str, Any]:
        return yaml.safe_load(application.FILE.read_text("utf-8"))

    def ray(self, node: str, *words: str, **environ: str) -> None:
        """Start Ray's processes of a node; its name is in their environment, and not in that of servers."""
        words = (*words, f"--dashboard-agent-listen-port={self.more_ports[node]}", "--include-log-monitor=false")
        # Without a range of ports for its workers, which may have been given to others.
        words = (*words, "--min-worker-port=0", "--max-worker-port=0", "--object-store-memory=80000000")
        command = [str(BIN / "ray"), "start", *words]
        environ = {**self.environ, "RAY_TEST_NODE": f"{self.folder}/{node}", **environ}
        done = subprocess.run(command, env=environ, cwd=self.folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    def start_left(self) -> None:
        # Ray would take the right node's raylet, which is on this machine too, for a head that still runs.
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        redis = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{self.redis_port}"} if self.redis_port else {}
        words = [f"--port={self.gcs_port}", "--num-cpus=3", '--resources={"left": 1}']
        more = [f"--dashboard-port={self.dashboard_port}", f"--temp-dir={self.folder}/ray", "--include-dashboard=true"]
        more.append(f"--ray-client-server-port={self.more_ports['client']}")
        self.ray("left", "--head", "--node-ip-address=127.0.0.1", *words, *more, **redis)

    def start_right(self) -> None:
        words = [f"--address=127.0.0.1:{self.gcs_port}", f"--node-ip-address={RIGHT}"]
        self.ray("right", *words, "--num-cpus=4", '--resources={"right": 1}')

    def kill(self, node: str) -> None:
        """End all of Ray's processes of a node at once, as a node's death does; servers have a life of their own."""
        for one in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGSTOP)  # none sees another die
        for one in self.processes(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def restart(self) -> None:
        """Kill all of Ray, and start it again."""
        for node in ("left", "right"):
            self.kill(node)
        self.start_left()
        self.start_right()

    def processes(self, node: str) -> list[psutil.Process]:
        found, name = [], f"{self.folder}/{node}"
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.environ().get("RAY_TEST_NODE") == name:
                    found.append(one)
        return found

    def workers(self, node: str) -> set[int]:
        """The pids of the replicas' Ray workers of a node."""
        return {one.pid for one in self.processes(node) if "ray::ServeReplica" in " ".join(one.cmdline())}

    def deploy(self, replicas: int, **environ: str) -> None:
        """Deploy the project's file with this number of replicas, by the command that people use."""
        config = self.config()
        [app] = config["applications"]
        app["args"] = {**self.args, "environ": {**self.args["environ"], **environ}}
        scaling = app["deployments"][0]["autoscaling_config"]
        scaling |= {"min_replicas": replicas, "max_replicas": replicas}
        scaling["policy"]["policy_kwargs"] = self.policy
        file = self.folder / "fleet.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [str(BIN / "serve"), "deploy", "--address", f"http://127.0.0.1:{self.dashboard_port}", str(file)]
        deadline_s = time.monotonic() + 60  # its agent answers some seconds after the head
        while True:
            done = subprocess.run(command, env=self.environ, cwd=self.folder, capture_output=True, text=True)
            if done.returncode == 0:
                return
            assert time.monotonic() < deadline_s, done.stdout + done.stderr
            time.sleep(1)

    def status(self) -> str:
        command = [str(BIN / "serve"), "status", "--address", f"http://127.0.0.1:{self.dashboard_port}"]
        done = subprocess.run(command, env=self.environ, cwd=self.folder, capture_output=True, text=True)
        return done.stdout + done.stderr[-500:]

    def running(self) -> int:
        """How many replicas run, by Serve."""
        try:
            [app] = yaml.safe_load(self.status())["applications"].values()
            return int(app["deployments"]["TritonReplica"]["replica_states"].get("RUNNING", 0))
        except (KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError):
            return -1

    def in_use(self) -> set[str]:
        """The addresses of the replicas that get requests."""
        states = fleet.registered(f"127.0.0.1:{self.http_port}", (self.folder / "token").read_text())
        return {address for address, state in states.items() if state == "serves"}

    def hosts(self) -> list[str]:
        return sorted(address.rpartition(":")[0] for address in self.in_use())

    def servers(self) -> set[int]:
        """The pids of the supervisors."""
        files = (self.folder / "state").glob("status-*.json")
        return {json.loads(file.read_text())["pid"] for file in files}

    async def until(self, condition: Callable[[], bool], patience_s: float = 90.0) -> None:
        began_s = time.monotonic()
        while not await asyncio.to_thread(condition):
            if time.monotonic() - began_s > patience_s:
                pytest.fail(f"{self.in_use()}\n{self.status()}\n{(self.folder / 'gateway.log').read_text()[-2000:]}")
            await asyncio.sleep(0.1)
        print(f"{time.monotonic() - began_s:6.1f} s", file=sys.stderr)

    def close(self) -> None:
        for node in ("left", "right"):
            self.kill(node)
        for pid in self.servers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + 60
        while self.servers() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        self.gateway.terminate()
        self.gateway.wait(60)
        assert not self.servers()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if not BIN.exists():
        pytest.skip("Ray is not installed; `make setup-fleet` makes .venv-fleet with it")
    folder = Path(tempfile.mkdtemp(prefix="trident-"))  # a short path: Ray makes Unix sockets in it
    one = Cluster(folder)
    try:
        yield one
        one.close()
    finally:
        for node in ("left", "right"):
            one.kill(node)
        one.gateway.kill()
        one.gateway.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def redis(cluster: Cluster) -> Iterator[None]:
    if not (program := shutil.which("redis-server")):
        pytest.skip("redis-server is not installed")
    [cluster.redis_port] = ports.free(1)
    words = ["--port", str(cluster.redis_port), "--save", "", "--dir", str(cluster.folder)]
    with subprocess.Popen([program, *words], stdout=subprocess.DEVNULL) as process:
        yield
        process.terminate()


@pytest.mark.slow
async def test_replicas_of_two_nodes_and_a_head_that_comes_back_with_redis(cluster: Cluster, redis: None):
    cluster.start_left()
    cluster.start_right()
    cluster.deploy(2)
    await cluster.until(lambda: len(cluster.in_use()) == 2)
    assert RIGHT in cluster.hosts() and cluster.hosts() != [RIGHT, RIGHT]  # one on each node
    load = Load()
    async with load.running(cluster.http_port, cluster.grpc_port, streams=2):
        old = cluster.in_use()
        await asyncio.to_thread(cluster.deploy, 2, ROLLOUT="1")
        await cluster.until(lambda: len(cluster.in_use()) == 2 and not cluster.in_use() & old)
        await cluster.until(
            lambda: len(cluster.servers()) == len(cluster.workers("left") | cluster.workers("right")) == 2
        )
        assert not load.failed

        # The head: the replica of the right node does not notice, and the other one is adopted or replaced.
        before, ended, workers = cluster.in_use(), load.ended, cluster.workers("right")
        await asyncio.to_thread(cluster.kill, "left")
        await asyncio.sleep(5)
        assert cluster.in_use() == before and load.ended > ended  # nobody is there but servers and gateway
        await asyncio.to_thread(cluster.start_left)
        await cluster.until(lambda: cluster.running() == 2)
        assert {address for address in before if address.startswith(RIGHT)} <= cluster.in_use()
        assert workers <= cluster.workers("right") and not load.failed
        await asyncio.to_thread(cluster.deploy, 3, ROLLOUT="1")
        await cluster.until(lambda: cluster.running() == 3)
        assert not load.failed

        # A node: its replicas come back on the other one, and its servers go on for a while.
        await asyncio.to_thread(cluster.kill, "right")
        await cluster.until(lambda: len(cluster.workers("left")) == 3 and cluster.running() == 3)
    assert not load.failed and load.ended > 20


@pytest.mark.slow
async def test_a_new_head_without_redis_adopts_the_servers_of_the_old_one(cluster: Cluster):
    cluster.start_left()
    cluster.start_right()
    cluster.deploy(2)
    await cluster.until(lambda: len(cluster.in_use()) == 2)
    load = Load()
    async with load.running(cluster.http_port, cluster.grpc_port, streams=2):
        before, servers = cluster.in_use(), cluster.servers()
        await asyncio.to_thread(cluster.restart)
        await asyncio.to_thread(cluster.deploy, 2)
        await cluster.until(lambda: cluster.running() == 2)
        assert cluster.in_use() == before and cluster.servers() == servers and not load.failed

        # Of another kind: new ones are started beside the old ones, which go on until they drain.
        await asyncio.to_thread(cluster.restart)
        await asyncio.to_thread(cluster.deploy, 2, ROLLOUT="1")
        await cluster.until(lambda: cluster.running() == 2 and len(cluster.in_use() - before) == 2)
        for pid in servers & cluster.servers():
            os.kill(pid, signal.SIGTERM)  # as after orphan_s
        await cluster.until(lambda: not cluster.servers() & servers)
        assert len(cluster.in_use()) == 2
    assert not load.failed and load.ended > 20
