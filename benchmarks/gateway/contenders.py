"""What is measured side by side: the gateway, LiteLLM's proxy and a plain FastAPI relay, each a process of its own."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import processes
from benchmarks.environments import Environment
from benchmarks.gateway.lifetime import ROOT, first_line, process
from benchmarks.processes import Use
from contract.errors import EngineFailed

GATEWAY, LITELLM, FASTAPI = "gateway", "LiteLLM proxy", "FastAPI relay"
# Newer ones want a certifi that not every index has yet.
LITELLM_ENVIRONMENT = Environment("litellm", (("litellm[proxy]==1.101.6",),))
FASTAPI_ENVIRONMENT = Environment(
    "fastapi-relay", (("fastapi==0.165.0", "uvicorn[standard]==0.54.0", "tritonclient[grpc]==2.73.0"),)
)
START_S = 90.0
# Room for whatever is asked: what is measured is the relaying. A section that a gateway does not know yet is not sent.
_RULES = """[admission]
max_running = {running}
tenant_share = 1.0
max_waiting_per_class = {waiting}
max_waiting_per_tenant = {waiting}
max_wait_s = {wait_s}
"""


@dataclass(frozen=True)
class Contender:
    """A running one. doors: HOST:PORT by kind, ``http`` or ``grpc``; root: its process, whose children count too."""

    name: str
    doors: Mapping[str, str]
    root: int
    metrics: str = ""  # HOST:PORT of its metrics page

    def use(self) -> Use:
        """CPU seconds since it began, and bytes, of the whole tree."""
        return sum(processes.use(self.root).values(), start=Use(0.0, 0, 0, 0))

    def alive(self) -> bool:
        return Path(f"/proc/{self.root}").exists()

    def gauge(self, name: str) -> float:
        """A sample without labels of its metrics page; nan if there is none or nobody answers."""
        host, _, port = self.metrics.partition(":")
        page = http.client.HTTPConnection(host, int(port), timeout=5)
        try:
            page.request("GET", "/metrics")
            for line in page.getresponse().read().decode().splitlines():
                if line.startswith(name + " "):
                    return float(line.split()[1])
        except OSError:
            pass
        finally:
            page.close()
        return float("nan")


@contextmanager
def scripted(kind: str, logs: Path) -> Iterator[str]:
    """HOST:PORT of a scripted source: ``replica`` or ``openai``."""
    log = logs / f"{kind}.log"
    with process([sys.executable, "-m", f"benchmarks.gateway.scripted_{kind}"], log) as one:
        yield f"127.0.0.1:{first_line(one, log)}"


@contextmanager
def gateway(
    replica: str, logs: Path, running: int = 100_000, waiting: int = 100_000, wait_s: float = 60.0
) -> Iterator[Contender]:
    """Our gateway in front of one replica. running: requests on the replica at once; waiting: more that may wait."""
    rules = logs / "gateway.toml"
    rules.parent.mkdir(parents=True, exist_ok=True)
    rules.write_text(_RULES.format(running=running, waiting=max(1, waiting), wait_s=wait_s))
    monitoring = free_address()
    settings = {
        "HTTP_PORT": "0",
        "GRPC_PORT": "0",
        "MONITORING_PORT": monitoring.rpartition(":")[2],
        "REPLICAS": replica,
        "METRICS_PORT": "0",
        "CONFIG": str(rules),
        "MAX_IN_FLIGHT": str(running + waiting),
        "LOG_LEVEL": "warning",
        "SLOW_START_S": "0",
    }
    environ = {f"TRIDENT_GATEWAY_{name}": value for name, value in settings.items()}
    log = logs / "gateway.log"
    with process([sys.executable, "-m", "gateway"], log, environ) as one:
        words = first_line(one, log).split()
        doors = dict(zip(words[::2], words[1::2], strict=True))
        _wait(doors["http"], "/health/ready", one, log)
        yield Contender(GATEWAY, doors, one.pid, monitoring)


@contextmanager
def fastapi_relay(replica: str, logs: Path) -> Iterator[Contender]:
    """Raises NotFound if its environment cannot be made."""
    FASTAPI_ENVIRONMENT.ensure()
    url, log = free_address(), logs / "fastapi.log"
    script = ROOT / "benchmarks" / "gateway" / "fastapi_relay.py"
    command = [str(FASTAPI_ENVIRONMENT.program("python")), str(script), replica, url.partition(":")[2]]
    with process(command, log, heard=False) as one:
        _wait(url, "/openapi.json", one, log)
        yield Contender(FASTAPI, {"http": url}, one.pid)


@contextmanager
def litellm(upstream: str, logs: Path) -> Iterator[Contender]:
    """One worker, no database, no callbacks. Raises NotFound if its environment cannot be made."""
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
    with process([*command, "--port", url.partition(":")[2], "--num_workers", "1"], log, environ, heard=False) as one:
        _wait(url, "/health/liveliness", one, log)
        yield Contender(LITELLM, {"http": url}, one.pid)


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"


def _wait(url: str, path: str, one: subprocess.Popen, log: Path) -> None:
    host, _, port = url.partition(":")
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s and one.poll() is None:
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
    raise EngineFailed(f"{one.args[:3]} does not answer at {url}{path}:\n{log.read_text()[-2000:]}")
