"""One life of a server: from launch to its first token, with an eye on it until the end.

A supervisor sees several. What happens to a life after it became ready is reported as an event; an exception is a
mistake of ours.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from contract.errors import EngineFailed, TridentError
from server import canary, command, liveness, log, process, shared_memory, shell_paths, stubs, traffic
from server.admin import Admin, fetch
from server.health import (
    BecameReady,
    CanaryFailed,
    CanaryPassed,
    EngineHung,
    Event,
    ServerExited,
    ServerHung,
    StartFailed,
    StubDied,
    StubHung,
    ending,
)
from server.installation import Installation
from server.process import Server
from server.repository import Model, Pipeline
from server.settings import Settings

LOOK_EVERY_S = 0.05
LAUNCH_LOOK_EVERY_S = 0.5
# A stub that ended and that tritonserver has not buried for so long: it waits for it. Where a model's own code failed
# tritonserver says so itself and buries it within milliseconds.
FAILED_LAUNCH_S = 2.0
# After a failed canary the next one follows sooner, but not before an engine could have recovered by itself.
RETRY_CANARY_S = 3.0
# Models finalize within a moment of SIGTERM; the server then takes seconds over its own exit, which nobody needs.
TERMINATE_S = 0.5


class Life:
    """``pid`` of tritonserver is 0 before :meth:`begin` and after :meth:`end`."""

    def __init__(
        self,
        settings: Settings,
        installation: Installation,
        pipeline: Pipeline,
        engine_folder: Path,
        shm_prefix: str,
        report: Callable[[Event | BaseException], None],
    ) -> None:
        self.admin = Admin(settings.http_url, settings.admin_key)
        self._settings = settings
        self._pipeline = pipeline
        self._report = report
        self._shm_prefix = shm_prefix
        self._log = log.path(settings.state_dir, settings.grpc_port)
        backends = shell_paths.plain(installation.link_backends(settings.state_dir), "backends", shm_prefix)
        models = shell_paths.plain(settings.model_repository, "models", shm_prefix)
        shm_bytes = shared_memory.region_bytes(sum(m.stubs for m in pipeline.models), shared_memory.free_bytes())
        self._command = command.tritonserver(
            settings.model_copy(update={"model_repository": models}), installation, backends, shm_prefix, shm_bytes
        )
        self._environ = command.environment(settings, installation, engine_folder, shm_prefix, os.environ)
        self._server: Server | None = None
        self._watch = stubs.Watch(self._on_stub_death)
        self._heartbeats: liveness.Heartbeats | None = None
        self._tasks: list[asyncio.Task[None]] = []  # canary and watchers, from ready to the end
        self._doomed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why it will not become ready
        self._ready = False
        self._launches_looked_s = 0.0
        self._launches_failed: dict[int, float] = {}  # pid of an ended stub → when it was first seen
        self._traffic: traffic.Traffic | None = None  # when the server was last examined
        self._hung: set[int] = set()  # pids of stubs that hang
        self._mending: set[str] = set()  # models with a stub that hangs; each is reported once until it is revived
        self._dead: set[str] = set()  # models whose stub died; each is reported once until it is revived

    @property
    def pid(self) -> int:
        return self._server.pid if self._server else 0

    @property
    def serving(self) -> bool:
        """Whether it became ready and tritonserver still runs, so that there may be streams to care for."""
        return self._ready and self._server is not None and not self._server.exited.done()

    async def traffic(self) -> traffic.Traffic:
        """What the metrics page says now. TridentError if it does not answer."""
        page = await asyncio.to_thread(fetch, self._settings.metrics_url, timeout_s=self._settings.canary_timeout_s)
        return traffic.read(page.decode(), self._pipeline.last.name)

    async def begin(self) -> BecameReady | StartFailed:
        """Starts tritonserver and waits until a canary came through, or for what keeps that from happening."""
        log_start = self._log.stat().st_size
        settings = self._settings
        self._heartbeats = liveness.Heartbeats(
            command.control_socket(self._shm_prefix), settings.stall_s, settings.step_limit_s, self._on_engine_hung
        )
        self._server = Server.start(self._command, self._environ, self._log, self._shm_prefix)
        self._server.exited.add_done_callback(self._on_exit)
        birth = asyncio.create_task(self._become_ready())
        try:
            await asyncio.wait(
                {birth, self._doomed}, timeout=self._settings.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            birth.cancel()
        if birth.done() and not self._doomed.done():
            birth.result()
            self._ready = True
            self._traffic = await self._traffic_if_known()
            for work in (self._keep_asking(), self._keep_watching()):
                self._tasks.append(asyncio.create_task(work))
                self._tasks[-1].add_done_callback(self._on_task_end)
            return BecameReady()
        reason = self._doomed.result() if self._doomed.done() else f"no token in {self._settings.start_timeout_s:g} s"
        crashed = self._server.exited.done() and self._server.exited.result() > 128
        return StartFailed(f"{reason}\n{log.complaints(self._log, log_start)}".rstrip(), crashed)

    async def revive(self, model: str) -> None:
        """Loads ``model`` anew after its stub died; streams in flight go on. TridentError if it does not come back."""
        self._watch.forget([stub for stub in self._watch.watched if stub.model == model])
        for stub in stubs.find(self.pid):
            if stub.pid in self._hung:  # Triton would wait for it to finalize
                process.kill(stub.pid)
        # Loading alone does nothing: in Triton's eyes the model is loaded and its files have not changed.
        # Until the load is done the ensemble is gone and readiness says so.
        await self.admin.unload(model)
        await self.admin.load(model, self._settings.start_timeout_s)
        self._dead.discard(model)
        self._mending.discard(model)
        self._watch_stubs()
        illness = await self._examine()
        if illness:
            raise EngineFailed(illness)

    async def end(self, terminate: bool = False) -> None:
        """Nothing of this life is left on return. ``terminate``: let an idle server finalize its models first."""
        for task in self._tasks:
            task.cancel()
        if self._heartbeats is not None:
            self._heartbeats.close()
        self._watch.close()
        if self._server is None:
            return
        self._server.exited.remove_done_callback(self._on_exit)
        if terminate:
            self._server.terminate()
            await asyncio.wait({self._server.exited}, timeout=TERMINATE_S)
        await self._server.kill()
        self._server = None

    async def _become_ready(self) -> None:
        while not await self.admin.is_ready():
            self._look_for_failed_launches()
            await asyncio.sleep(LOOK_EVERY_S)
        self._watch_stubs()
        # Clients that come back at once may fill every slot before the canary: a server that serves them is ready.
        before = await self._traffic_if_known()
        while True:
            finding = await canary.ask(self._settings, self._settings.canary_timeout_s)
            if canary.is_well(finding, before, await self._traffic_if_known()):
                return
            if finding.health is canary.Health.ILL:
                self._doom(f"the models loaded, but the first request failed: {finding.reason}")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _keep_asking(self) -> None:
        pause_s = self._settings.canary_interval_s
        while True:
            await asyncio.sleep(pause_s)
            self._watch_stubs()  # whoever loaded a model anew gave it new stubs
            illness = await self._examine()
            self._report(CanaryFailed(illness) if illness else CanaryPassed())
            pause_s = min(pause_s, RETRY_CANARY_S) if illness else self._settings.canary_interval_s

    async def _examine(self) -> str:
        """Asks one canary; returns what is wrong with the server, "" if nothing is."""
        finding = await canary.ask(self._settings, self._settings.canary_timeout_s)
        before, self._traffic = self._traffic, await self._traffic_if_known()
        return "" if canary.is_well(finding, before, self._traffic) else finding.reason

    async def _traffic_if_known(self) -> traffic.Traffic | None:
        try:
            return await self.traffic()
        except TridentError:
            return None

    async def _keep_watching(self) -> None:
        """Reports a server or a stub that hangs, once each."""
        settings = self._settings
        server = liveness.Responding(settings.http_url, self.pid, settings.stall_s, settings.step_limit_s)
        asking = asyncio.create_task(server.watch())
        try:
            while True:
                problem = server.problem()
                if problem:
                    self._report(ServerHung(problem))
                    return
                living = stubs.find(self.pid)
                for stub, reason in self._heartbeats.hung(living):
                    if stub.pid not in self._hung:
                        self._hung.add(stub.pid)
                        self._on_stub_hang(stub, reason, living)
                await asyncio.sleep(liveness.LOOK_EVERY_S)
        finally:
            asking.cancel()

    def _on_stub_hang(self, stub: stubs.Stub, reason: str, living: list[stubs.Stub]) -> None:
        if stub.model in self._mending or stubs.replaced(stub, living):
            # Its model is being loaded anew, or has been, and only the end of this process is still waited for.
            self._watch.forget([stub])
            process.kill(stub.pid)
            return
        self._mending.add(stub.model)
        self._report(StubHung(stub.model, self._pipeline[stub.model].streams, f"{stub.instance}: {reason}"))

    def _on_engine_hung(self, pid: int, reason: str) -> None:
        if self._ready and pid in {stub.pid for stub in self._watch.watched}:
            self._report(EngineHung(reason))

    def _look_for_failed_launches(self) -> None:
        """Triton does not notice a stub that ends before it speaks: it waits for it, and leaves it a zombie."""
        now_s = time.monotonic()
        if now_s - self._launches_looked_s < LAUNCH_LOOK_EVERY_S:
            return
        self._launches_looked_s = now_s
        ended = process.zombies_of(self.pid)
        self._launches_failed = {pid: self._launches_failed.get(pid, now_s) for pid in ended}
        if any(now_s - since_s >= FAILED_LAUNCH_S for since_s in self._launches_failed.values()):
            self._doom("the process of a Python model ended before it could load the model")

    def _watch_stubs(self) -> None:
        """Watches all stubs there are now; one that should be there and is not has died unseen."""
        found = stubs.find(self.pid)
        self._watch.add(found)
        for model in self._pipeline.models:
            if sum(stub.model == model.name for stub in found) < model.stubs:
                self._mourn(model)

    def _on_stub_death(self, dead: stubs.Stub) -> None:
        living = stubs.find(self.pid)
        if stubs.replaced(dead, living):
            self._watch.add(living)
            return
        for model in self._pipeline.models:
            if model.name == dead.model:
                self._mourn(model)

    def _mourn(self, model: Model) -> None:
        if not process.is_alive(self.pid):
            return  # it took its stubs along, and its own end is reported
        if not self._ready:
            self._doom(f"the {model.name}'s process died")
        elif model.name not in self._dead:
            self._dead.add(model.name)
            self._report(StubDied(model.name, model.streams))

    def _on_exit(self, exited: asyncio.Future[int]) -> None:
        self._watch.close()
        if self._ready:
            self._report(ServerExited(exited.result()))
        else:
            self._doom(f"tritonserver ended with {ending(exited.result())}")

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._report(task.exception())  # a mistake of ours; unseen it would leave nobody watching

    def _doom(self, reason: str) -> None:
        if not self._doomed.done():
            self._doomed.set_result(reason)
