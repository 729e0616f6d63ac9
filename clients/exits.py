"""How a command ends: one exit code per kind of error."""

from __future__ import annotations

from contract import errors
from contract.errors import TridentError

OK = 0
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
    (errors.Unavailable, 6, "no server there, or not ready"),
    (errors.DeadlineExceeded, 7, "--timeout passed"),
    (errors.Cancelled, CUT_SHORT, "the answer was ended early, by `stop` or by the server"),
    (errors.EngineFailed, 1, "the engine failed"),
)


def code_for(error: TridentError) -> int:
    """The exit code of an error."""
    return next((code for kind, code, _ in _CODES if isinstance(error, kind)), 1)


def table() -> str:
    """The codes as lines for --help."""
    lines = [f"  {OK:>3}  the text is complete (or --cancel-after was reached)"]
    lines += [f"  {code:>3}  {meaning}" for _, code, meaning in sorted(_CODES, key=lambda row: row[1]) if meaning]
    lines += [f"  {NO_OUTPUT:>3}  our output cannot be written"]
    lines += [f"  {INTERRUPTED:>3}  Ctrl-C", f"  {PIPE_CLOSED:>3}  the reader of our output went away"]
    return "\n".join(lines)
