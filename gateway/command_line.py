"""The command line: ``python -m gateway [serve]``, ``new-key``, ``hash-key``, ``check``, and those of other modules."""

from __future__ import annotations

import argparse
import getpass
import os
import secrets
import shlex
import sys
from pathlib import Path

from contract import interpreter, toml_table
from contract.errors import InvalidArgument
from gateway import key_commands, prompt_commands, release_commands, sample_commands, served_models, usage_commands
from gateway.admission.prompt_tokens import load_tokenizer
from gateway.batch import webhook
from gateway.config import configuration, pools, tenants
from gateway.config.settings import PREFIX, Settings, unknown, variable
from gateway.hooks import hook
from gateway.identity.audit import Audit
from gateway.prompts import registry
from gateway.samples.store import cipher


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{interpreter.command()} -m gateway",
        description="Serves OpenAI's protocol and Triton's own in front of any number of servers.",
        epilog=f"{PREFIX}* variables set everything: docs/environment.md lists them.",
    )
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve until SIGTERM or Ctrl-C, then drain; the default")
    serve.add_argument("--worker", default="", help=argparse.SUPPRESS)  # what gateway/workers.py starts
    parser.set_defaults(worker="")
    for name, run, summary in (
        ("new-key", new_key, "make an API key, and the hash for the file"),
        ("hash-key", hash_key, "the hash of an API key, read from standard input"),
    ):
        command = commands.add_parser(name, help=summary)
        text = f"whose salt to use, a file that may not exist yet; else {variable('config')}, else a new one"
        command.add_argument("--config", type=Path, help=text)
        command.set_defaults(run=run)
    check = commands.add_parser("check", help="read the settings and the file, and say what is wrong")
    check.set_defaults(run=check_all)
    for module in (release_commands, key_commands, prompt_commands, sample_commands, usage_commands):
        module.add(commands)
    return parser.parse_args(arguments)


def new_key(arguments: argparse.Namespace) -> None:
    """Print a new key and the hash that the file keeps."""
    _print_hash(arguments, tenants.new_key(), shown=True)


def hash_key(arguments: argparse.Namespace) -> None:
    """Print the hash of an existing key, read from standard input: arguments show in process lists and histories."""
    api_key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\r\n")
    if len(api_key) < tenants.LEAST_KEY_LENGTH:
        problem = f"must have at least {tenants.LEAST_KEY_LENGTH} characters, got {len(api_key)}"
        raise InvalidArgument("API key", problem)
    _print_hash(arguments, api_key, shown=False)


def check_all(arguments: argparse.Namespace) -> None:
    """Read the settings and what they name, but no database. Raises: InvalidArgument for the first wrong field."""
    settings = Settings.from_environment(os.environ)
    reading = configuration.read(settings.config, os.environ, pools.of(settings))
    for name, rules in reading.policy.hooks.items():
        hook.load(name, rules)
    served_models.check(settings, reading.policy, reading.pools)
    if settings.tokenizer is not None:
        load_tokenizer(settings.tokenizer)
    if settings.prompts is not None:
        registry.opened(settings.prompts)
    if settings.samples is not None:
        cipher(settings.samples_keys)
    log = settings.audit_log
    if log is None or log.exists() or not os.access(log.parent, os.W_OK | os.X_OK):  # else a start creates it
        Audit(log)
    if settings.batch_db is not None:
        webhook.configured(settings)
    for problem in unknown(os.environ):
        print(f"warning: {problem}", file=sys.stderr)
    print(f"{settings.config or 'the environment'}: valid; {len(reading.keys)} keys")


def _print_hash(arguments: argparse.Namespace, api_key: str, *, shown: bool) -> None:
    path = release_commands.config_file(arguments)
    exists = path is not None and path.exists()
    table = toml_table.read(path) if path is not None and exists else {}
    salt = tenants.salt(str(path), table) if "salt" in table else secrets.token_bytes(16)
    hashed, salt_line = tenants.digest(salt, api_key).hex(), f'salt = "{salt.hex()}"'
    if "salt" not in table:
        print(salt_line)
    if shown:
        print(f"key    {api_key}")
    print(f'hash = "{hashed}"', flush=True)
    entry = "[orgs.acme.teams.research.keys.alice]   # organisation, team and key: names of your choice\n"
    entry += f'hash = "{hashed}"'
    if "salt" in table:
        text = f"Add to {path}, which a running gateway reads again by itself:\n\n{entry}"
    elif exists:
        text = f"{path} has no salt yet. Put this above its first table:\n\n{salt_line}\n\nand this below:\n\n{entry}"
    else:
        name, python = path or "gateway.toml", interpreter.command()
        quoted = shlex.quote(str(name))
        text = f"""{f"{name} does not exist yet. " if path else ""}Save these lines as {name}:

{salt_line}
{entry}

then serve with it, and make further keys with its salt:

{variable("config")}={quoted} {python} -m gateway
{python} -m gateway new-key --config {quoted}"""
    print(f"\n{text}\n\nThe key itself goes to its owner and into no file.", file=sys.stderr)
