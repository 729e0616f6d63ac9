"""The parent of several workers: starts them, restarts those that end, drains them, and serves their metrics as one.

Every worker is a process that listens at the same ports (SO_REUSEPORT: the kernel draws the worker of a connection).
The parent has the caps, budgets and queues (``admission/hub.py``) and no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admission.hub import Hub
from gateway.config.configuration import Configuration
from gateway.config.settings import Settings, variable
from gateway.usage.store import UsageStore
from gateway.worker_metrics import WorkerMetrics

_LOG = logging.getLogger("gateway")
RESTART_S = 0.5, 10.0  # the pause before a worker is restarted: at first, and at most
STEADY_S = 30.0  # a worker that ran for so long is restarted after the first pause again
SILENT_S = 30.0  # a worker whose event loop did nothing for so long is killed
READ_EVERY_S = 5.0
ANSWER_S = 0.8  # a worker that takes longer is missing on a page, with what was last read from it


def socket_of(folder: Path, number: int) -> Path:
    """Return the Unix socket at which a worker serves its own metrics and health."""
    return folder / f"worker-{number}"


class Workers:
    """The workers of one gateway, at these ports."""

    def __init__(self, settings: Settings, configuration: Configuration, http_port: int, grpc_port: int) -> None:
        self._settings, self._ports = settings, (http_port, grpc_port)
        self._folder = Path(tempfile.mkdtemp(prefix="trident-gateway-"))
        lease_s = configuration.policy.lease_s(settings.request_timeout_s)
        here = settings.usage_db and not configuration.policy.budgets.redis  # whether it keeps days and months
        database = UsageStore(settings) if here else None
        self._hub = Hub(settings.max_in_flight, lease_s, self._ready, database)
        self._metrics = WorkerMetrics()
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._serving: set[int] = set()
        self._started = asyncio.Event()  # all of them, once
        self._tasks: list[asyncio.Task] = []
        self._stopping = False

    async def start(self) -> bool:
        """Start all workers; return whether each serves."""
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(self._settings.workers)]
        self._tasks += [asyncio.create_task(self._hub.run()), asyncio.create_task(self._watch())]
        started = asyncio.create_task(self._started.wait())
        await asyncio.wait((started, *self._tasks), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        return self._started.is_set()

    def stop(self) -> None:
        """Tell all workers to drain; the second call ends their streams at once."""
        self._stopping = True
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    def reload(self) -> None:
        """Tell all workers to read the configuration file again; one that still starts reads it anyway."""
        for number in self._serving:
            with contextlib.suppress(ProcessLookupError):
                self._processes[number].send_signal(signal.SIGHUP)

    async def wait(self) -> None:
        """Return when all workers have ended for good."""
        await asyncio.gather(*self._tasks[: self._settings.workers])

    async def close(self) -> None:
        self.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await self._hub.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def monitoring(self) -> Starlette:
        """Return the application of the monitoring listener: as each worker has it, for all of them."""

        async def metrics(request: Request) -> Response:
            await self._read_metrics()
            return Response(self._metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

        async def health(request: Request) -> Response:
            """Respond as the worker that is best off."""
            found = await asyncio.gather(*(self._get(number, request.url.path) for number in self._processes))
            status, body = min((answer for answer in found if answer[0]), default=(503, b""))
            kind = "text/plain" if request.url.path.endswith("live") else "application/json"
            return Response(body, status, {"retry-after": "1"} if status == 503 else {}, media_type=kind)

        return Starlette(routes=[Route("/metrics", metrics), Route("/health/{kind}", health)])

    async def _keep(self, number: int) -> None:
        """Run a worker, and run it again when it ends, until the gateway stops. It returns if one never served."""
        pause_s, most_s = RESTART_S
        while not self._stopping:
            began_s = time.monotonic()
            code = await self._run(number)
            self._metrics.end(number)
            if self._stopping or not self._started.is_set():
                return
            pause_s = RESTART_S[0] if time.monotonic() - began_s > STEADY_S else min(2 * pause_s, most_s)
            _LOG.error("worker %d ended with code %d; it is restarted in %g s", number, code, pause_s)
            await asyncio.sleep(pause_s)

    async def _run(self, number: int) -> int:
        self._serving.discard(number)
        own, end = socket.socketpair()
        with contextlib.closing(end):
            place = f"{number}:{end.fileno()}:{self._folder}"
            command = (sys.executable, "-m", "gateway", "serve", "--worker", place)
            process = await asyncio.create_subprocess_exec(*command, env=self._environment(), pass_fds=[end.fileno()])
        await self._hub.attach(number, own)
        self._processes[number] = process
        if self._stopping:
            process.terminate()
        return await process.wait()

    def _environment(self) -> dict[str, str]:
        settings = self._settings
        values: dict[str, object] = {
            "http_port": self._ports[0],
            "grpc_port": self._ports[1],
            "max_bodies_bytes": max(2 * settings.max_body_bytes, settings.own_max_bodies_bytes // settings.workers),
            # In the memory of one worker no other one would find them.
            "response_db": settings.response_db or self._folder / "responses",
        }
        return os.environ | {variable(name): str(value) for name, value in values.items()}

    def _ready(self, number: int) -> None:
        self._serving.add(number)
        if len(self._serving) == self._settings.workers:
            self._started.set()

    async def _watch(self) -> None:
        """Read the metrics of all workers, which one that ends takes with it, and kill those that hang."""
        while True:
            await asyncio.sleep(READ_EVERY_S)
            await self._read_metrics()
            for number, worker in list(self._hub.workers.items()):
                if time.monotonic() - worker.heard_s > SILENT_S and number in self._serving:
                    _LOG.error("worker %d did nothing for %g s and is killed", number, SILENT_S)
                    self._processes[number].kill()

    async def _read_metrics(self) -> None:
        async def read(number: int) -> None:
            status, page = await self._get(number, "/metrics")
            there = status == 200 and number in self._hub.workers
            self._metrics.read(number, page.decode() if there else None)

        await asyncio.gather(*map(read, self._processes))

    async def _get(self, number: int, path: str) -> tuple[int, bytes]:
        """Return status and body of a worker's own answer; status 0 if it does not answer."""
        connector = aiohttp.UnixConnector(str(socket_of(self._folder, number)))
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                async with session.get(f"http://worker{path}") as answer:
                    return answer.status, await answer.read()
        return 0, b""
