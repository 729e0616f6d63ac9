"""``python -m server``: serve an engine, serve it while a command runs, or show the status of servers.

python -m server [--engine NAME] [--host H] [--grpc-port P] [--http-port P] [--metrics-port P]
python -m server --engine A,B                    serves several, each on ports of its own
python -m server [options] -- COMMAND ARG...     runs COMMAND once the server is ready; exits with its code
python -m server status [--json]                 exit code 0 if every server is ready
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict

from contract import interpreter
from contract.errors import NotFound, TridentError
from server import ports, server_chain, status
from server.recovery import State
from server.settings import PORT_FIELDS, Settings
from server.supervisor import Supervisor


def main(argv: Sequence[str]) -> int:
    options, command = split_command(argv)
    arguments = _parser().parse_args(options)
    try:
        if arguments.verb == "status":
            return _show_status(arguments.json)
        if command and shutil.which(command[0]) is None:
            raise NotFound(f"command: must be on PATH, got {command[0]!r}")
        overrides = {name: getattr(arguments, name) for name in ("host", *PORT_FIELDS)}
        if arguments.free_ports:
            overrides |= dict(zip(PORT_FIELDS, ports.free(3), strict=True))
        engines = arguments.engine.split(",")
        settings = Settings.from_environment(os.environ, **{**overrides, "engine": engines[0]})
        servers = server_chain.settings_of(engines, settings, arguments.free_ports)
        # The server before has told it that its engine is an encoder.
        if len(servers) > 1 or (server_chain.is_encoder(settings) and server_chain.ENCODERS not in os.environ):
            os.environ.update(server_chain.gateway_environment(servers))
        if len(servers) > 1:
            there = ", ".join(f"{one.engine} at {one.grpc_url} (gRPC)" for one in servers)
            print(f"trident: starting {there}", file=sys.stderr)
        return asyncio.run(Supervisor(settings).run(server_chain.command_of(servers, command)))
    except TridentError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``argv`` into options and the command after the first ``--``."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{interpreter.command()} -m server",
        description="Serves an engine with tritonserver until Ctrl-C, or while the command after -- runs.",
        epilog="Other settings are TRIDENT_* environment variables: docs/environment.md.",
    )
    parser.add_argument("verb", nargs="?", choices=("serve", "status"), default="serve", help="default: serve")
    parser.add_argument(
        "--engine",
        metavar="NAME",
        default=os.environ.get("TRIDENT_ENGINE") or Settings.model_fields["engine"].default,
        help="folder under engines/, or several, joined by commas (TRIDENT_ENGINE, default demo)",
    )
    parser.add_argument("--host", metavar="IPV4", help="address to listen on (TRIDENT_HOST, default 127.0.0.1)")
    for name in PORT_FIELDS:
        default = Settings.model_fields[name].default
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, metavar="PORT", help=f"{Settings.variable(name)}, default {default}")
    parser.add_argument("--free-ports", action="store_true", help="listen on free ports; overrides all port settings")
    parser.add_argument("--json", action="store_true", help="print the status as a JSON list")
    return parser


def _show_status(as_json: bool) -> int:
    variable = Settings.variable("state_dir")
    statuses = status.read_all(Settings.from_environment({variable: os.environ.get(variable, "")}).state_dir)
    if as_json:
        print(json.dumps([asdict(each) for each in statuses], indent=2))
    else:
        print("\n".join(map(status.describe, statuses)) or "no server found")
    return 0 if statuses and all(each.state == State.READY.value for each in statuses) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
