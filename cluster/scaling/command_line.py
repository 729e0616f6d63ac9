"""`python -m cluster scale` and `keda`: how many replicas each pool needs, printed for people or told to KEDA."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, start_http_server

from cluster.keda import external_scaler
from cluster.scaling.scaler import Scaler
from cluster.scaling.settings import Settings
from contract.errors import InvalidArgument


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    scale = commands.add_parser("scale", help="print for each pool what it has, what it needs, and why")
    keda = commands.add_parser("keda", help="serve KEDA's external scaler and the scaler's metrics")
    for command in (scale, keda):
        command.add_argument("--gateways", metavar="URL,URL", help="metrics pages; TRIDENT_SCALER_GATEWAYS")
        command.add_argument("--config", metavar="FILE", help="TOML file of the rules; TRIDENT_SCALER_CONFIG")
    scale.add_argument("--watch", action="store_true", help="again at every reading, until Ctrl-C")
    scale.add_argument("--once", action="store_true", help="the default: two readings, since the first has no rates")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING if options.command == "scale" else logging.INFO, format="%(message)s")
    try:
        settings = Settings.from_environment(os.environ, gateways=options.gateways, config=options.config)
        scaler = Scaler(settings)
        run = _serve(scaler, settings) if options.command == "keda" else _print(scaler, settings, options.watch)
        with contextlib.suppress(KeyboardInterrupt):
            return asyncio.run(run)
    except InvalidArgument as exc:
        print(f"cluster: {exc}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` reads no further; what is left in the buffer must not fail at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


async def _print(scaler: Scaler, settings: Settings, watch: bool) -> int:
    """Print the plan after two readings, or after each; return 1 if nothing is known."""
    left = asyncio.Queue[None]()
    reading = asyncio.create_task(scaler.reader.watch(lambda: left.put_nowait(None), settings.interval_s))
    try:
        for number in range(sys.maxsize if watch else 2):
            await left.get()
            scaler.step()
            if watch or number:
                print(scaler.plan(), flush=True)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return 0 if scaler.decisions else 1


async def _serve(scaler: Scaler, settings: Settings) -> int:
    """Serve KEDA and Prometheus until SIGTERM or Ctrl-C. Raises InvalidArgument: a port cannot be bound."""
    registry, loop, name = CollectorRegistry(), asyncio.get_running_loop(), "metrics_port"
    registry.register(scaler)
    try:
        page, thread = start_http_server(settings.metrics_port, settings.host, registry)
        name = "grpc_port"
        server, port = await external_scaler.start(scaler, settings.host, settings.grpc_port)
    except (OSError, RuntimeError) as exc:
        problem = f"must be a free port of {settings.host}, got {getattr(settings, name)}: {exc}"
        raise InvalidArgument(f"TRIDENT_SCALER_{name.upper()}", problem) from exc
    print(f"external scaler on {settings.host}:{port}, metrics on {settings.host}:{page.server_port}", flush=True)
    deciding = asyncio.create_task(scaler.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, deciding.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await deciding
    finally:
        await server.stop(1.0)
        page.shutdown()
        page.server_close()
        thread.join()
    return 0
