"""tritonserver's log: where it lies, its end, and the lines of it that say what went wrong."""

from __future__ import annotations

import re
from pathlib import Path

# Said by every server without a GPU, at error level, and harmless.
NOISE = re.compile(
    r"CudaDriverHelper|unable to create stream|pinned.*memory|CUDA driver version|failed to load all models|<frozen "
)
ERROR = re.compile(
    r"^E\d{4} |^error: |^Traceback|Error: |not found|cannot open shared object|Failed to initialize|Signal \("
    r"|terminate called|what\(\):|^bash: |error while loading shared libraries|cannot execute"
)
# Head of a log line: level, date, time, process, source file.
HEAD = re.compile(r"^[EWI]\d{4} [\d:.]+ \d+ \S+:\d+\] ")
# A verbose log grows without end; what matters is near its end.
READ_BYTES = 256 * 1024
TABLE = re.compile(r"^[+|]")


def path(state_dir: Path, grpc_port: int) -> Path:
    return state_dir / "logs" / f"tritonserver-{grpc_port}.log"


def tail(log: Path, lines: int = 20) -> str:
    """The last ``lines`` lines, without Triton's tables."""
    return "\n".join([line for line in _read(log) if not TABLE.match(line)][-lines:])


def complaints(log: Path, start: int = 0, lines: int = 12) -> str:
    """What went wrong since byte ``start``: error lines and tracebacks, each once; the tail if there are none."""
    found: list[str] = []
    following = False  # the lines of a message that goes on after its first line
    for line in _read(log, start):
        begins = bool(HEAD.match(line)) or line.startswith("error: ")
        if begins or not following:
            following = bool(ERROR.search(line)) and not TABLE.match(line)
        if following:
            # One message is often said three times, twice with its line breaks escaped.
            texts = (text.strip('" ') for text in HEAD.sub("", line).split("\\n"))
            found += [text for text in texts if text and text not in found and not NOISE.search(text)]
    return "\n".join(found[:lines]) if found else tail(log, lines)


def _read(log: Path, start: int = 0) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, 2) - READ_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
