"""tritonserver's log: its path, its last lines, and its errors."""

from __future__ import annotations

import re
from pathlib import Path

# Harmless messages that every server without a GPU logs at error level.
NOISE = re.compile(
    r"CudaDriverHelper|unable to create stream|pinned.*memory|CUDA driver version|failed to load all models|<frozen "
)
ERROR = re.compile(
    r"^E\d{4} |^error: |^Traceback|Error: |not found|cannot open shared object|Failed to initialize|Signal \("
    r"|terminate called|what\(\):|^bash: |error while loading shared libraries|cannot execute"
)
# Head of a log line: level, date, time, process, source file.
HEAD = re.compile(r"^[EWI]\d{4} [\d:.]+ \d+ \S+:\d+\] ")
# A verbose log grows without bound; only its end is read.
READ_BYTES = 256 * 1024
TABLE = re.compile(r"^[+|]")


def path(state_dir: Path, grpc_port: int) -> Path:
    """Return the path of the log of the server on ``grpc_port``."""
    return state_dir / "logs" / f"tritonserver-{grpc_port}.log"


def tail(log: Path, lines: int = 20) -> str:
    """Return the last ``lines`` lines, without Triton's tables."""
    return "\n".join([line for line in _read(log) if not TABLE.match(line)][-lines:])


def errors(log: Path, start: int = 0, lines: int = 12) -> str:
    """Return error messages and tracebacks since byte ``start``, each once; the tail if there are none."""
    found: list[str] = []
    in_error = False  # a message may continue after its first line
    for line in _read(log, start):
        begins = bool(HEAD.match(line)) or line.startswith("error: ")
        if begins or not in_error:
            in_error = bool(ERROR.search(line)) and not TABLE.match(line)
        if in_error:
            # Triton often logs one message three times, twice with its line breaks escaped.
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
