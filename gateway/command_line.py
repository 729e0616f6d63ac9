"""``python -m gateway [serve]``: serve. ``new-key``, ``hash-key``, ``check``, ``release``, ``key``, ``prompt``: its
files."""

from __future__ import annotations

import argparse
import getpass
import os
import secrets
import shlex
import sys
from pathlib import Path

from contract import interpreter
from contract.errors import InvalidArgument
from gateway import key_commands, prompt_commands, release_commands, sample_commands, served_models, usage_commands
from gateway.admission.prompt_tokens import load_tokenizer
from gateway.batch import webhook
from gateway.config import configuration, pools, tenants
from gateway.config.settings import PREFIX, Settings, unknown, variable
from gateway.hooks import loading
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
        command.add_argument(
            "--config",
            type=Path,
            help=f"whose salt to use, a file that may not exist yet; else {variable('config')}, else a new one",
        )
        command.set_defaults(run=run)
    check = commands.add_parser("check", help="read the settings and the file, and say what is wrong")
    check.set_defaults(run=check_all)
    release_commands.add(commands)
    key_commands.add(commands)
    prompt_commands.add(commands)
    sample_commands.add(commands)
    usage_commands.add(commands)
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
        loading.load(name, rules)
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
    for problem in unknown(os.environ, also=(tenants.API_KEYS, tenants.API_KEYS_FILE)):
        print(f"warning: {problem}", file=sys.stderr)
    print(f"{settings.config or 'the environment'}: valid; {len(reading.keys)} keys")


def _print_hash(arguments: argparse.Namespace, api_key: str, *, shown: bool) -> None:
    named = os.environ.get(variable("config"))
    path = arguments.config or (Path(named) if named else None)
    salt = _salt(path)
    new = salt is None
    salt = salt or secrets.token_bytes(16)
    hashed = tenants.digest(salt, api_key).hex()
    if new:
        print(f'salt = "{salt.hex()}"')
    if shown:
        print(f"key    {api_key}")
    print(f'hash = "{hashed}"', flush=True)
    print(_what_next(path, salt.hex() if new else "", hashed), file=sys.stderr)


def _what_next(path: Path | None, salt: str, hashed: str) -> str:
    """Return the next steps for a person. salt: a new one; "" if the file has one."""
    python = interpreter.command()
    entry = (
        f'[orgs.acme.teams.research.keys.alice]   # organisation, team and key: names of your choice\nhash = "{hashed}"'
    )
    if not salt:
        text = f"Add to {path}, which a running gateway reads again by itself:\n\n{entry}"
    elif path is not None and path.exists():
        text = (
            f'{path} has no salt yet. Put this above its first table:\n\nsalt = "{salt}"\n\nand this below:\n\n{entry}'
        )
    else:
        name = path or "gateway.toml"
        quoted = shlex.quote(str(name))
        there = f"{name} does not exist yet. " if path is not None else ""
        text = f"""{there}Save these lines as {name}:

salt = "{salt}"
{entry}

then serve with it, and make further keys with its salt:

{variable("config")}={quoted} {python} -m gateway
{python} -m gateway new-key --config {quoted}"""
    return f"\n{text}\n\nThe key itself goes to its owner and into no file."


def _salt(path: Path | None) -> bytes | None:
    """Return the salt of the file; None if it has none or does not exist."""
    table = configuration.table(path) if path is not None and path.exists() else {}
    return tenants.salt(str(path), table) if "salt" in table else None
