"""``python -m clients``: talk to a Trident server from a terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from clients import chat, demo, terminal
from clients.async_client import AsyncClient
from clients.wire import status
from clients.wire.connection import DEFAULT_MODEL, DEFAULT_URL, TLS
from clients.wire.retries import RetryBudget, RetryPolicy
from contract import interpreter
from contract.errors import InvalidArgument, PermissionDenied, TridentError

VERBS = ("generate", "chat", "demo", "models", "health", "stop")

_COMMAND = f"{interpreter.command()} -m clients"
_OVERVIEW = f"""\
Talk to a Trident server: text in, text out, token by token.

  {_COMMAND} "def fibonacci(n):"                 stream a completion
  echo "Once upon a time" | {_COMMAND}           the prompt from a pipe
  {_COMMAND} "Hi" --max-tokens 32 --temperature 0 --stats
  {_COMMAND} chat                                a conversation; /help inside
  {_COMMAND} health                              is the server ready?
  {_COMMAND} models                              what has it loaded?
  {_COMMAND} stop REQUEST_ID                     end a running request
  {_COMMAND} demo                                a short tour against a running server

`{_COMMAND} VERB --help` lists a verb's options. Without a verb it is `generate`.
The server is --url, or $TRIDENT_URL, or {DEFAULT_URL} (what `make serve` opens).
"""

_EXIT_CODES = f"exit codes:\n{terminal.exit_codes()}\n"


def number(kind: Callable[[str], Any], accepts: Callable[[Any], bool], allowed: str) -> Callable[[str], Any]:
    """Return a reader of the numbers that ``accepts`` takes, for argparse. allowed: which, in words."""

    def read(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")

    return read


seconds = number(float, lambda value: 0 < value <= 86_400, "more than 0, at most 86400")


def _value(metavar: str, about: str, kind: Callable[[str], Any] = str, default: object = None) -> dict[str, Any]:
    """Return ``add_argument``'s arguments of an option with a value. default: a list for one that may be repeated."""
    more: dict[str, Any] = {"action": "append"} if isinstance(default, list) else {"type": kind}
    return {"metavar": metavar, "help": about, "default": default, **more}


def _flag(about: str, default: bool | None = False) -> dict[str, Any]:
    return {"action": "store_true", "help": about, "default": default}


_OPTIONS: dict[str, dict[str, Any]] = {
    "stop": _value("TEXT", "end before this text; may be repeated", default=[]),
    "cancel-after": _value(
        "N", "cancel the request after N tokens, exit 0", number(int, lambda n: n >= 1, "1 or more")
    ),
    "request-id": _value("ID", "name the request, so that `stop ID` can end it", default=""),
    "system": _value("TEXT", "the system message it begins with", default=""),
    "ask": _value("QUESTION", "answered through the model's chat template, in place of code"),
    "url": _value("URL", f"HOST:PORT of the gRPC endpoint (default: $TRIDENT_URL or {DEFAULT_URL})"),
    "model": _value(
        "MODEL", f"the model to ask (default: {DEFAULT_MODEL}, or for streams its packed form)", default=""
    ),
    "timeout": _value("SECONDS", "give up, and cancel the server's work, after so long", seconds),
    "retries": _value(
        "N", "tries again before the first token (default: %(default)s)", number(int, lambda n: n >= 0, "0 or more"), 3
    ),
    "api-key": _value("KEY", "sent as a bearer token (default: $TRIDENT_API_KEY)"),
    "header": _value("NAME=VALUE", "metadata for every call", default=[]),
    "tls-root": _value("FILE", "encrypt, trusting this PEM file"),
    "tls-cert": _value("FILE", "our certificate, for mutual TLS"),
    "tls-key": _value("FILE", "the key of --tls-cert"),
    "tls-name": _value("NAME", "the name in the server's certificate", default=""),
    "max-tokens": _value("N", "at most so many new tokens (default: %(default)s)", int, 128),
    "temperature": _value("T", "0 always takes the likeliest token (default: 1)", float),
    "top-k": _value("K", "choose among the K likeliest tokens (default: all)", int),
    "top-p": _value("P", "choose among the likeliest tokens that sum to P (default: 1)", float),
    "min-p": _value("P", "drop tokens below P times the likeliest (default: 0)", float),
    "repetition-penalty": _value("X", "above 1 repeats less (default: 1)", float),
    "seed": _value("N", "the same seed gives the same text", int),
    "min-tokens": _value("N", "no end before so many tokens", int),
    "echo": _flag("print the prompt in front of the answer"),
    "no-stream": _flag("wait for the whole answer, then print it"),
    "json": _flag("one JSON object per response (with --no-stream: one in all)"),
    "stats": _flag("latencies and token counts to standard error at the end"),
    "tls": _flag("encrypt, trusting the system's certificates"),
    "ignore-eos": _flag("continue to --max-tokens past the model's end tokens", None),
}
_TLS = ("tls", "tls-root", "tls-cert", "tls-key", "tls-name")
_CONNECTION = ("url", "model", "timeout", "retries", "api-key", "header", *_TLS)
_SAMPLING = ("temperature", "top-k", "top-p", "min-p", "repetition-penalty", "seed", "min-tokens", "ignore-eos")


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    form = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(prog=_COMMAND, description=_OVERVIEW, epilog=_EXIT_CODES, formatter_class=form)
    verbs = top.add_subparsers(dest="verb", metavar="VERB", title="verbs")

    def verb(name: str, run: Callable, summary: str, options: Sequence[str] = (), samples: bool = False) -> None:
        about = summary[0].upper() + summary[1:] + "."
        made = verbs.add_parser(name, help=summary, description=about, epilog=_EXIT_CODES, formatter_class=form)
        if samples:
            _add(made.add_argument_group("generation"), ("max-tokens", *_SAMPLING))
        _add(made.add_argument_group("connection"), _CONNECTION)
        if name == "generate":
            made.add_argument("prompt", nargs="?", help="the text to continue; '-' or nothing reads standard input")
        if name == "stop":
            shown = "as shown by --stats, or given with --request-id"
            made.add_argument("request_id", metavar="REQUEST_ID", help=shown)
        _add(made, options)
        made.set_defaults(run=run)

    options = ("stop", "echo", "no-stream", "json", "stats", "cancel-after", "request-id")
    verb("generate", _generate, "stream a completion of a prompt (the default verb)", options, samples=True)
    verb("chat", _chat, "a conversation, with the model's own chat template", ("system", "stats"), samples=True)
    verb("demo", _demo, "stream one completion, then show in-flight batching on a ready server", ("ask",))
    verb("models", _models, "list the server's models and their state")
    verb("health", _health, "say whether the server is live and ready")
    verb("stop", _stop, "end a running request, by its id")
    return top


def _add(group: argparse._ActionsContainer, names: Iterable[str]) -> None:
    for name in names:
        group.add_argument(f"--{name}", **_OPTIONS[name])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # The parent process may have closed either.
    sys.stdin, sys.stdout = sys.stdin or open(os.devnull), sys.stdout or open(os.devnull, "w")
    # A terminal that cannot show a character shows a substitute.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    arguments = with_verb(list(sys.argv[1:] if argv is None else argv))
    command = parser()
    if not arguments and sys.stdin.isatty():
        command.print_help()
        return 2
    args = command.parse_args(arguments or ["generate"])
    try:
        return args.run(args)
    except TridentError as error:
        terminal.show_error(error)
        return terminal.exit_code(error)
    except KeyboardInterrupt:
        return terminal.INTERRUPTED
    except BrokenPipeError:
        terminal.forget_stdout()
        return terminal.PIPE_CLOSED
    except OSError as error:  # a full disk, a terminal that is gone; what goes wrong on the network is a TridentError
        terminal.forget_stdout()
        print(f"error: standard input or output: {error.strerror}", file=sys.stderr)
        return terminal.NO_OUTPUT


def with_verb(argv: list[str]) -> list[str]:
    """Move the verb to the front of ``argv``; the default verb is generate."""
    takes_value = {f"--{name}" for name in _CONNECTION if name != "tls"}
    at = 0
    while at < len(argv) and argv[at].startswith("--") and argv[at].partition("=")[0] in takes_value | {"--tls"}:
        at += 2 if argv[at] in takes_value else 1
    if at < len(argv) and argv[at] in VERBS:
        return [argv[at], *argv[:at], *argv[at + 1 :]]
    if argv and argv[0] in ("-h", "--help"):
        return argv
    return ["generate", *argv] if argv else []


def client_for(args: argparse.Namespace) -> AsyncClient:
    """Make the client that the connection options describe."""
    tls = None
    if args.tls or args.tls_root or args.tls_cert or args.tls_key or args.tls_name:
        tls = TLS(args.tls_root, args.tls_cert, args.tls_key, args.tls_name)
    headers = []
    for header in args.header:
        name, sep, value = header.partition("=")
        if not (name and sep):
            raise InvalidArgument("--header", f"must be NAME=VALUE, got {header!r}")
        headers.append((name.lower(), value))
    key = os.environ.get("TRIDENT_API_KEY", "") if args.api_key is None else args.api_key
    retry, budget = RetryPolicy(attempts=args.retries + 1), RetryBudget(reserve=max(RetryBudget.reserve, args.retries))
    return AsyncClient(args.url, model=args.model, tls=tls, api_key=key, metadata=headers, retry=retry, budget=budget)


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``generate`` that the options set."""
    given = {name: getattr(args, name) for name in (option.replace("-", "_") for option in _SAMPLING)}
    set_ = {name: value for name, value in given.items() if value is not None}
    return {"max_tokens": args.max_tokens, "timeout_s": args.timeout, **set_}


def _generate(args: argparse.Namespace) -> int:
    prompt = args.prompt
    if prompt is None or prompt == "-":
        if prompt is None and sys.stdin.isatty():
            raise InvalidArgument("prompt", f'there is none; give it in quotes, or pipe it in: {_COMMAND} "Hello"')
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as exc:
            raise InvalidArgument("prompt", f"standard input is not UTF-8 text: {exc}") from exc
    arguments = {"stop": args.stop, "echo": args.echo, "stream": not args.no_stream, "request_id": args.request_id}

    async def show(client: AsyncClient) -> int:
        stream = client.generate(prompt, timings=args.stats or args.json, **arguments, **sampling_of(args))
        return await terminal.show(stream, as_json=args.json, stats=args.stats, cancel_after=args.cancel_after)

    return _run(args, show)


def _chat(args: argparse.Namespace) -> int:
    return chat.converse(client_for(args), args.system, sampling_of(args), args.stats)


def _demo(args: argparse.Namespace) -> int:
    return _run(args, lambda client: demo.tour(client, args.ask))


def _models(args: argparse.Namespace) -> int:
    timeout_s = args.timeout or 5.0

    async def show(client: AsyncClient) -> int:
        try:
            models = await client.models(timeout_s)
        except PermissionDenied:
            print("the server does not show its index; checking the known models", file=sys.stderr)
            ready = {name: await client.model_ready(name, timeout_s) for name in status.KNOWN_MODELS}
            models = status.from_readiness(ready)
        for model in models:
            print(f"{model.name:<24} {model.version or '-':<8} {model.state or '-':<12} {model.reason}".rstrip())
        return terminal.OK

    return _run(args, show)


def _health(args: argparse.Namespace) -> int:
    async def show(client: AsyncClient) -> int:
        health = await client.health(args.timeout or 5.0)
        live, ready = ("yes" if flag else "no" for flag in (health.live, health.ready))
        model = "ready" if health.model_ready else "not ready"
        print(f"{health.url}  live: {live}  ready: {ready}  {health.model}: {model}")
        return terminal.OK if health.ok else terminal.NOT_READY

    return _run(args, show)


def _stop(args: argparse.Namespace) -> int:
    async def stop(client: AsyncClient) -> int:
        await client.stop(args.request_id, args.timeout or 5.0)
        print(f"stop sent for request {args.request_id}", file=sys.stderr)
        return terminal.OK

    return _run(args, stop)


def _run(args: argparse.Namespace, work: Callable[[AsyncClient], Awaitable[int]]) -> int:
    """Run to the end, or to Ctrl-C, which cancels the request first."""

    async def connected() -> int:
        async with client_for(args) as client:
            return await work(client)

    try:
        return asyncio.run(connected())
    except asyncio.CancelledError:
        return terminal.INTERRUPTED
