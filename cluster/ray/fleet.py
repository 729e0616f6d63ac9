"""A fleet on this machine, Ray with the replicas and a gateway in front of them, and changes to one that runs."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import math
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster.ray.application import APPLICATION, ROOT, ServerArguments, checked, configuration
from cluster.scaling import rules
from contract import manifest
from contract.errors import InvalidArgument, Unavailable

NAMESPACE = "trident"
WATCH_S = 0.5
GONE_S = 10.0  # without an answer of Serve until Ray is taken to have died; its controller restarts in 2 s
NEVER_SERVED = 3  # exit code
OBJECT_STORE_BYTES = 80 * 2**20  # the least that Ray takes; nothing is stored there


@dataclass(frozen=True)
class Fleet:
    """What is known of a running fleet to those that change it; in fleet.json of its folder. ray: its address.
    monitoring: the gateway's metrics page. arguments: ServerArguments. scaling: file of the rules."""

    ray: str
    monitoring: str
    arguments: Mapping[str, Any]
    min: int
    max: int
    scaling: str = ""

    def check(self) -> None:
        """Raise InvalidArgument or NotFound for what no replica could start with, and for wrong rules."""
        server = checked(self.arguments)
        rules.read(self.scaling)
        if shutil.which(server.python) is None:
            raise InvalidArgument("python", f"must be an interpreter that can be run, got {server.python!r}")
        if self.max < 1:
            raise InvalidArgument("max", f"must be at least 1, got {self.max}")
        if not 0 <= self.min <= self.max:
            raise InvalidArgument("min", f"must be at least 0 and at most max, {self.max}, got {self.min}")
        manifest.load(server.folder)

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

    folder: of tokens and fleet.json. changes: fields of ServerArguments. bounds: min, max and scaling.
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
        Fleet("", monitoring, server, **bounds).save(folder)
        try:
            return _keep_ray(folder, process, stop)
        finally:
            (folder / "fleet.json").unlink(missing_ok=True)


def _keep_ray(folder: Path, gateway: subprocess.Popen, stop: threading.Event) -> int:
    """Run Ray until ``stop``; when it dies run another one, whose replicas adopt the servers; return the exit code."""
    while True:
        # A short path: Ray makes Unix sockets in it. In a process of its own: Ray may end its driver with it.
        with tempfile.TemporaryDirectory(prefix="trident-ray-", ignore_cleanup_errors=True) as temporary:
            child = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder, temporary))
            child.start()
            while child.is_alive() and gateway.poll() is None and not stop.wait(WATCH_S):
                pass
            gone = gateway.poll() is not None
            if gone:
                print("fleet: the gateway ended", flush=True)
            if child.is_alive() and child.pid:
                os.kill(child.pid, signal.SIGINT)  # at SIGTERM Ray prints its stack
            child.join()
        if gone or stop.is_set():
            return int(gone)
        if child.exitcode == NEVER_SERVED or not _known(folder)["ray"]:
            return 1
        print("fleet: Ray has died; another one adopts its servers", flush=True)


def _serve(folder: Path, temporary: str) -> None:
    """Run Ray with the fleet of fleet.json until SIGINT; exit with NEVER_SERVED if no replica ever served."""
    os.setsid()  # Ctrl-C in a terminal is for the parent
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with it, without a drain: the next fleet adopts the servers
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    fleet = Fleet(**_known(folder))
    server = checked(fleet.arguments)
    with _ray(folder, server.cpus * fleet.max, temporary) as address:
        fleet = replace(fleet, ray=address)
        fleet.deploy()
        fleet.save(folder)
        print(f"fleet: http://{server.register_at}, metrics {fleet.monitoring}; Ctrl-C drains and stops it", flush=True)
        served = _watch(server.register_at, Path(server.token_file).read_text(), stop)
    sys.exit(0 if served else NEVER_SERVED)


def change(folder: Path, changes: Mapping[str, Any], bounds: Mapping[str, Any]) -> None:
    """Change the fleet of a folder: bounds in place, everything else as a new version. Raises TridentError."""
    try:
        known = _known(folder)
        host, _, port = known["ray"].rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for minutes
    except (OSError, ValueError):  # no address yet: it starts
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


def _known(folder: Path) -> dict[str, Any]:
    """Return the fields of the folder's Fleet. Raises OSError."""
    return dict(json.loads((folder / "fleet.json").read_text()))


@contextlib.contextmanager
def _ray(folder: Path, cpus: float, temporary: str) -> Iterator[str]:
    """Run a small Ray with Serve; drain all replicas at the end. cpus: of all replicas; twice as many are booked, since
    new versions start beside old ones. temporary: for its files."""
    _set_up_ray(folder)
    import ray
    from ray import serve

    context = ray.init(
        num_cpus=max(1, math.ceil(2 * cpus)), object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False,
        log_to_driver=False, logging_level="ERROR", namespace=NAMESPACE, _temp_dir=temporary,
    )  # fmt: skip
    serve.start(proxy_location="Disabled")
    try:
        yield str(context.address_info["gcs_address"])
    finally:
        print("fleet: draining", flush=True)
        serve.shutdown()
        ray.shutdown()


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


@contextlib.contextmanager
def _gateway(token: Path, server: ServerArguments) -> Iterator[tuple[subprocess.Popen, str, str]]:
    """Run the gateway; yield its process, the address of its HTTP endpoint and the URL of its metrics."""
    environment = {
        "TRIDENT_GATEWAY_MODEL": server.engine,
        "TRIDENT_TOKENIZER": str(server.folder / "tokenizer.json"),
        **os.environ,
        "TRIDENT_GATEWAY_REPLICAS": "registered",
        "TRIDENT_GATEWAY_ADMIN_TOKEN_FILE": str(token),
    }
    prctl = ctypes.CDLL(None).prctl
    # Ctrl-C in a terminal would end it before the replicas have drained; but it does not outlive this process.
    process = subprocess.Popen(
        [server.python, "-m", "gateway"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=lambda: prctl(1, signal.SIGTERM),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()
        if words[:1] != ["http"]:
            raise Unavailable("the gateway did not start; see above")
        metrics = next(line.split()[1] for line in process.stdout if line.split()[:1] == ["metrics"])
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield process, words[1], metrics
    finally:
        process.terminate()
        process.wait()


def _watch(http: str, token: str, stop: threading.Event) -> bool:
    """Print every change of the replicas until ``stop``, or until the first one fails; return whether any served."""
    from ray.exceptions import RayError

    began_s, shown, served = time.monotonic(), "", False
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as ending:
        # This process ends GONE_S after the latest answer: a call of a Ray that has died may never return.
        answered = partial(faulthandler.dump_traceback_later, GONE_S, exit=True, file=nowhere)
        answered()
        ending.callback(faulthandler.cancel_dump_traceback_later)
        while not stop.wait(WATCH_S):
            try:
                line, failed = _by_serve()
                answered()
            except (RayError, RuntimeError, ConnectionError) as error:
                line, failed = f"Ray does not answer ({type(error).__name__}); servers go on for orphan_s", False
            states = registered(http, token)
            served = served or "serves" in states.values()
            line += "; at the gateway: " + (", ".join(map(" ".join, states.items())) or "none")
            if line != shown:
                print(f"{time.monotonic() - began_s:7.1f} s  {line}", flush=True)
                shown = line
            if failed and not served:
                return False
    return True


def _by_serve() -> tuple[str, bool]:
    """Return a line with the number of replicas by state, and whether the latest deployment has failed."""
    from ray import serve

    try:
        found = serve.status().applications[APPLICATION]
    except KeyError:
        return "nothing is deployed", False
    counts: Counter[str] = Counter()
    for deployment in found.deployments.values():
        counts.update(deployment.replica_states)
    failed = found.status.value == "DEPLOY_FAILED"
    states = ", ".join(f"{count} {state.lower()}" for state, count in sorted(counts.items())) or "no replica"
    return f"{found.status.value.lower()}: {states}" + (f": {found.message.strip()}" if failed else ""), failed


def registered(http: str, token: str) -> dict[str, str]:
    """Return what every replica does, by its address: serves, or its state; nothing while no gateway answers."""
    request = urllib.request.Request(f"http://{http}/admin/replicas", headers={"authorization": f"Bearer {token}"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would get the token
    with contextlib.suppress(OSError, ValueError), direct.open(request, timeout=2) as answer:
        entries = json.load(answer)["replicas"]
        return {entry["address"]: "serves" if entry["in_use"] else entry["state"] for entry in entries}
    return {}
