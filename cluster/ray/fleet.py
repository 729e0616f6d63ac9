"""A fleet on this machine, Ray with the replicas and a gateway in front of them, and changes to one that runs."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cluster.ray.application import (
    APPLICATION,
    ROOT,
    ServerArguments,
    checked,
    configuration,
    engine_of,
    folder_of,
)
from contract.errors import InvalidArgument, Unavailable

NAMESPACE = "trident"
WATCH_S = 0.5
HTTP_PORT = 9000  # of the gateway, where the environment sets none
MONITORING_OFFSET = 2
OBJECT_STORE_BYTES = 80 * 2**20  # the least that Ray takes; nothing is stored there


@dataclass(frozen=True)
class Fleet:
    """What is known of a running fleet to those that change it; in fleet.json of its folder.

    ray: address of the cluster. monitoring: the gateway's metrics page. arguments: ServerArguments.
    min, max: bounds of the number of replicas. scaling: file of the scaling rules.
    """

    ray: str
    monitoring: str
    arguments: Mapping[str, Any]
    min: int
    max: int
    scaling: str = ""

    def check(self) -> None:
        """Raise InvalidArgument or NotFound for what no replica could start with."""
        engine_of(checked(self.arguments))
        if not 0 <= self.min <= self.max or not self.max:
            raise InvalidArgument("min", f"must be at least 0 and at most max, {self.max}, got {self.min}")

    def deploy(self) -> None:
        """Give Serve this configuration, by which it starts, rolls out or rescales the replicas."""
        from ray.serve.context import _get_global_client  # the dashboard's REST would cost 10 processes
        from ray.serve.schema import ServeDeploySchema

        config = configuration(checked(self.arguments), self.min, self.max, [self.monitoring], self.scaling)
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)

    def save(self, folder: Path) -> None:
        (folder / "fleet.json").write_text(json.dumps(asdict(self), indent=2) + "\n")


def run(folder: Path, changes: Mapping[str, Any], bounds: Mapping[str, Any]) -> int:
    """Start Ray, the gateway and the replicas; print what changes until SIGINT or SIGTERM, then drain them all.

    folder: of tokens and fleet.json. changes: fields of ServerArguments. bounds: fields of Fleet.
    Return 0, or 1 if the first replica did not start or the gateway ended. Raises TridentError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token, stop = _token(folder / "admin-token"), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    environ = {"TRIDENT_HOST": "127.0.0.1", **changes.get("environ", {})}
    server = {"cpus": 0, **changes, "environ": environ, "register": "127.0.0.1:1", "token_file": str(token)}
    Fleet("", "", server, **bounds).check()
    with _gateway(token, checked(server)) as (process, http, monitoring):
        server["register"] = http
        with _ray(folder, server["cpus"] * bounds["max"]) as address:
            fleet = Fleet(address, monitoring, server, **bounds)
            fleet.deploy()
            fleet.save(folder)
            print(f"fleet: http://{http}, metrics {monitoring}; Ctrl-C drains and stops it", flush=True)
            return _watch(process, http, token.read_text(), stop)


def change(folder: Path, changes: Mapping[str, Any], bounds: Mapping[str, Any]) -> None:
    """Change the fleet of a folder: bounds in place, everything else as a new version that Serve rolls out.

    Raises Unavailable if there is none, InvalidArgument, NotFound.
    """
    try:
        known = json.loads((folder / "fleet.json").read_text())
        host, _, port = known["ray"].rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
    except OSError:
        raise Unavailable(f"no fleet runs in {folder}; `make fleet` starts one") from None
    environ = {**known["arguments"]["environ"], **changes.get("environ", {})}
    known["arguments"] |= {**changes, "environ": environ}
    fleet = replace(Fleet(**known), **bounds)
    fleet.check()
    _set_up_ray(folder)
    import ray

    ray.init(address=fleet.ray, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    try:
        fleet.deploy()
    finally:
        ray.shutdown()
    fleet.save(folder)


@contextmanager
def _ray(folder: Path, cpus: float) -> Iterator[str]:
    """Run a small Ray with Serve, without proxies and dashboard; drain all replicas at the end.

    cpus: of all replicas; twice as many are booked, since new versions start beside old ones.
    """
    _set_up_ray(folder)
    temporary = tempfile.mkdtemp(prefix="trident-ray-")  # a short path: Ray makes Unix sockets in it
    import ray
    from ray import serve

    try:
        context = ray.init(
            num_cpus=max(1, math.ceil(2 * cpus)), object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False,
            log_to_driver=False, logging_level="ERROR", namespace=NAMESPACE, _temp_dir=temporary,
        )  # fmt: skip
        serve.start(proxy_location="Disabled")
        try:
            yield str(context.address_info["gcs_address"])
        finally:
            print("fleet: draining", flush=True)
            (folder / "fleet.json").unlink(missing_ok=True)
            serve.shutdown()
            ray.shutdown()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _set_up_ray(folder: Path) -> None:
    """Set Ray's environment, which its first import reads: a token of our own, and no reports to its makers."""
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(_token(folder / "ray-token")),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "PYTHONPATH": str(ROOT),  # the workers import this package
    }


def _token(path: Path) -> Path:
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
    return path


@contextmanager
def _gateway(token: Path, server: ServerArguments) -> Iterator[tuple[subprocess.Popen, str, str]]:
    """Run the gateway; yield its process, the address of its HTTP endpoint and the URL of its metrics."""
    port = int(os.environ.get("TRIDENT_GATEWAY_HTTP_PORT") or HTTP_PORT)
    monitoring = int(os.environ.get("TRIDENT_GATEWAY_MONITORING_PORT") or port + MONITORING_OFFSET)
    environment = {
        "TRIDENT_GATEWAY_MODEL": server.engine,
        "TRIDENT_TOKENIZER": str(folder_of(server) / "tokenizer.json"),
        **os.environ,
        "TRIDENT_GATEWAY_REPLICAS": "registered",
        "TRIDENT_GATEWAY_ADMIN_TOKEN_FILE": str(token),
        "TRIDENT_GATEWAY_MONITORING_PORT": str(monitoring),
    }
    prctl = ctypes.CDLL(None).prctl
    process = subprocess.Popen(
        [server.python, "-m", "gateway"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in a terminal would end it before the replicas have drained
        preexec_fn=lambda: prctl(1, signal.SIGTERM),  # but it does not outlive this process
    )
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        if words[:1] != ["http"]:
            raise Unavailable("the gateway did not start; see above")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield process, words[1], f"http://127.0.0.1:{monitoring}/metrics"
    finally:
        process.terminate()
        process.wait()


def _watch(gateway: subprocess.Popen, http: str, token: str, stop: threading.Event) -> int:
    """Print every change of the replicas, by Serve and by the gateway, until ``stop``; return the exit code."""
    began_s, shown, served = time.monotonic(), "", False
    while not stop.wait(WATCH_S):
        if gateway.poll() is not None:
            print("fleet: the gateway ended", flush=True)
            return 1
        line, failed = _by_serve()
        states = registered(http, token)
        served = served or "serves" in states.values()
        line += "; at the gateway: " + (", ".join(map(" ".join, states.items())) or "none")
        if line != shown:
            print(f"{time.monotonic() - began_s:7.1f} s  {line}", flush=True)
            shown = line
        if failed and not served:
            return 1
    return 0


def _by_serve() -> tuple[str, bool]:
    """Return a line with the number of replicas by state, and whether the latest deployment has failed."""
    from ray import serve
    from ray.exceptions import RayError

    try:
        found = serve.status().applications[APPLICATION]
    except KeyError:
        return "nothing is deployed", False
    except (RayError, RuntimeError, ConnectionError) as error:
        return f"Ray does not answer ({type(error).__name__}); servers go on for orphan_s", False
    counts: Counter[str] = Counter()
    for deployment in found.deployments.values():
        counts.update(deployment.replica_states)
    failed = found.status.value == "DEPLOY_FAILED"
    states = ", ".join(f"{count} {state.lower()}" for state, count in sorted(counts.items())) or "no replica"
    return f"{found.status.value.lower()}: {states}" + (f": {found.message.strip()}" if failed else ""), failed


def registered(http: str, token: str) -> dict[str, str]:
    """Return what every replica does, by its address: serves, or its state; nothing while no gateway answers."""
    request = urllib.request.Request(f"http://{http}/admin/replicas", headers={"authorization": f"Bearer {token}"})
    with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=2) as answer:
        entries = json.load(answer)["replicas"]
        return {entry["address"]: "serves" if entry["in_use"] else entry["state"] for entry in entries}
    return {}
