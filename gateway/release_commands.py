"""``python -m gateway release ACTION``: through the configuration file, or through a gateway."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from clients.command_line import number
from contract import toml_table
from contract.errors import InvalidArgument, Unavailable
from gateway import banner
from gateway.config import configuration, pools, release_file
from gateway.config.pools import Pools
from gateway.config.settings import Settings, variable
from gateway.identity.audit import Audit, at_the_command_line

TIMEOUT_S = 5.0
finite = number(float, math.isfinite, "a number")  # JSON has no others
_COLUMNS = (
    ("pool", 14, "{pool}"),
    ("requests", 9, "{requests}"),
    ("errors", 7, "{errors}"),
    ("refused", 8, "{refusals}"),
    ("tokens in", 10, "{input_tokens}"),
    ("out", 8, "{output_tokens}"),
    ("TTFT p50", 10, "{ttft_p50_s:.3f} s"),
    ("TTFT p95", 10, "{ttft_p95_s:.3f} s"),
    ("ITL p95", 10, "{itl_p95_s:.4f} s"),
)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        """Return None: a further request would send the operators' token to another host."""


_DIRECT = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))  # a proxy would get the token too


def add(commands: Any) -> None:
    """Add the command and its actions to a parser's subcommands."""
    text = "start, shift, roll back or finish a release, or show all (docs/releases.md)"
    release = commands.add_parser("release", help=text)
    actions = release.add_subparsers(title="actions", metavar="ACTION", required=True)
    made = {}
    for action, run, summary in (
        ("start", change, "begin a release, or begin again one that was rolled back"),
        ("shift", change, "change the percentage that the candidate gets"),
        ("rollback", change, "send nothing to the candidate any more"),
        ("finish", change, "put a candidate that has all requests in the stable pool's place, and end the release"),
        ("status", status, "show both pools of every release, as the gateways measure them"),
    ):
        made[action] = parser = actions.add_parser(action, help=summary, description=summary)
        parser.set_defaults(run=run, action=action)
        text = "ask this gateway in place of the file; status: several"
        parser.add_argument("--gateway", action="append", metavar="URL", help=text)
        if action != "status":
            parser.add_argument("--config", type=Path, help=f"the configuration file; else {variable('config')}")
            parser.add_argument("name", help="of the release")
    start, shown = made["start"], made["status"]
    start.add_argument("--kind", choices=("canary", "blue_green", "shadow"), help="canary by default")
    start.add_argument("--stable", metavar="POOL", help="the pool whose requests are divided")
    start.add_argument("--candidate", metavar="POOL", help="the pool that gets a part of them")
    text = "that the candidate gets; by default 0, or its last"
    start.add_argument("--weight", type=finite, metavar="PERCENT", help=text)
    start.add_argument("--gate", metavar="FILE", help="of `python -m evals gate --out`, which must say pass above 5 %%")
    start.add_argument("--candidate-sha256", metavar="SHA256", help="of the manifest that the gate must be of")
    automatic, text = argparse.BooleanOptionalAction, "whether it is rolled back by itself; it is by default"
    start.add_argument("--rollback", action=automatic, help=text)
    made["shift"].add_argument("--to", type=finite, required=True, metavar="PERCENT")
    made["rollback"].add_argument("--reason", help="for the log and the file")
    shown.add_argument("--json", action="store_true", help="print what the gateways say as JSON")


def change(arguments: argparse.Namespace) -> None:
    """Start, shift, roll back or finish a release. Raises: TridentError."""
    names = ("kind", "stable", "candidate", "weight", "gate", "candidate_sha256", "to", "reason")
    given = vars(arguments)
    fields = {name: given[name] for name in names if given.get(name) is not None}
    if given.get("rollback") is not None:
        fields["rollback"] = {"automatic": arguments.rollback}
    path = config_file(arguments)
    if arguments.gateway or path is None:
        for url in arguments.gateway or [_own_url()]:
            call(url, f"/admin/releases/{arguments.name}", {"action": arguments.action, **fields})
            print(f"release {arguments.name}: {arguments.action} taken by {url}")
        return

    def check(table: Any) -> Pools | None:
        if arguments.action == "rollback":  # which nothing may stand in the way of
            return None
        settings = Settings.from_environment(os.environ)
        return configuration.reading(str(path), table, os.environ, pools.of(settings)).pools

    there = check(toml_table.read(path)) if arguments.action == "finish" else None
    shares = there.generating if there is not None else {}
    rules = release_file.apply(path, arguments.action, arguments.name, fields, check, shares)
    _audit(arguments, fields)
    part = "nothing" if rules.rolled_back else f"{rules.weight:g} % of {rules.stable}"
    if arguments.action == "finish":
        part = f"everything in place of {rules.stable}; the release has ended"
    print(f"release {arguments.name}: {rules.kind}, {rules.candidate} gets {part}")
    print(f"Gateways that read {path} follow within a second.", file=sys.stderr)


def status(arguments: argparse.Namespace) -> None:
    """Print every release as each gateway sees it. Raises: Unavailable if none answers."""
    answers = {}
    for url in arguments.gateway or [_own_url()]:
        try:
            answers[url] = call(url, "/admin/releases")
        except Unavailable as error:
            print(f"warning: {error}", file=sys.stderr)
    if not answers:
        raise Unavailable("no gateway answered")
    if arguments.json:
        print(json.dumps(answers, indent=2))
        return
    for url, answer in answers.items():
        print(f"{url}: {len(answer['releases'])} releases")
        if answer["problem"]:
            print(f"  the file cannot be used, the last good one holds: {answer['problem']}")
        for release in answer["releases"]:
            print("\n".join(_described(release)))


def _described(release: dict[str, Any]) -> list[str]:
    limits, why = release["rollback"], f" ({release['rolled_back']})" if release["rolled_back"] else ""
    lines = [
        f"\n{release['name']}: {release['kind']}, {release['state']}{why}, weight {release['weight']:g} %, "
        f"last {limits['long_s']:g} s",
        " " * 12 + "".join(title.rjust(width) for title, width, _ in _COLUMNS),
    ]
    for role in ("stable", "candidate"):
        numbers = "".join(text.format(**release[role]).rjust(width) for _, width, text in _COLUMNS)
        lines.append(f"  {role:<10}{numbers}")
    burns = [f"{name} {rate['short']:.1f}/{rate['long']:.1f}" for name, rate in release["burn_rates"].items()]
    automatic = f"rolled back from {limits['burn_rate']:g} on" if limits["automatic"] else "not rolled back by itself"
    lines.append(f"  burn rates (short/long window): {', '.join(burns) or 'none yet'}; {automatic}")
    if copies := release["candidate"]["copies"]:
        lines.append("  copies: " + ", ".join(f"{count} {result}" for result, count in copies.items()))
    return lines


def _audit(arguments: argparse.Namespace, fields: dict[str, Any]) -> None:
    """Write what was done; a log that cannot be written undoes nothing."""
    log = os.environ.get(variable("audit_log"))
    try:
        audit = Audit(Path(log) if log else None)
    except InvalidArgument as error:
        print(f"warning: {error}", file=sys.stderr)
        return
    action = f"release.{arguments.action}"
    asyncio.run(audit.write(at_the_command_line(), "operator", action, arguments.name, "ok", after=fields))


def config_file(arguments: argparse.Namespace) -> Path | None:
    """Return the configuration file that a command or the environment names."""
    named = os.environ.get(variable("config"), "")
    return arguments.config or (Path(named) if named else None)


def _own_url() -> str:
    settings = Settings.from_environment(os.environ)
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{banner.reachable(settings.host, settings.http_port)}"


def call(url: str, path: str, fields: dict[str, Any] | None = None) -> Any:
    """Return a gateway's answer. Raises: Unavailable if there is none, InvalidArgument for its refusal."""
    if not url.startswith(("http://", "https://")):
        raise InvalidArgument("--gateway", f"must be the URL of a gateway's HTTP port, got {url!r}")
    token = Settings.from_environment(os.environ).admin_token.decode()
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    data = None if fields is None else json.dumps(fields).encode()
    request = urllib.request.Request(url.rstrip("/") + urllib.parse.quote(path), data, headers)  # noqa: S310
    try:
        with _DIRECT.open(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            text = refused.read(4096).decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["error"]["message"]
        hint = "" if token else f"; {variable('admin_token_file')} is not set"
        raise InvalidArgument(url, f"refused with {refused.code}: {text}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise Unavailable(f"{url} does not answer: {getattr(exc, 'reason', None) or exc}") from exc
