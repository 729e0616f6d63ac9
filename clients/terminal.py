"""Show responses on a terminal: text as it arrives, figures at the end, errors in one line and as an exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from clients.wire.latency import Stopwatch
from clients.wire.token_stream import TokenStream
from contract import errors
from contract.errors import Overloaded, TridentError, Unavailable
from contract.generation import FinishReason, TokenDelta

OK = 0
NOT_READY = 6
CUT_SHORT = 8
NO_OUTPUT = 9
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PIPE_CLOSED = 141  # 128 + SIGPIPE

_CODES: tuple[tuple[type[TridentError], int, str], ...] = (
    (errors.InvalidArgument, 2, "a bad argument, refused here or by the server"),
    (errors.Unauthenticated, 3, "no key, not one the server knows, or one that may not do this"),
    (errors.PermissionDenied, 3, ""),
    (errors.NotFound, 4, "no such model or request"),
    (errors.Overloaded, 5, "the server is full; try again later"),
    (errors.Unavailable, NOT_READY, "no server there, or not ready"),
    (errors.DeadlineExceeded, 7, "--timeout passed"),
    (errors.Cancelled, CUT_SHORT, "the answer was ended early, by `stop` or by the server"),
    (errors.EngineFailed, 1, "the engine failed"),
)


def exit_code(error: TridentError) -> int:
    return next((code for kind, code, _ in _CODES if isinstance(error, kind)), 1)


def exit_codes() -> str:
    """Return the codes as lines for --help."""
    lines = [f"  {OK:>3}  the text is complete (or --cancel-after was reached)"]
    lines += [f"  {code:>3}  {meaning}" for _, code, meaning in sorted(_CODES, key=lambda row: row[1]) if meaning]
    lines += [f"  {NO_OUTPUT:>3}  our output cannot be written"]
    lines += [f"  {INTERRUPTED:>3}  Ctrl-C", f"  {PIPE_CLOSED:>3}  the reader of our output went away"]
    return "\n".join(lines)


async def show(
    stream: TokenStream,
    *,
    as_json: bool = False,
    stats: bool = False,
    cancel_after: int | None = None,
    texts: list[str] | None = None,
) -> int:
    """Print a stream as it arrives, adding to ``texts``; cancel it after so many tokens. Return the exit code."""
    watch, last, column, cut = Stopwatch(), TokenDelta(), True, False
    try:
        async with stream:
            async for delta in stream:
                watch.observe(delta)
                last = delta
                if as_json:
                    print(json.dumps(delta_object(delta, stream, watch), ensure_ascii=False), flush=True)
                elif delta.text:
                    if texts is not None:
                        texts.append(delta.text)
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                    column = delta.text.endswith("\n")
                if cancel_after is not None and watch.tokens >= cancel_after and delta.finish_reason is None:
                    cut = True
                    break
    finally:
        if not column:
            print(flush=True)
        if stats:
            print(figures(stream, watch, last, cut), file=sys.stderr, flush=True)
    return CUT_SHORT if last.finish_reason is FinishReason.CANCELLED else OK


def delta_object(delta: TokenDelta, stream: TokenStream, watch: Stopwatch) -> dict[str, Any]:
    """A delta as JSON: what it carries, and on the last one also usage, timings and our own figures."""
    shown: dict[str, Any] = {"text": delta.text, "token_ids": list(delta.token_ids)}
    if delta.log_probs:
        shown["log_probs"] = list(delta.log_probs)
    if delta.top_log_probs:
        shown["top_log_probs"] = [[list(pair) for pair in likeliest] for likeliest in delta.top_log_probs]
    if delta.finish_reason is not None:
        shown |= {"finish_reason": delta.finish_reason.value, "stop_reason": delta.stop_reason}
        shown["request_id"] = stream.request_id
        shown["usage"] = dataclasses.asdict(delta.usage) if delta.usage else None
        shown["timings"] = dataclasses.asdict(delta.timings) if delta.timings else None
        shown |= {"ttft_s": watch.ttft_s if stream.request.stream else None, "total_s": watch.total_s}
    return shown


def figures(stream: TokenStream, watch: Stopwatch, last: TokenDelta, cut: bool = False) -> str:
    """Two lines about a stream: how fast, and how much."""
    fast = []
    if watch.ttft_s is not None and stream.request.stream:
        fast.append(f"first token {ms(watch.ttft_s)}")
    if (half := watch.inter_token_s(0.5)) is not None:
        fast.append(f"between tokens p50 {ms(half)}, p99 {ms(watch.inter_token_s(0.99))}")
    if watch.tokens_per_s is not None:
        fast.append(f"{watch.tokens_per_s:.0f} tokens/s")
    much = [f"{watch.tokens} new tokens in {watch.total_s:.2f} s"]
    if last.usage:
        cached = f", {last.usage.cached_tokens} of them cached" if last.usage.cached_tokens else ""
        much = [f"{last.usage.input_tokens} prompt tokens{cached}"]
        much += [f"{last.usage.output_tokens} new tokens in {watch.total_s:.2f} s"]
    reason = "cancelled by us" if cut else last.finish_reason.value if last.finish_reason else "unfinished"
    much.append(f"ended by: {reason}{f' ({last.stop_reason!r})' if last.stop_reason else ''}")
    if stream.attempts > 1:
        much.append(f"{stream.attempts} attempts")
    much.append(f"request {stream.request_id}")
    return "\n".join(" · ".join(line) for line in (fast, much) if line)


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def show_error(error: TridentError) -> None:
    """One line on standard error, and what to do about it where that is known."""
    print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
    if isinstance(error, Unavailable) and "cannot reach" in str(error):
        hint = "is the server running? `make serve` starts one; --url or $TRIDENT_URL sets its address"
        print(f"  {hint}", file=sys.stderr)
    if isinstance(error, Overloaded | Unavailable) and error.retry_after_s:
        print(f"  retry after {error.retry_after_s:g} s", file=sys.stderr)


def forget_stdout() -> None:
    """Redirect standard output to /dev/null, so that the interpreter does not report the closed pipe at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
