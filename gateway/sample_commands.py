"""``python -m gateway samples ACTION``: list, export and delete what is kept, beside a running gateway or without."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from contract.errors import InvalidArgument
from gateway.config import pools
from gateway.config.configuration import Configuration
from gateway.config.settings import Settings, variable
from gateway.config.tenant import Tenant
from gateway.samples import store
from gateway.samples.store import SampleStore


def add(commands: Any) -> None:
    """Add the command and its actions to a parser's subcommands."""
    samples = commands.add_parser("samples", help="list, export or delete kept prompts and answers (docs/samples.md)")
    actions = samples.add_subparsers(title="actions", metavar="ACTION", required=True)
    for run, summary in (
        (listed, "how much is kept of each tenant"),
        (export, "write samples to standard output, a JSON object a line"),
        (delete, "delete all samples and feedback of a tenant"),
        (new_key, f"print a key for the file of {variable('samples_keys')}"),
    ):
        name = "list" if run is listed else run.__name__.replace("_", "-")
        action = actions.add_parser(name, help=summary, description=summary)
        action.set_defaults(run=run)
        if run in (export, delete):
            action.add_argument("--tenant", required=run is delete, help="such as acme/research")


def listed(arguments: argparse.Namespace) -> None:
    """Print a line for each tenant."""
    there = _store()
    for row in there.summary():
        since = time.strftime("%Y-%m-%d", time.gmtime(row["oldest"])) if row["oldest"] else "-"
        held = f"{row['held_bytes']} bytes wait for a rating"
        print(f"{row['tenant']}: {row['samples']} samples since {since}, {row['kept_bytes']} bytes; {held}")
    _warn(there)


def export(arguments: argparse.Namespace) -> None:
    """Print the samples of one tenant or of all."""
    there = _store()
    for tenant in [arguments.tenant] if arguments.tenant else there.tenants():
        for sample in there.samples(tenant):
            sys.stdout.write(json.dumps(sample, ensure_ascii=False) + "\n")
    _warn(there)


def delete(arguments: argparse.Namespace) -> None:
    """Delete the samples of a tenant, those of requests under way included."""

    def member(org: str, team: str, key: str) -> Tenant | None:  # reads the file only where it is needed
        settings = Settings.from_environment(os.environ)
        return Configuration(settings.config, os.environ, pools.of(settings)).member(org, team, key)

    print(f"{arguments.tenant}: {_store().delete(arguments.tenant, member)} bytes deleted")


def new_key(arguments: argparse.Namespace) -> None:
    """Print a key."""
    print(store.new_key())


def _warn(there: SampleStore) -> None:
    if there.unreadable:
        text = f"{there.unreadable} lines could not be read: cut by a kill, or of another key"
        print(f"warning: {text} ({variable('samples_keys')})", file=sys.stderr)


def _store() -> SampleStore:
    settings = Settings.from_environment(os.environ)
    if settings.samples is None:
        raise InvalidArgument(variable("samples"), "must be the folder where samples are kept, got none")
    return SampleStore(settings.samples, settings.samples_keys)
