"""Keeps one tritonserver running: starts it, watches it, mends it, drains it, and leaves nothing behind.

Everything that happens becomes an event in one queue; :func:`server.health.decide` says what to do about it;
this module does it. At any time at most one repair is under way, and any event may overtake it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TextIO

from contract import manifest
from contract.errors import TridentError
from server import command as flags
from server import health, installation, log, ports, preflight, progress, shared_memory, status, welcome
from server.drain import Drained, drain
from server.health import State
from server.life import Life
from server.repository import read_pipeline
from server.settings import Settings
from server.tenant import Tenant

ABORT_S = 3.0
ANY_LIFE = -1  # events of our own: signals, the command
STOP_SIGNALS = {
    signal.SIGINT: "it was interrupted",
    signal.SIGTERM: "it was asked to terminate",
    signal.SIGHUP: "its terminal was closed",
}


class Supervisor:
    """Runs one server of ``settings`` until it is told to stop. Messages go to ``err``, the welcome to ``out``."""

    def __init__(self, settings: Settings, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> None:
        self._settings = settings
        self._out = out
        self._err = err
        self._shm_prefix = shared_memory.prefix(settings.grpc_port, os.getpid())
        self._status_file = status.path(settings.state_dir, settings.grpc_port)
        self._log = log.path(settings.state_dir, settings.grpc_port)
        self._record = health.Record(since_s=time.monotonic())
        self._since = status.utc_now()
        self._events: asyncio.Queue[tuple[int, health.Event | BaseException]] = asyncio.Queue()
        self._life: Life | None = None
        self._lives = 0  # number of the current life; what earlier ones still had to say is void
        self._repair: asyncio.Task[None] | None = None
        self._tenant: Tenant | None = None
        self._opened = False

    async def run(self, command: Sequence[str] = ()) -> int:
        """Serves until SIGINT, SIGTERM or the end of ``command``; returns the exit code.

        The code is ``command``'s own, 0 after a signal, 130 after a second one, 1 if the server could not be
        kept running. Raises a TridentError if it cannot even be tried: no engine, no installation, no port.
        """
        with self._prepare():
            self._catch_signals()
            try:
                return await self._serve(command)
            except asyncio.CancelledError:
                return 128 + signal.SIGINT
            finally:
                if self._tenant is not None:
                    self._tenant.kill()
                if self._life is not None:
                    await self._life.end()
                shared_memory.clean(self._shm_prefix)
                self._settings.drain_file.unlink(missing_ok=True)
                if self._record.state is not State.FAILED:
                    status.remove(self._status_file)

    def _prepare(self) -> socket.socket:
        """Checks all that can be checked before a process starts. The returned claim holds while it is open."""
        settings = self._settings
        self._engine_folder = (settings.engines_dir / settings.engine).absolute()
        preflight.check(manifest.verify(self._engine_folder), self._engine_folder)
        self._installation = installation.find(settings.tritonserver)
        self._pipeline = read_pipeline(settings.model_repository, settings.engine)
        ports.check(settings.host, settings.ports)
        claimed = ports.claim(settings.grpc_port)
        # The port is free and ours, so whoever left these is gone.
        shared_memory.clean(shared_memory.port_prefix(settings.grpc_port))
        stubs = sum(model.stubs for model in self._pipeline.models)
        shared_memory.region_bytes(stubs, shared_memory.free_bytes())
        settings.drain_file.unlink(missing_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_bytes(b"")
        return claimed

    def _catch_signals(self) -> None:
        this = asyncio.current_task()
        asked: list[int] = []

        def on_signal(signal_number: signal.Signals) -> None:
            if asked:
                this.cancel()
            asked.append(signal_number)
            self._post(health.StopAsked(STOP_SIGNALS[signal_number]))

        for signal_number in STOP_SIGNALS:
            if signal_number == signal.SIGHUP and signal.getsignal(signal_number) is signal.SIG_IGN:
                continue  # started with nohup
            asyncio.get_running_loop().add_signal_handler(signal_number, on_signal, signal_number)

    async def _serve(self, command: Sequence[str]) -> int:
        self._write_status()
        self._begin_repair(self._start(delay_s=0))
        while True:
            life, event = await self._events.get()
            if isinstance(event, BaseException):
                raise event
            if life not in (ANY_LIFE, self._lives):
                continue
            was = self._record
            self._record, action = health.decide(was, event, time.monotonic())
            if self._record == was:
                continue
            self._tell(was)
            if isinstance(event, health.BecameReady) and not self._opened:
                self._open(command)
            if isinstance(action, (health.Restart, health.Revive)):
                await self._end_repair()
                self._begin_repair(self._mend(action))
            elif isinstance(action, health.GiveUp):
                await self._end_repair()
                return 1
            elif isinstance(action, health.Drain):
                await self._end_repair()
                return await self._stop()

    def _mend(self, action: health.Restart | health.Revive) -> Coroutine[None, None, None]:
        if isinstance(action, health.Revive):
            return self._revive(action.model)
        self._lives += 1
        return self._restart(action)

    async def _restart(self, action: health.Restart) -> None:
        if action.farewell and self._life.serving:
            life, socket_name = self._life, flags.control_socket(self._shm_prefix)
            drain_file = self._settings.drain_file
            await drain(life.admin, life.traffic, socket_name, drain_file, 0, ABORT_S, action.farewell)
        await self._life.end()
        self._settings.drain_file.unlink(missing_ok=True)  # a drain's that was cut short included
        # The keeper does so too, unless it was killed itself; a crash loop must not fill /dev/shm.
        shared_memory.clean(self._shm_prefix)
        await self._start(action.delay_s)

    async def _start(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        report = partial(self._post, life=self._lives)
        try:
            self._life = Life(
                self._settings, self._installation, self._pipeline, self._engine_folder, self._shm_prefix, report
            )
        except TridentError as error:  # somebody else has filled /dev/shm
            report(health.StartFailed(str(error)))
            return
        async with progress.shown(f"starting tritonserver with engine {self._settings.engine}", self._err):
            event = await self._life.begin()
        if isinstance(event, health.StartFailed):
            await self._life.end()
        report(event)

    async def _revive(self, model: str) -> None:
        report = partial(self._post, life=self._lives)
        try:
            await self._life.revive(model)
        except TridentError as error:
            report(health.RevivalFailed(model, str(error)))
        else:
            report(health.BecameReady())

    def _begin_repair(self, repair: Coroutine[None, None, None]) -> None:
        def on_done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self._post(task.exception())  # a mistake of ours must end us; nobody else would miss the repair

        self._repair = asyncio.create_task(repair)
        self._repair.add_done_callback(on_done)

    async def _end_repair(self) -> None:
        if self._repair is not None:
            self._repair.cancel()
            await asyncio.wait({self._repair})

    async def _stop(self) -> int:
        """Ends the command if there is one, then drains and ends the server. Returns the exit code."""
        code = await self._tenant.evict() if self._tenant is not None else 0
        if self._life is None or not self._life.serving:
            return code
        settings = self._settings
        label = f"draining for up to {settings.drain_s:g} s; a second signal stops at once"
        async with progress.shown(label, self._err):
            drained = await drain(
                self._life.admin,
                self._life.traffic,
                flags.control_socket(self._shm_prefix),
                settings.drain_file,
                settings.drain_s,
                ABORT_S,
                "the server is shutting down",
            )
            await self._life.end(terminate=drained is not Drained.CUT_OFF)
        self._say(f"stopped; {drained.value}")
        return code

    def _open(self, command: Sequence[str]) -> None:
        """Ready for the first time: lets the command in, or says how to talk to the server."""
        self._opened = True
        if not command:
            print(welcome.text(self._settings), file=self._out, flush=True)
            return
        offered = {
            "TRIDENT_URL": self._settings.grpc_url,
            "TRIDENT_HTTP_URL": self._settings.http_url,
            "TRIDENT_METRICS_URL": self._settings.metrics_url,
            "TRIDENT_ADMIN_KEY": self._settings.admin_key,
            "TRIDENT_STATUS_FILE": str(self._status_file),
            "TRIDENT_TOKENIZER": str(self._engine_folder / "tokenizer.json"),
        }
        on_end = partial(self._post, health.StopAsked("its command has ended"))
        self._tenant = Tenant(command, offered, on_end, self._settings.drain_s)

    def _post(self, event: health.Event | BaseException, life: int = ANY_LIFE) -> None:
        self._events.put_nowait((life, event))

    def _tell(self, was: health.Record) -> None:
        """Says what changed, on the terminal and in the status file."""
        record = self._record
        if (record.state, record.reason) == (was.state, was.reason):
            return
        self._since = status.utc_now()
        self._write_status()
        took_s = record.since_s - was.since_s
        if record.state is State.READY:
            self._say(
                f"ready in {took_s:.1f} s at {self._settings.grpc_url} (gRPC)"
                if was.state is State.STARTING
                else f"ready again after {took_s:.1f} s"
            )
        elif record.state is State.FAILED:
            self._say(f"error: {record.reason}\nThe whole log: {self._log}")
        elif record.state is not State.DRAINING:
            self._say(record.reason)

    def _say(self, text: str) -> None:
        print(f"trident: {text}", file=self._err, flush=True)

    def _write_status(self) -> None:
        record, settings = self._record, self._settings
        status.write(
            self._status_file,
            status.Status(
                state=record.state.value,
                since=self._since,
                restarts=record.restarts,
                revivals=record.revivals,
                reason=record.reason,
                engine=settings.engine,
                grpc_url=settings.grpc_url,
                http_url=settings.http_url,
                metrics_url=settings.metrics_url,
                pid=os.getpid(),
                started=status.start_ticks(os.getpid()) or 0,
                server_pid=self._life.pid if self._life else 0,
                log=str(self._log),
            ),
        )
