"""One replica of Ray Serve: a supervised tritonserver that Ray starts, checks and stops, and cannot kill."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from cluster.ray import ownership

_LOG = logging.getLogger("ray.serve")
UNWELL_S = 60.0  # a supervisor may mend its server for so long before Serve replaces the replica
SHOWN_CHARS = 2000  # of the log of a server that did not start


class TritonReplica:
    """A server from its first token to the end of its drain; the class that Serve deploys.

    One of the same kind whose worker died is adopted; none is started then. Arguments as ServerArguments.
    Raises RuntimeError with the end of the server's log if it does not become ready.
    """

    def __init__(self, root: str, python: str, engine: str, environ: Mapping[str, str], orphan_s: float) -> None:
        self._stopping = threading.Event()
        self._unwell_since_s: float | None = None
        environment = environment_of(os.environ, environ)
        if "TRIDENT_HOST" not in environment:
            import ray

            environment["TRIDENT_HOST"] = str(ray.util.get_node_ip_address())  # that other nodes reach it at
        folder = Path(environment.get("TRIDENT_STATE_DIR") or Path(root, ".triton"))
        folder.mkdir(parents=True, exist_ok=True)
        gpus = environment["CUDA_VISIBLE_DEVICES"]
        engines = environment.get("TRIDENT_ENGINES_DIR") or Path(root, "engines")
        try:
            manifest = Path(engines, engine, "manifest.json").read_text()  # another build of an engine is another kind
        except OSError:
            manifest = ""  # the server says so
        served = (manifest, root, python, engine, orphan_s, dict(environ), environment["TRIDENT_HOST"], gpus)
        kind = hashlib.sha256(json.dumps(served, sort_keys=True).encode()).hexdigest()[:16]
        command = [python, "-m", "server", "--engine", engine, "--free-ports", "--"]
        file = folder / f"replica-{kind}-{os.getpid()}.owner"
        adopted = ownership.adopted(folder, f"replica-{kind}-", gpus)
        self._owned = adopted or _started(file, root, environment, command, orphan_s)
        if adopted:
            _LOG.info("adopts the server of the supervisor %d, whose worker has died", adopted.pid)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    async def check_health(self) -> None:
        """Raise if the server was stopped or has not served for UNWELL_S. Its supervisor asks it for tokens."""
        if self._stopping.is_set():  # or a controller that was killed meanwhile would count it and stop another
            raise RuntimeError("the replica is stopping")
        state = self._owned.state
        if state == "ready":
            self._unwell_since_s = None
            return
        self._unwell_since_s = self._unwell_since_s or time.monotonic()
        if time.monotonic() - self._unwell_since_s > UNWELL_S:
            raise RuntimeError(f"the server has been {state} for {UNWELL_S:g} s")

    def __del__(self) -> None:
        """Withdraw the server and wait for its drain. Serve calls this, and waits graceful_shutdown_timeout_s."""
        if not hasattr(self, "_watcher") or self._stopping.is_set():  # its constructor did not end
            return
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._owned.stop()
        self._watcher.join()
        self._owned.file.with_suffix(".log").unlink(missing_ok=True)

    def _watch(self) -> None:
        """End this process when the supervisor has ended: health checks would need three periods to see it."""
        self._owned.wait()
        self._owned.forget()
        if not self._stopping.is_set():
            _LOG.error("the supervisor %d ended; its log is beside %s", self._owned.pid, self._owned.file)
            os._exit(1)


def _started(
    file: Path, root: str, environment: Mapping[str, str], server: list[str], orphan_s: float
) -> ownership.Owned:
    """Start a server and return it when its first token was seen. file: of its owner; its log stands beside it."""
    lock = ownership.locked(file, os.O_CREAT)
    # In a session of its own and nobody's child: Ray kills the process group of a worker that was killed, and the
    # children of one that exits, which would cut every stream.
    beside = [sys.executable, "-IS", ownership.__file__, str(file), f"{orphan_s:g}"]
    with file.with_suffix(".log").open("wb") as log:
        started = subprocess.Popen(
            ["setsid", "--fork", *server, *beside], cwd=root, env=dict(environment), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    started.wait()
    assert started.stdout is not None
    with started.stdout as out:
        if out.readline():
            return ownership.Owned(file, lock)
    lock.close()
    file.unlink()
    said = file.with_suffix(".log").read_text(errors="replace")[-SHOWN_CHARS:]
    raise RuntimeError(f"the server did not start: {said}")


def environment_of(worker: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the server: the worker's without Ray's, and ``own``. Without GPUs of its own, for which
    Ray leaves the variable unset, it sees none."""
    kept = {name: value for name, value in worker.items() if not name.startswith("RAY_") and name != "PYTHONPATH"}
    return {"CUDA_VISIBLE_DEVICES": "", **kept, **own}
