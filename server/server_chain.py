"""Several engines on one machine: a supervisor each, on ports of its own, each started by the one before it.

``--engine a,b -- COMMAND`` is the server of ``a``, whose command is the server of ``b``, whose command is COMMAND: it
runs once all are ready, and all stop together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from contract import encoder, manifest
from contract.errors import InvalidArgument
from server import ports
from server.settings import PORT_FIELDS, Settings

ENCODERS = "TRIDENT_GATEWAY_ENCODERS"
PORTS_APART = 10  # between the ports of one server and the next
SERVER = (sys.executable, "-m", "server")
STOP_S = 10.0  # of one server beyond its drain and its command: its withdrawal, errors to streams, its exit


def settings_of(engines: Sequence[str], first: Settings, free_ports: bool) -> list[Settings]:
    """Return the settings of every server.

    first: of the first engine. free_ports: the others listen on free ports, else PORTS_APART behind the one before.
    Raises: InvalidArgument for an engine that is listed twice, or a port beyond the last.
    """
    if twice := [engine for engine in engines if engines.count(engine) > 1]:
        raise InvalidArgument("TRIDENT_ENGINE", f"must name each engine once, got {twice[0]!r} twice")
    found = [first]
    for number, engine in enumerate(engines[1:], 1):
        behind = [getattr(first, name) + number * PORTS_APART for name in PORT_FIELDS]
        own = dict(zip(PORT_FIELDS, ports.free(3) if free_ports else behind, strict=True))
        found.append(Settings.model_validate({**first.model_dump(), **own, "engine": engine}))
    return found


def command_of(servers: Sequence[Settings], command: Sequence[str]) -> list[str]:
    """Return the command of the first server: the other servers, and ``command`` beside the last."""
    for server in reversed(servers[1:]):
        own = [word for name in PORT_FIELDS for word in (f"--{name.replace('_', '-')}", str(getattr(server, name)))]
        behind = ["--", *command] if command else []
        command = [*SERVER, "--engine", server.engine, "--host", server.host, *own, *behind]
    return list(command)


def drain_s_of(command: Sequence[str], drain_s: float) -> float:
    """Return for how many seconds ``command`` may drain: it and each server in it, ``drain_s`` each, in turn."""
    servers = sum(words == SERVER for words in zip(command, command[1:], command[2:], strict=False))
    return drain_s + servers * (drain_s + STOP_S)


def gateway_environment(servers: Sequence[Settings]) -> Mapping[str, str]:
    """Return how a gateway serves every engine as a model of its name. Raises NotFound, EngineFailed."""
    hosts = {server.engine: f"{server.reachable_host}:{server.grpc_port}" for server in servers}
    scraped = (f"{hosts[one.engine]}=http://{one.reachable_host}:{one.metrics_port}/metrics" for one in servers)
    encoders = [one.engine for one in servers if is_encoder(one)]
    return {
        ENCODERS: ",".join(encoders),
        "TRIDENT_GATEWAY_MODEL": servers[0].engine,
        "TRIDENT_GATEWAY_REPLICAS": ";".join(f"{engine}={url}" for engine, url in hosts.items()),
        "TRIDENT_GATEWAY_METRICS_URLS": ",".join(scraped),
        "TRIDENT_GATEWAY_MODELS": ",".join(
            f"{one.engine}={one.engines_dir / one.engine}/tokenizer.json" for one in servers
        ),
    }


def is_encoder(server: Settings) -> bool:
    """Whether its engine makes embeddings or scores. Raises NotFound, EngineFailed: it cannot be read."""
    return manifest.load(server.engines_dir / server.engine).kind in encoder.KINDS
