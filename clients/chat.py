"""Hold a conversation in the terminal. The client keeps the history and sends all of it with every turn."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import Any

from clients import terminal
from clients.async_client import AsyncClient
from contract.errors import InvalidArgument, TridentError

_HELP = """\
  /reset          forget the conversation
  /system TEXT    set the system message and begin anew; without TEXT, show it
  /quit           leave (so does Ctrl-D)
  Ctrl-C          stops the current response; the conversation goes on"""


def converse(client: AsyncClient, system: str, arguments: dict[str, Any], stats: bool) -> int:
    """Read turns from standard input and stream the responses until /quit or the end of input; return the exit code."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() a history and line editing)
        print(f"Talking to {client.model} at {client.url}. /help lists the commands.", file=sys.stderr)
    loop = asyncio.new_event_loop()
    history = _initial_history(system)
    code = terminal.OK
    try:
        while True:
            try:
                line = input("you> " if interactive else "").strip()
            except EOFError:
                return code
            except KeyboardInterrupt:
                if not interactive:
                    return terminal.INTERRUPTED
                print("\n(/quit or Ctrl-D leaves)", file=sys.stderr)
                continue
            except UnicodeDecodeError as exc:
                raise InvalidArgument("messages", f"standard input is not UTF-8 text: {exc}") from exc
            if not line:
                continue
            if line.startswith("/"):
                word, _, rest = line.partition(" ")
                if word in ("/quit", "/exit"):
                    return code
                system, history = _run_command(word, rest.strip(), system, history)
                continue
            history.append({"role": "user", "content": line})
            try:
                answer = _stream_response(loop, client, history, arguments, stats)
                history.append({"role": "assistant", "content": answer})
            except TridentError as error:
                history.pop()
                terminal.show_error(error)
                code = terminal.exit_code(error)
                if not interactive:
                    return code
    finally:
        loop.run_until_complete(client.close())
        loop.close()


def _run_command(word: str, rest: str, system: str, history: list[dict]) -> tuple[str, list[dict]]:
    """Run a /command; return the system message and the history after it."""
    if word == "/reset":
        print("(forgotten)", file=sys.stderr)
        return system, _initial_history(system)
    if word == "/system" and rest:
        print("(set; the conversation begins anew)", file=sys.stderr)
        return rest, _initial_history(rest)
    if word == "/system":
        print(system or "(no system message)", file=sys.stderr)
    else:
        print(_HELP if word == "/help" else f"no such command: {word}\n{_HELP}", file=sys.stderr)
    return system, history


def _initial_history(system: str) -> list[dict]:
    return [{"role": "system", "content": system}] if system else []


def _stream_response(
    loop: asyncio.AbstractEventLoop, client: AsyncClient, history: list[dict], arguments: dict, stats: bool
) -> str:
    """Stream one response and return its text, or the part before Ctrl-C."""
    shown: list[str] = []
    stream = client.generate(messages=history, **arguments)
    task = loop.create_task(terminal.show(stream, stats=stats, texts=shown))
    with contextlib.suppress(NotImplementedError):  # no such thing on Windows, where Ctrl-C ends the chat
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        loop.run_until_complete(task)
    except asyncio.CancelledError:
        print("(stopped)", file=sys.stderr)
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
    return "".join(shown)
