"""Runs one tritonserver: starts it, watches it, restarts it after failures, drains it and leaves no process behind.

Everything that happens becomes an event in one queue; :func:`server.recovery.decide` decides what to do and this module
does it. At most one start, restart or reload is under way at any time, and every event may cancel it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from functools import partial

from contract import backend_settings, manifest, step_model
from contract.errors import TridentError
from server import (
    console,
    installation,
    ports,
    preflight,
    process,
    recovery,
    server_chain,
    shared_memory,
    status,
    triton_command,
    triton_log,
)
from server.child_command import ChildCommand
from server.drain import DrainResult, drain
from server.instance import ServerInstance
from server.recovery import State
from server.registration import Registration
from server.repository import read_pipeline, served_model
from server.settings import Settings

ANY_INSTANCE = -1  # for events that belong to no server instance: signals, the child command's exit
STOP_SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "terminal closed"}


class Supervisor:
    """Supervisor of one server. The message of a ready server goes to standard output, the rest to standard error."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._shm_prefix = shared_memory.prefix(settings.grpc_port, os.getpid())
        self._status_file = status.path(settings.state_dir, settings.grpc_port)
        self._log = triton_log.path(settings.state_dir, settings.grpc_port)
        self._record = recovery.Record(since_s=time.monotonic())
        self._since = status.utc_now()
        self._events: asyncio.Queue[tuple[int, recovery.Event | BaseException]] = asyncio.Queue()
        self._instance: ServerInstance | None = None
        self._generation = 0  # of the current instance; events of earlier ones are ignored
        self._recovery: asyncio.Task[None] | None = None  # a start, restart or reload
        self._child: ChildCommand | None = None
        self._announced = False
        self._registration: Registration | None = None

    async def run(self, command: Sequence[str] = ()) -> int:
        """Serve until SIGINT, SIGTERM, SIGHUP or the exit of ``command``.

        command: started once the server is ready.

        Returns ``command``'s exit code, 0 after a signal, 130 after the same one again, 1 if the server keeps failing.
        Raises TridentError: the server cannot be started: no engine, no installation, no port.
        """
        with self._prepare():
            self._handle_signals()
            try:
                return await self._serve(command)
            except asyncio.CancelledError:
                return 128 + signal.SIGINT
            finally:
                if self._child is not None:
                    self._child.kill()
                if self._instance is not None:
                    await self._instance.stop()
                if self._registration is not None:
                    await self._registration.close()
                shared_memory.clean(self._shm_prefix)
                self._settings.drain_file.unlink(missing_ok=True)
                if self._record.state is not State.FAILED:
                    self._status_file.unlink(missing_ok=True)

    def _prepare(self) -> socket.socket:
        """Check all that can be checked before a process starts; return the claim of the port, held while open."""
        settings = self._settings
        settings.make_state_dir()
        self._engine_folder = (settings.engines_dir / settings.engine).absolute()
        engine = self._engine = manifest.verify(self._engine_folder)
        preflight.check(engine, self._engine_folder)
        try:
            step_model.of_engine(self._engine_folder)
        except TridentError as error:
            if (self._engine_folder / step_model.FILE_NAME).exists():
                self._print(f"costs are learned from requests: {error}")
        self._installation = installation.find(settings.tritonserver)
        environ = triton_command.environment(settings, self._installation, self._engine_folder, "", os.environ)
        backend_settings.Settings.from_env(environ)  # else told by a model that does not load, after the others did
        self._pipeline = read_pipeline(settings.model_repository, settings.engine, served_model(engine.kind))
        ports.check(settings.host, settings.ports)
        claimed = ports.claim(settings.grpc_port)
        # No other supervisor has the port, so these files are left over from earlier ones.
        shared_memory.clean(shared_memory.port_prefix(settings.grpc_port))
        stubs = sum(model.stubs for model in self._pipeline.models)
        shared_memory.region_bytes(stubs, shared_memory.free_bytes())
        settings.drain_file.unlink(missing_ok=True)
        self._log.parent.mkdir(exist_ok=True)
        self._log.write_bytes(b"")
        self._started_in = settings.state_dir / f"started-{settings.engine}"
        return claimed

    def _registered_state(self) -> tuple[str, float | None]:
        """Return the state for the gateways and, of a server that starts, the seconds that its last start took more."""
        state = self._record.state
        if state in (State.READY, State.DRAINING):
            return state.value, None
        try:
            last_s = float(self._started_in.read_text())
        except (OSError, ValueError):
            return State.STARTING.value, None
        return State.STARTING.value, max(0.0, last_s - (time.monotonic() - self._record.since_s))

    def _handle_signals(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        received: set[signal.Signals] = set()

        def on_signal(signal_number: signal.Signals) -> None:
            # Ctrl-C reaches a parent server too, which then sends SIGTERM: only the same signal twice means hurry.
            if signal_number in received:
                task.cancel()
            received.add(signal_number)
            self._post(recovery.StopRequested(STOP_SIGNALS[signal_number]))

        for signal_number in STOP_SIGNALS:
            if signal_number == signal.SIGHUP and signal.getsignal(signal_number) is signal.SIG_IGN:
                continue  # started with nohup
            asyncio.get_running_loop().add_signal_handler(signal_number, on_signal, signal_number)

    async def _serve(self, command: Sequence[str]) -> int:
        self._write_status()
        self._renew_status()
        if self._settings.register_:
            fields = {
                "engine": self._engine.name,
                "manifest_sha256": manifest.sha256_file(self._engine_folder / manifest.FILE_NAME),
                "slots": self._engine.max_batch_size,
            }
            self._registration = Registration(self._settings, fields, self._registered_state, self._print)
        self._begin_recovery(self._start(delay_s=0))
        while True:
            generation, event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            if generation not in (ANY_INSTANCE, self._generation):
                continue
            before = self._record
            self._record, action = recovery.decide(before, event, time.monotonic())
            if self._record == before:
                continue
            self._publish_change(before)
            if isinstance(event, recovery.BecameReady) and not self._announced:
                if self._registration is not None:  # who waits for this one may stop another at once
                    await self._registration.told()
                self._announce(command)
            if action is not None and self._recovery is not None:
                self._recovery.cancel()
                await asyncio.wait({self._recovery})
            if isinstance(action, recovery.Reload):
                self._begin_recovery(self._reload(action.model))
            elif isinstance(action, recovery.Restart):
                self._generation += 1
                self._begin_recovery(self._restart(action))
            elif isinstance(action, recovery.GiveUp):
                return 1
            elif isinstance(action, recovery.Drain):
                return await self._stop()

    async def _restart(self, action: recovery.Restart) -> None:
        if self._instance is not None:
            if action.stream_error and self._instance.is_serving:
                await drain(self._instance, 0, action.stream_error)
            await self._instance.stop()
        self._settings.drain_file.unlink(missing_ok=True)  # also that of a drain which was cancelled
        # The reaper removes these files, unless it was killed itself; a crash loop must not fill /dev/shm.
        shared_memory.clean(self._shm_prefix)
        await self._start(action.delay_s)

    async def _start(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        report = partial(self._post, generation=self._generation)
        try:
            instance = self._instance = ServerInstance(
                self._settings, self._installation, self._pipeline, self._engine_folder, self._shm_prefix, report
            )
        except TridentError as error:  # another process has filled /dev/shm
            report(recovery.StartFailed(str(error)))
            return
        async with console.progress(f"starting tritonserver with engine {self._settings.engine}", sys.stderr):
            event = await instance.start()
        if isinstance(event, recovery.StartFailed):
            await instance.stop()
        report(event)

    async def _reload(self, model: str) -> None:
        assert self._instance is not None
        report = partial(self._post, generation=self._generation)
        try:
            await self._instance.reload(model)
        except TridentError as error:
            report(recovery.ServerFailed(f"{model} reload failed ({error})"))
        else:
            report(recovery.BecameReady())

    def _begin_recovery(self, work: Coroutine[None, None, None]) -> None:
        def on_done(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._post(error)  # a defect of this program ends it

        self._recovery = asyncio.create_task(work)
        self._recovery.add_done_callback(on_done)

    async def _stop(self) -> int:
        """Withdraw from the gateways, end the child command, drain and stop the server; return the exit code."""
        if self._registration is not None:
            await self._registration.withdraw()
        code = await self._child.terminate() if self._child is not None else 0
        if self._instance is None or not self._instance.is_serving:
            return code
        drain_s = self._settings.drain_s
        async with console.progress(
            f"draining for up to {drain_s:g} s; the same signal again stops at once", sys.stderr
        ):
            result = await drain(self._instance, drain_s, "the server is shutting down")
            await self._instance.stop(terminate=result is not DrainResult.CUT_OFF)
        self._print(f"stopped; {result.value}")
        return code

    def _announce(self, command: Sequence[str]) -> None:
        """Start the child command, or print the endpoints, when the server is ready for the first time."""
        self._announced = True
        if not command:
            print(console.ready_message(self._settings, self._pipeline.name), flush=True)
            return
        variables = {
            "TRIDENT_URL": self._settings.grpc_url,
            "TRIDENT_HTTP_URL": self._settings.http_url,
            "TRIDENT_METRICS_URL": self._settings.metrics_url,
            "TRIDENT_ADMIN_KEY": self._settings.admin_key,
            "TRIDENT_STATUS_FILE": str(self._status_file),
            "TRIDENT_TOKENIZER": str(self._engine_folder / "tokenizer.json"),
        }
        for_gateway = {
            "TRIDENT_GATEWAY_REPLICAS": self._settings.grpc_url,
            "TRIDENT_GATEWAY_METRICS_URLS": f"{self._settings.grpc_url}={self._settings.metrics_url}",
            "TRIDENT_GATEWAY_MODEL": self._settings.engine,
        }
        variables |= {name: value for name, value in for_gateway.items() if name not in os.environ}
        on_exit = partial(self._post, recovery.StopRequested("child command exited"))
        drain_s = server_chain.drain_s_of(command, self._settings.drain_s)
        self._child = ChildCommand(command, variables, on_exit, drain_s)

    def _post(self, event: recovery.Event | BaseException, generation: int = ANY_INSTANCE) -> None:
        self._events.put_nowait((generation, event))

    def _publish_change(self, before: recovery.Record) -> None:
        """Print a change of state and write it to the status file."""
        record = self._record
        if (record.state, record.reason) == (before.state, before.reason):
            return
        self._since = status.utc_now()
        try:
            self._write_status()
        except OSError as exc:  # full disk: the server serves on
            self._print(f"the status file cannot be written and says what was before: {exc}")
        if self._registration is not None and record.state is not State.DRAINING:  # whose withdrawal is awaited
            self._registration.changed()
        elapsed_s = record.since_s - before.since_s
        if record.state is State.READY and before.state is State.STARTING:
            with contextlib.suppress(OSError):  # full disk
                self._started_in.write_text(f"{elapsed_s:.3f}\n")
            self._print(f"ready in {elapsed_s:.1f} s at {self._settings.grpc_url} (gRPC)")
        elif record.state is State.READY:
            self._print(f"ready again after {elapsed_s:.1f} s")
        elif record.state is State.FAILED:
            self._print(f"error: {record.reason}\nFull log: {self._log}")
        elif record.state is not State.DRAINING:
            self._print(record.reason)

    def _print(self, text: str) -> None:
        print(f"trident: {text}", file=sys.stderr, flush=True)

    def _renew_status(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._status_file)
        asyncio.get_running_loop().call_later(status.BEAT_S, self._renew_status)

    def _write_status(self) -> None:
        record, settings = self._record, self._settings
        status.write(
            self._status_file,
            status.Status(
                state=record.state.value,
                since=self._since,
                **{name: getattr(record, name) for name in ("restarts", "reloads", "reason")},
                **{name: getattr(settings, name) for name in ("engine", "grpc_url", "http_url", "metrics_url")},
                pid=os.getpid(),
                started=process.start_ticks(os.getpid()) or 0,
                server_pid=self._instance.pid if self._instance else 0,
                log=str(self._log),
            ),
        )
