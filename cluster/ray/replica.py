"""One replica of Ray Serve: a supervised tritonserver that Ray starts, checks and stops, and cannot kill.

No request passes through Ray: the server registers itself at the gateways (docs/fleet.md).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

_LOG = logging.getLogger("ray.serve")
UNWELL_S = 60.0  # a supervisor may mend its server for so long before Serve replaces the replica
SHOWN_CHARS = 2000  # of the log of a server that did not start
# Runs beside the server, whose supervisor drains when it ends. It says that the first token was seen, then waits for a
# line on standard input. Where that closes without one the worker was killed: requests go on for $0 seconds. No signal
# for the parent's death: a worker has many threads, and the kernel may send one for each.
CHILD_COMMAND = 'echo "$PPID $TRIDENT_STATUS_FILE"; read -r _ || exec sleep "$0"'


class TritonReplica:
    """A server from its first token to the end of its drain; the class that Serve deploys.

    root: the project's folder. python: that runs the server. engine: its name.
    environ: of the server, beside the worker's own.
    orphan_s: seconds that the server goes on without this process.
    Raises RuntimeError with the end of the server's log if it does not become ready.
    """

    def __init__(
        self, root: str, python: str, engine: str, environ: Mapping[str, str], orphan_s: float, name: str = ""
    ) -> None:
        self._stopping = threading.Event()
        self._unwell_since_s: float | None = None
        environment = environment_of(os.environ, environ)
        if "TRIDENT_HOST" not in environment:
            environment["TRIDENT_HOST"] = node_address()
        state = Path(environment.get("TRIDENT_STATE_DIR") or Path(root, ".triton"))
        state.mkdir(parents=True, exist_ok=True)
        self._log = state / f"replica-{name or os.getpid()}.log"
        child = ["sh", "-c", CHILD_COMMAND, f"{orphan_s:g}"]
        # In a session of its own and nobody's child: Ray kills the process group of a worker that was killed, and the
        # children of one that exits, which would cut every stream.
        command = ["setsid", "--fork", python, "-m", "server", "--engine", engine, "--free-ports", "--", *child]
        with self._log.open("wb") as log:
            started = subprocess.Popen(
                command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        started.wait()
        assert started.stdin is not None and started.stdout is not None
        self._stdin = started.stdin
        with started.stdout as out:
            words = out.readline().decode().split()
        if len(words) != 2:
            self._stdin.close()
            raise RuntimeError(f"the server did not start: {self._log.read_text(errors='replace')[-SHOWN_CHARS:]}")
        self.pid, self._status_file = int(words[0]), Path(words[1])
        self._supervisor = os.pidfd_open(self.pid)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    async def check_health(self) -> None:
        """Raise if the server has not served for UNWELL_S. Its supervisor asks it for tokens."""
        state = self._state()
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
        with contextlib.suppress(OSError), self._stdin:
            self._stdin.write(b"stop\n")
        self._watcher.join()
        self._log.unlink(missing_ok=True)

    def _watch(self) -> None:
        """End this process when the supervisor has ended: health checks would need three periods to see it."""
        poller = select.poll()
        poller.register(self._supervisor, select.POLLIN)
        poller.poll()
        os.close(self._supervisor)
        if not self._stopping.is_set():
            _LOG.error("the supervisor %d ended; its log is %s", self.pid, self._log)
            os._exit(1)

    def _state(self) -> str:
        try:
            return str(json.loads(self._status_file.read_text())["state"])
        except (OSError, ValueError, KeyError):
            return "without a status file"


def environment_of(worker: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the server: the worker's without Ray's, and ``own``.

    Without GPUs of its own it sees none: Ray leaves the variable unset then.
    """
    kept = {name: value for name, value in worker.items() if not name.startswith("RAY_") and name != "PYTHONPATH"}
    return {"CUDA_VISIBLE_DEVICES": "", **kept, **own}


def node_address() -> str:
    """Return the address of this machine that other nodes of Ray's cluster reach it at."""
    import ray

    return str(ray.util.get_node_ip_address())
