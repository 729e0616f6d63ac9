"""One server instance: starts tritonserver, waits until it generates a token, and watches it until it is stopped.

The supervisor makes a new instance for every restart. After readiness, failures are reported as events; an exception
is a defect of this program.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract import thread_dump
from contract.errors import EngineFailed, TridentError
from server import (
    hang_detection,
    liveness_probe,
    process,
    recovery,
    server_metrics,
    shared_memory,
    stubs,
    triton_command,
    triton_log,
)
from server.admin import AdminClient, fetch
from server.installation import Installation
from server.liveness_probe import Outcome
from server.process import TritonProcess
from server.repository import Model, Pipeline
from server.server_metrics import ServerMetrics
from server.settings import Settings

POLL_INTERVAL_S = 0.05
ZOMBIE_POLL_INTERVAL_S = 0.5
# A stub that exited and that tritonserver has not waited for by then: tritonserver waits for its first message. Where a
# model's own code failed, tritonserver reports the failure and waits for the stub within milliseconds.
FAILED_LAUNCH_S = 2.0
# Pause after a failed probe: shorter than the interval, long enough for an engine to recover by itself.
RETRY_PROBE_S = 3.0
# Models finalize within a moment of SIGTERM; tritonserver then takes seconds for its own exit.
TERM_GRACE_S = 0.5
# Time for the stubs of a reloaded model to finish their requests and exit. Triton 2.51 waits forever for the healthy
# one of two where the other was killed.
UNLOAD_GRACE_S = 5.0


class ServerInstance:
    """A tritonserver and its stubs.

    pid: of tritonserver; 0 before :meth:`start` and after :meth:`stop`.
    model: that every client can call.
    control_socket: name of the engine's.
    drain_file: while it exists, the tokenizers refuse requests.
    """

    def __init__(
        self,
        settings: Settings,
        installation: Installation,
        pipeline: Pipeline,
        engine_folder: Path,
        shm_prefix: str,
        report: Callable[[recovery.Event | BaseException], None],
    ) -> None:
        self.admin = AdminClient(settings.http_url, settings.admin_key)
        self.model, self.drain_file = pipeline.name, settings.drain_file
        self.control_socket = triton_command.control_socket(shm_prefix)
        self._settings = settings
        self._pipeline = pipeline
        self._report = report
        self._shm_prefix = shm_prefix
        self._log = triton_log.path(settings.state_dir, settings.grpc_port)
        backends = shared_memory.shell_safe(installation.link_backends(settings.state_dir), "backends", shm_prefix)
        models = shared_memory.shell_safe(settings.model_repository, "models", shm_prefix)
        shm_bytes = shared_memory.region_bytes(sum(m.stubs for m in pipeline.models), shared_memory.free_bytes())
        self._command = triton_command.arguments(
            settings.model_copy(update={"model_repository": models}),
            installation,
            backends,
            shm_prefix,
            shm_bytes,
            pipeline.names,
        )
        self._environ = triton_command.environment(settings, installation, engine_folder, shm_prefix, os.environ)
        self._process: TritonProcess | None = None
        self._exits = stubs.ExitWatcher(self._on_stub_exit)
        self._heartbeats: hang_detection.HeartbeatListener | None = None
        self._tasks: list[asyncio.Task[None]] = []  # probes and hang detection, from readiness to the stop
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it will not become ready
        self._ready = False
        self._zombies_polled_s = 0.0
        self._zombies: dict[int, float] = {}  # pid of a child that exited → when it was first seen
        self._metrics: ServerMetrics | None = None  # of the last probe
        self._hung: set[int] = set()  # pids of stubs that hang
        self._unloaded: dict[stubs.Stub, float] = {}  # of a reloaded model → when it is killed, in monotonic seconds
        # Models with a stub that hangs or exited; each is reported once until it is reloaded.
        self._reported_hung: set[str] = set()
        self._reported_exited: set[str] = set()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def is_serving(self) -> bool:
        """Whether it became ready and tritonserver still runs, so that there may be streams in flight."""
        return self._ready and self._process is not None and not self._process.exited.done()

    async def metrics(self) -> ServerMetrics:
        """Scrape tritonserver's metrics. Raises TridentError: it does not answer."""
        text = await asyncio.to_thread(fetch, self._settings.metrics_url, timeout_s=self._settings.canary_timeout_s)
        return server_metrics.parse(text.decode(), *self._pipeline.last)

    async def start(self) -> recovery.BecameReady | recovery.StartFailed:
        """Start tritonserver; return once a liveness probe passed or the start has failed."""
        log_start = self._log.stat().st_size
        settings = self._settings
        self._heartbeats = hang_detection.HeartbeatListener(
            self.control_socket, settings.stall_s, settings.step_limit_s, self._on_engine_hung
        )
        self._process = TritonProcess.start(self._command, self._environ, self._log, self._shm_prefix)
        self._process.exited.add_done_callback(self._on_exit)
        readiness = asyncio.create_task(self._wait_until_ready())
        either: set[asyncio.Future[Any]] = {readiness, self._failure}
        try:
            await asyncio.wait(either, timeout=settings.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            readiness.cancel()
        if readiness.done() and not self._failure.done():
            readiness.result()
            self._ready = True
            self._metrics = await self._metrics_or_none()
            for work in (self._keep_probing(), self._detect_hangs(self._heartbeats)):
                self._tasks.append(asyncio.create_task(work))
                self._tasks[-1].add_done_callback(self._on_task_end)
            return recovery.BecameReady()
        reason = self._failure.result() if self._failure.done() else f"no token in {settings.start_timeout_s:g} s"
        crashed = self._process.exited.done() and self._process.exited.result() > 128
        return recovery.StartFailed(f"{reason}\n{triton_log.errors(self._log, log_start)}".rstrip(), crashed)

    async def reload(self, model: str) -> None:
        """Reload ``model``, whose stub exited or hung, alone. Raises TridentError: it or a probe fails."""
        self._exits.remove([stub for stub in self._exits.watched if stub.model == model])
        self._reported_exited.add(model)  # until it is loaded it has too few
        for stub in stubs.find(self.pid):
            if stub.pid in self._hung:  # Triton would wait for it to finalize
                process.kill(stub.pid)
            elif stub.model == model:
                self._unloaded[stub] = time.monotonic() + UNLOAD_GRACE_S
        # A load alone does nothing: Triton considers the model loaded and its files unchanged.
        # Until the load is done the ensemble is unavailable and readiness fails.
        await self.admin.unload(model)
        await self.admin.load(model, self._settings.start_timeout_s)
        self._reported_exited.discard(model)
        self._reported_hung.discard(model)
        self._watch_stubs()
        problem = await self._probe()
        if problem:
            raise EngineFailed(problem)

    async def stop(self, terminate: bool = False) -> None:
        """End tritonserver and its descendants. terminate: by SIGTERM first, so that idle models finalize."""
        for task in self._tasks:
            task.cancel()
        if self._heartbeats is not None:
            self._heartbeats.close()
        self._exits.close()
        if self._process is None:
            return
        self._process.exited.remove_done_callback(self._on_exit)
        if terminate:
            self._process.terminate()
            await asyncio.wait({self._process.exited}, timeout=TERM_GRACE_S)
        await self._process.kill()
        self._process = None

    async def _wait_until_ready(self) -> None:
        while not await self.admin.is_ready():
            self._check_for_failed_launches()
            await asyncio.sleep(POLL_INTERVAL_S)
        self._watch_stubs()
        # Clients that reconnect at once may fill every slot before the probe: a server that serves them is ready.
        before = None
        while True:
            if before is None or before.steps is None:  # tritonserver opens its metrics port after it is ready
                before = await self._metrics_or_none()
            result = await liveness_probe.probe(self._settings, self.model)
            if liveness_probe.passes(result, before, await self._metrics_or_none()):
                return
            if result.outcome is Outcome.FAILED:
                self._fail_start(f"the models loaded, but the first request failed: {result.reason}")
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _keep_probing(self) -> None:
        pause_s = self._settings.canary_interval_s
        while True:
            await asyncio.sleep(pause_s)
            self._watch_stubs()  # a model reloaded by an operator has new stubs
            problem = await self._probe()
            self._report(recovery.ProbeFailed(problem) if problem else recovery.ProbePassed())
            pause_s = min(pause_s, RETRY_PROBE_S) if problem else self._settings.canary_interval_s

    async def _probe(self) -> str:
        """Send one liveness probe; return what is wrong with the server, or ""."""
        result = await liveness_probe.probe(self._settings, self.model)
        before, self._metrics = self._metrics, await self._metrics_or_none()
        return "" if liveness_probe.passes(result, before, self._metrics) else result.reason

    async def _metrics_or_none(self) -> ServerMetrics | None:
        try:
            return await self.metrics()
        except TridentError:
            return None

    async def _detect_hangs(self, heartbeats: hang_detection.HeartbeatListener) -> None:
        """Report a server or a stub that hangs, once each."""
        settings = self._settings
        http = hang_detection.HttpWatch(settings.http_url, self.pid, settings.stall_s, settings.step_limit_s)
        polling = asyncio.create_task(http.poll())
        try:
            while True:
                problem = http.problem()
                if problem:
                    self._report(recovery.ServerFailed(f"tritonserver hangs ({problem})"))
                    return
                running = stubs.find(self.pid)
                for stub, reason in heartbeats.hung(running):
                    # A stub waits for a tritonserver that hangs, and may count as hung before it.
                    if stub.pid not in self._hung and not http.is_silent:
                        self._hung.add(stub.pid)
                        self._on_stub_hung(stub, reason, running)
                self._kill_unloaded(running)
                await asyncio.sleep(hang_detection.POLL_INTERVAL_S)
        finally:
            polling.cancel()

    def _kill_unloaded(self, running: list[stubs.Stub]) -> None:
        """Kill stubs of reloaded models that did not exit in time."""
        self._unloaded = {stub: kill_s for stub, kill_s in self._unloaded.items() if stub in running}
        for stub, kill_s in self._unloaded.items():
            if time.monotonic() >= kill_s and stubs.is_replaced(stub, running):
                process.kill(stub.pid)

    def _on_stub_hung(self, stub: stubs.Stub, reason: str, running: list[stubs.Stub]) -> None:
        if stub.model in self._reported_hung or stubs.is_replaced(stub, running):
            # Its model is being reloaded or has been, and Triton only waits for this process to exit.
            self._exits.remove([stub])
            process.kill(stub.pid)
            return
        self._reported_hung.add(stub.model)
        thread_dump.request(stub.pid)
        problem = f"{stub.model} process hangs ({stub.instance}: {reason})"
        self._report(recovery.StubFailed(stub.model, self._pipeline[stub.model].streams, problem))

    def _on_engine_hung(self, pid: int, reason: str) -> None:
        if self._ready and pid in {stub.pid for stub in self._exits.watched}:
            self._report(recovery.ServerFailed(reason, stream_error=reason))

    def _check_for_failed_launches(self) -> None:
        """Fail the start if a stub exited before its first message: Triton waits for it and leaves it a zombie."""
        now_s = time.monotonic()
        if now_s - self._zombies_polled_s < ZOMBIE_POLL_INTERVAL_S:
            return
        self._zombies_polled_s = now_s
        self._zombies = {pid: self._zombies.get(pid, now_s) for pid in process.zombie_children(self.pid)}
        if any(now_s - since_s >= FAILED_LAUNCH_S for since_s in self._zombies.values()):
            self._fail_start("the process of a Python model exited before it could load the model")

    def _watch_stubs(self) -> None:
        """Watch all running stubs; report a model that has fewer than it should."""
        running = stubs.find(self.pid)
        self._exits.add(set(running) - self._unloaded.keys())  # those of a reloaded model are to exit
        for model in self._pipeline.models:
            if sum(stub.model == model.name for stub in running) < model.stubs:
                self._report_stub_exit(model)

    def _on_stub_exit(self, exited: stubs.Stub) -> None:
        running = stubs.find(self.pid)
        if stubs.is_replaced(exited, running):
            self._exits.add(set(running) - self._unloaded.keys())
            return
        for model in self._pipeline.models:
            if model.name == exited.model:
                self._report_stub_exit(model)

    def _report_stub_exit(self, model: Model) -> None:
        if not process.is_running(self.pid):
            return  # tritonserver's own exit, which is reported, ended its stubs
        codes = map(process.exit_code, process.zombie_children(self.pid))  # tritonserver does not reap them
        how = " or ".join(recovery.describe_exit(code) for code in codes if code is not None)
        problem = f"{model.name} process exited{how and f' with {how}'}"
        if not self._ready:
            self._fail_start(problem)
        elif model.name not in self._reported_exited:
            self._reported_exited.add(model.name)
            self._report(recovery.StubFailed(model.name, model.streams, problem))

    def _on_exit(self, exited: asyncio.Future[int]) -> None:
        self._exits.close()
        problem = f"tritonserver exited with {recovery.describe_exit(exited.result())}"
        if self._ready:
            self._report(recovery.ServerFailed(problem))
        else:
            self._fail_start(problem)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._report(error)  # otherwise the server would run unwatched

    def _fail_start(self, reason: str) -> None:
        if not self._failure.done():
            self._failure.set_result(reason)
