"""``python -m gateway``: serves until SIGTERM or Ctrl-C, then drains; ``command_line`` has the other commands."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from clients.terminal import forget_stdout
from contract.errors import InvalidArgument, TridentError
from gateway import app, banner, command_line, signals, workers
from gateway.admission.hub_link import HubLink
from gateway.api import http_connection, monitoring
from gateway.api.kserve import KServeEndpoint
from gateway.api.picker.endpoint import EndpointPicker
from gateway.config import pools
from gateway.config.configuration import Configuration
from gateway.config.settings import Settings, unknown, variable
from gateway.service import Service
from gateway.telemetry import logs

_LOG = logging.getLogger("gateway")
OPEN_FILES = 65_536
BACKLOG = 4096
SOCKETS_PER_REQUEST = 2  # the caller's, and the upstream's where it overflows
OTHER_FILES = 256


class HttpServer(uvicorn.Server):
    """uvicorn.Server without its signal handlers: ``serve`` decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(application: Callable[..., Any], settings: Settings, **options: Any) -> HttpServer:
    """Return an HTTP server of ``application``. options: of ``uvicorn.Config``."""
    options |= {"http": http_connection.bounded(settings.header_timeout_s), "ws": "none", "log_config": None}
    options |= {"access_log": False, "server_header": False, "proxy_headers": False, "timeout_graceful_shutdown": 5}
    return HttpServer(uvicorn.Config(application, **options))


def monitoring_server(service: Service) -> HttpServer:
    """Return the server of the monitoring endpoint; a worker's is a Unix socket that its parent reads."""
    settings, link = service.settings, service.link
    place: dict[str, Any] = {"host": settings.monitoring_host, "port": settings.own_metrics_port}
    if link is not None:
        place = {"uds": str(workers.socket_of(link.folder, link.number))}
    return _server(monitoring.build(service), settings, lifespan="off", **place)


def http_server(service: Service) -> HttpServer:
    """Return the server of the OpenAI endpoint."""
    settings = service.settings
    return _server(
        app.build(service),
        settings,
        host=settings.host,
        port=settings.http_port,
        lifespan="on",
        backlog=BACKLOG,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=settings.tls_client_ca,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls_client_ca else ssl.CERT_NONE,
    )


async def serve(service: Service) -> None:
    """Serve all endpoints until a signal, then drain until done or until the same signal; return when all is closed."""
    settings, stop, hurry = service.settings, asyncio.Event(), asyncio.Event()
    signals.handle(asyncio.get_running_loop(), service.configuration, lambda again: (hurry if again else stop).set())
    link = service.link
    if link is not None:
        link.lost = stop.set
        await link.start()
    # A worker listens when it has started: until then the others get its connections.
    backlog = BACKLOG if link is None else None
    http, listening = http_server(service), listen(settings.host, settings.http_port, "http_port", backlog)
    scraped, scraped_at = monitoring_server(service), None
    serving = [asyncio.create_task(http.serve([listening]))]
    await _started(http, serving[0])
    kserve, picker = KServeEndpoint(service), EndpointPicker(service)
    try:
        if link is None:
            scraped_at = listen(settings.monitoring_host, settings.own_metrics_port, "monitoring_port")
        serving.append(asyncio.create_task(scraped.serve([scraped_at] if scraped_at else None)))
        await _started(scraped, serving[1])
        await kserve.start()
        await picker.start()
    except InvalidArgument:
        http.should_exit = scraped.should_exit = True
        await asyncio.gather(*serving)
        raise
    if link is not None:
        link.frames.send("ready")
    elif scraped_at is not None:
        ports = listening.getsockname()[1], kserve.port, scraped_at.getsockname()[1]
        _announce(settings, *ports, service.configuration)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((stopping, serving[0]), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    _LOG.info("draining for up to %g s", settings.drain_s)
    draining, hurrying = asyncio.create_task(service.drain(settings.drain_s)), asyncio.create_task(hurry.wait())
    await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    cut = await (draining if draining.done() else service.drain(0.0))
    draining.cancel()
    if cut:
        _LOG.warning("%d generations were cut off", cut)
    await asyncio.gather(kserve.stop(), picker.stop())
    http.should_exit = scraped.should_exit = True
    await asyncio.gather(*serving)


def _announce(
    settings: Settings, http_port: int, grpc_port: int, monitoring_port: int, configuration: Configuration
) -> None:
    http, grpc = (banner.address(settings.host, port) for port in (http_port, grpc_port))
    print("http", http, "grpc", grpc)  # programs read this line, people the rest
    http, grpc = (banner.reachable(settings.host, port) for port in (http_port, grpc_port))
    monitoring_address = banner.reachable(settings.monitoring_host, monitoring_port)
    keyless, models = configuration.keyless, tuple(configuration.policy.models)
    print(banner.text(settings, http, grpc, monitoring_address, keyless=keyless, models=models), flush=True)


async def serve_with_workers(settings: Settings, configuration: Configuration) -> int:
    """Serve with several processes until a signal; return the exit code."""
    held = [_hold(settings.host, getattr(settings, name), name) for name in ("http_port", "grpc_port")]
    http_port, grpc_port = (one.getsockname()[1] for one in held)
    scraped_at = listen(settings.monitoring_host, settings.own_metrics_port, "monitoring_port")
    parent = workers.Workers(settings, configuration, http_port, grpc_port)
    configuration.changed = parent.reload
    signals.handle(asyncio.get_running_loop(), configuration, lambda again: parent.stop())
    monitored = _server(parent.monitoring(), settings, lifespan="off")
    monitoring_port, serving = scraped_at.getsockname()[1], asyncio.create_task(monitored.serve([scraped_at]))
    try:
        if not await parent.start():
            return 2
        _announce(settings, http_port, grpc_port, monitoring_port, configuration)
        if not settings.redis:
            text = (
                "without %s a retry with an idempotency-key finds its stream, and a cached response is found, at the "
                "same one of %d workers only; budgets, caps, queues and slots are shared"
            )
            _LOG.warning(text, variable("redis"), settings.workers)
        await parent.wait()
        return 0
    finally:
        monitored.should_exit = True
        await serving
        await parent.close()
        for one in held:
            one.close()


async def _started(server: HttpServer, serving: asyncio.Task) -> None:
    """Raises SystemExit if it ends before it has started."""
    while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has a flag and no event
        await asyncio.sleep(0.01)
    if serving.done():
        await serving
        raise SystemExit(1)


def _hold(host: str, port: int, name: str) -> socket.socket:
    """Return a socket with a port that only this program's workers can listen at. Raises as ``listen``."""
    listen(host, port, name).close()  # fails if another program listens, which is no error with SO_REUSEPORT
    return listen(host, port, name, None)


def listen(host: str, port: int, name: str, backlog: int | None = BACKLOG) -> socket.socket:
    """Return a listening socket. name: of the setting with the port. backlog: None binds only, and lets other processes
    listen there as well. Raises InvalidArgument where that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if backlog is None:
            held = socket.socket(family)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((host, port))
            return held
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as exc:
        raise InvalidArgument(variable(name), f"cannot listen at {host}:{port}: {exc.strerror or exc}") from exc


def raise_open_files(max_in_flight: int) -> None:
    """Raises the limit of open files as far as the system allows; warns if ``max_in_flight`` requests need more."""
    with contextlib.suppress(ValueError, OSError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        target = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        limit = max(soft, target)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        needed = SOCKETS_PER_REQUEST * max_in_flight + OTHER_FILES
        if limit < needed:
            setting = f"{variable('max_in_flight')}={max_in_flight}"
            text = "too few open files are allowed: %d, and %s may need %d; `ulimit -Hn` raises it"
            _LOG.warning(text, limit, setting, needed)


def run_in_batches() -> None:
    """Use SCHED_BATCH: threads do not preempt each other at wake-up, which costs 10 % less CPU per token."""
    with contextlib.suppress(AttributeError, OSError):  # not on Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def collect_rarely() -> None:
    """Make garbage collection rare: with thousands of live streams a full collection stalls the event loop."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def main() -> int:
    arguments = command_line.parse(sys.argv[1:])
    try:
        if arguments.run is not None:
            arguments.run(arguments)
            sys.stdout.flush()
            return 0
        settings = Settings.from_environment(os.environ)
        configuration = Configuration(settings.config, os.environ, pools.of(settings))
        configuration.stored_keys = bool(settings.key_store)
        link = None
        if arguments.worker:  # as ``workers`` names it
            number, descriptor, folder = arguments.worker.split(":", 2)
            link = HubLink(int(number), socket.socket(fileno=int(descriptor)), Path(folder))
        serving: Callable[[], Coroutine[Any, Any, int | None]]
        if settings.workers > 1 and link is None:
            serving = partial(serve_with_workers, settings, configuration)
        else:
            serving = partial(serve, Service(settings, configuration, link=link))
    except TridentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` reads no further
        forget_stdout()
        return 0
    logs.configure(settings.log_level, settings.log_format)
    for problem in unknown(os.environ):
        _LOG.warning("%s", problem)
    raise_open_files(settings.max_in_flight)
    run_in_batches()
    collect_rarely()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        return asyncio.run(serving()) or 0
    except InvalidArgument as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
