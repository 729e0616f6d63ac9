"""``python -m gateway key ACTION``: in the store of keys itself, or through a gateway."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from contract.errors import InvalidArgument
from gateway.admission.shared_state import SharedState
from gateway.api import admin
from gateway.api.schemas import validated
from gateway.config import pools
from gateway.config.configuration import Configuration
from gateway.config.settings import Settings, variable
from gateway.identity.audit import Audit, at_the_command_line
from gateway.identity.authentication import stored_keys
from gateway.identity.principal import Principal
from gateway.release_commands import call, finite


def add(commands: Any) -> None:
    """Add the command and its actions to a parser's subcommands."""
    key = commands.add_parser("key", help="create, list, rotate or revoke API keys (docs/identity.md)")
    actions = key.add_subparsers(title="actions", metavar="ACTION", required=True)
    for action, summary in (
        ("create", "make a key, which is printed once"),
        ("list", "show all keys, without the keys themselves"),
        ("rotate", "make another key of a name; the ones before hold for the overlap"),
        ("revoke", "end a key, by its id, or all of a name, at once"),
    ):
        parser = actions.add_parser(action, help=summary, description=summary)
        parser.set_defaults(run=run, action=action)
        parser.add_argument("--gateway", metavar="URL", help=f"ask this gateway; else {variable('key_store')} is used")
        if action != "list":
            parser.add_argument("name", help="ORG/TEAM/KEY" + (", or an id" if action == "revoke" else ""))
        if action in ("create", "rotate"):
            parser.add_argument("--expires-in-s", type=finite, metavar="SECONDS", help="after which the key ends")
        if action == "create":
            parser.add_argument("--role", choices=("caller", "team_admin", "org_admin", "operator"), default="caller")
        if action == "rotate":
            parser.add_argument("--overlap-s", type=finite, metavar="SECONDS", default=3600.0, help="3600 by default")


def run(arguments: argparse.Namespace) -> None:
    """Do what a command says and print its keys, a line of JSON each. Raises: TridentError."""
    given = {name: getattr(arguments, name, None) for name in ("role", "expires_in_s", "overlap_s")}
    path, fields = "/admin/keys", {name: value for name, value in given.items() if value is not None} or None
    if arguments.action == "create":
        fields = {"name": arguments.name, **(fields or {})}
    elif arguments.action != "list":
        path, fields = f"{path}/{arguments.name}", {"action": arguments.action, **(fields or {})}
    if arguments.gateway:
        answer = call(arguments.gateway, path, fields)
    else:
        answer = asyncio.run(_in_store(arguments, fields))
    for row in answer.get("keys", [answer]):
        print(json.dumps(row))
    if "key" in answer:
        print("The key is not shown again.", file=sys.stderr)


async def _in_store(arguments: argparse.Namespace, fields: dict[str, Any] | None) -> Any:
    """Do what an endpoint would do, as an operator."""
    settings = Settings.from_environment(os.environ)
    configuration = Configuration(settings.config, os.environ, pools.of(settings))
    state = SharedState(settings.redis) if settings.redis else None
    stored = stored_keys(settings, configuration, state)
    if stored is None:
        raise InvalidArgument(variable("key_store"), "must be set, or --gateway be given")
    who = Principal("operator", at_the_command_line())
    try:
        if fields is None:
            return {"keys": await admin.listed_keys(stored, who)}
        audit = Audit(settings.audit_log)  # before there is a key that would not be shown
        data = json.dumps(fields).encode()
        if arguments.action == "create":
            answer = await admin.create_key(stored, who, validated(admin.NewKey, data))
        else:
            answer = await admin.change_key(stored, who, arguments.name, validated(admin.KeyChange, data))
        after = {name: value for name, value in fields.items() if name not in ("name", "action")}
        await audit.write(who.name, who.role, f"key.{arguments.action}", arguments.name, "ok", after=after)
        return answer
    finally:
        await stored.close()
        if state is not None:
            await state.close()
