"""``python -m gateway prompt ACTION``: list, check and compare prompt templates, and roll one back."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from contract.errors import InvalidArgument
from gateway.admission.prompt_tokens import load_tokenizer
from gateway.config.settings import Settings, variable
from gateway.prompts.chat_tokens import counted
from gateway.prompts.registry import Registry, roll_back
from gateway.prompts.template import PARTS, over_budget

Count = Callable[[Sequence[str]], int]


def add(commands: Any) -> None:
    """Add the command and its actions to a parser's subcommands."""
    prompt = commands.add_parser("prompt", help="list, check, compare or roll back prompt templates (docs/prompts.md)")
    actions = prompt.add_subparsers(title="actions", metavar="ACTION", required=True)
    made = {}
    for action, run, summary in (
        ("list", show_all, "show every prompt: its versions, and what part of the requests each gets"),
        ("check", check, "read every file, and say what is wrong; tokens by part of each version"),
        ("diff", diff, "compare two versions in tokens by part"),
        ("rollback", rollback, "serve an older version in place of the newest one"),
    ):
        made[action] = parser = actions.add_parser(action, help=summary, description=summary)
        parser.set_defaults(run=run)
        parser.add_argument("--prompts", type=Path, metavar="FOLDER", help=f"else {variable('prompts')}")
        if action in ("check", "diff"):
            parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=f"else {variable('tokenizer')}")
    for name in ("before", "after"):
        made["diff"].add_argument(name, metavar="NAME@VERSION")
    made["rollback"].add_argument("name", help="of the prompt")
    made["rollback"].add_argument("--to", metavar="VERSION", help="the newest to serve; else the next older")


def show_all(arguments: argparse.Namespace) -> None:
    """Print every prompt. Raises: InvalidArgument."""
    for prompt in Registry(_folder(arguments)).prompts.values():
        print(prompt.name)
        shares = prompt.shares if prompt.served else {}
        for version, template in prompt.versions.items():
            share = f"{shares.get(version, 0.0):.1%}" if version in prompt.served else "withdrawn"
            print(f"  {version:<16}{share:>10}  {template.description}".rstrip())


def check(arguments: argparse.Namespace) -> None:
    """Print the tokens of every version. Raises: InvalidArgument if a file is wrong."""
    registry, (count, unit) = Registry(_folder(arguments)), _counter(arguments)
    for problem in registry.problems:
        print(f"error: {problem}", file=sys.stderr)
    for prompt in registry.prompts.values():
        for version, template in prompt.versions.items():
            tokens, warning = template.render(template.samples).tokens(count), ""
            try:
                warning = over_budget(template.budgets, tokens)
            except InvalidArgument as exc:
                warning = exc.problem
            parts = ", ".join(f"{part} {tokens[part]}" for part in PARTS if tokens[part])
            over = warning and f"; over its budget: {warning}"
            print(f"{prompt.name}@{version}: {sum(tokens.values())} {unit} ({parts}){over}")
    if registry.problems:
        raise InvalidArgument(str(registry.folder), f"must hold no problem, got {len(registry.problems)}")


def diff(arguments: argparse.Namespace) -> None:
    """Print the tokens of both versions by part. Raises: InvalidArgument."""
    registry, (count, unit) = Registry(_folder(arguments)), _counter(arguments)
    names = [arguments.before, arguments.after]
    templates = [registry.find(name, None, None, "")[1] for name in names]
    rows: list[dict[str, int]] = [template.render(template.samples).tokens(count) for template in templates]
    width = max(16, *(len(name) + 2 for name in names))
    print(f"{'part':<10}{names[0]:>{width}}{names[1]:>{width}}{'change':>10}   {unit}")
    for part in (*PARTS, "total"):
        before, after = (row.get(part, sum(row.values())) for row in rows)
        percent = f" ({(after - before) / before:+.0%})" if before else ""
        print(f"{part:<10}{before:>{width}}{after:>{width}}{after - before:>+10}{percent}")


def rollback(arguments: argparse.Namespace) -> None:
    """Roll a prompt back. Raises: NotFound, InvalidArgument."""
    prompt = roll_back(_folder(arguments), arguments.name, arguments.to)
    shares = ", ".join(f"{version} {share:.0%}" for version, share in prompt.shares.items())
    print(f"prompt {prompt.name}: serves {shares}; withdrawn: {', '.join(prompt.release.withdrawn) or 'none'}")
    print(f"Gateways that read {_folder(arguments)} follow within a second.", file=sys.stderr)


def _folder(arguments: argparse.Namespace) -> Path:
    named = arguments.prompts or os.environ.get(variable("prompts"), "")
    if not named or not Path(named).is_dir():
        problem = f"must be the folder of the prompts, or {variable('prompts')} must be it, got {str(named)!r}"
        raise InvalidArgument("--prompts", problem)
    return Path(named)


def _counter(arguments: argparse.Namespace) -> tuple[Count, str]:
    path = arguments.tokenizer or Settings.from_environment(os.environ).tokenizer
    if path is not None:
        load_tokenizer(path)  # a wrong file is told before anything is printed
    return partial(counted, path), "tokens" if path else "tokens (estimated; --tokenizer counts them)"
