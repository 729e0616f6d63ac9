"""tritonserver's log: its path and its errors."""

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
LINES = 12  # of a report
TABLE = re.compile(r"^[+|]")


def path(state_dir: Path, grpc_port: int) -> Path:
    """Return the path of the log of the server on ``grpc_port``."""
    return state_dir / "logs" / f"tritonserver-{grpc_port}.log"


def errors(log: Path, start: int = 0) -> str:
    """Return error messages and tracebacks since byte ``start``, each once; the last lines if there are none."""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, 2) - READ_BYTES))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if not TABLE.match(line)]
    found: list[str] = []
    in_error = False  # a message may continue after its first line
    for line in lines:
        if HEAD.match(line) or line.startswith("error: ") or not in_error:
            in_error = bool(ERROR.search(line))
        if in_error:
            # Triton often logs one message three times, twice with its line breaks escaped.
            texts = (text.strip('" ') for text in HEAD.sub("", line).split("\\n"))
            found += [text for text in texts if text and text not in found and not NOISE.search(text)]
    return "\n".join(found[:LINES] or lines[-LINES:])
