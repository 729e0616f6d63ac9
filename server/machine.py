"""What this machine has for a GPU engine: cards, driver, and the libraries that are really installed.

    python3 server/machine.py        prints it as JSON; the compile stage runs this inside the container

Only the standard library is needed. The version of TensorRT is asked of libnvinfer itself, because an image's label
and its Python packages can say something else than the library that will load the engine.
"""

from __future__ import annotations

import csv
import ctypes
import importlib.metadata
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

QUERY = ("name", "compute_cap", "memory.total", "memory.free", "driver_version")
LIBNVINFER = ("libnvinfer.so.11", "libnvinfer.so.10", "libnvinfer.so")
TENSORRT_PACKAGES = ("tensorrt", "tensorrt_cu13", "tensorrt_cu12")
IMAGE_ENVIRONMENT = Path("/opt/venv-tritonserver")  # where NVIDIA's images keep the packages that the C++ backend is of


@dataclass(frozen=True)
class Card:
    """sm: compute capability times ten. Memory in bytes."""

    name: str
    sm: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """cards: those the driver lists. driver, tensorrt, tensorrt_llm, cuda: versions, None where there is none."""

    cards: tuple[Card, ...] = ()
    driver: str | None = None
    tensorrt: str | None = None
    tensorrt_llm: str | None = None
    cuda: str | None = None


def look() -> Machine:
    cards, driver = _cards()
    return Machine(cards, driver, _tensorrt(), package("tensorrt_llm") or _in_image("tensorrt_llm"), _cuda())


def package(name: str) -> str | None:
    """The version of an installed Python package, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_image(name: str) -> str | None:
    """The version of a package of the image's environment, which is not ours when we run in one of our own there."""
    folders = [str(folder) for folder in IMAGE_ENVIRONMENT.glob("lib/python3*/site-packages")]
    return next((found.version for found in importlib.metadata.distributions(name=name, path=folders)), None)


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory a new process can have without swapping, None where the kernel does not say."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def tensorrt_version(number: int) -> str:
    """libnvinfer's own number in words: 101401 is 10.14.1 (10 000 x major since 10.0), 8601 was 8.6.1."""
    scale = 10_000 if number >= 10_000 else 1000
    return f"{number // scale}.{number % scale // 100}.{number % 100}"


def _cards() -> tuple[tuple[Card, ...], str | None]:
    if shutil.which("nvidia-smi") is None:
        return (), None
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        table = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (), None  # the tool is there and the driver is not
    rows = [row for row in csv.reader(io.StringIO(table), skipinitialspace=True) if len(row) == len(QUERY)]
    cards = tuple(_card(row) for row in rows)
    return cards, rows[0][4] if rows else None


def _card(row: Sequence[str]) -> Card:
    mib = [int(text) * 1024 * 1024 if text.isdigit() else 0 for text in row[2:4]]
    return Card(row[0], int(row[1].replace(".", "")) if row[1].replace(".", "").isdigit() else 0, *mib)


def _tensorrt() -> str | None:
    for name in LIBNVINFER:
        try:
            return tensorrt_version(ctypes.CDLL(name).getInferLibVersion())
        except (OSError, AttributeError):
            continue
    # Wheels keep the library in their own folder, off the loader's path; importing them would load all of CUDA.
    return next((v for name in TENSORRT_PACKAGES if (v := package(name) or _in_image(name))), None)


def _cuda() -> str | None:
    """The newest CUDA the driver runs."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


if __name__ == "__main__":
    json.dump(asdict(look()), sys.stdout)
    print()
