"""GPUs, driver and installed libraries of this machine.

    python3 server/machine.py        prints them as JSON; the compile stage runs this inside the container

Uses only the standard library. The version of TensorRT is read from libnvinfer itself, because an image's label and its
Python packages can differ from the library that loads the engine.
"""

from __future__ import annotations

import csv
import ctypes
import importlib.metadata
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

QUERY = ("name", "compute_cap", "memory.total", "memory.free", "driver_version")
LIBNVINFER = ("libnvinfer.so.11", "libnvinfer.so.10", "libnvinfer.so")
TENSORRT_PACKAGES = ("tensorrt", "tensorrt_cu13", "tensorrt_cu12")
IMAGE_ENVIRONMENT = Path("/opt/venv-tritonserver")  # Python packages of NVIDIA's images


@dataclass(frozen=True)
class Gpu:
    """sm: compute capability times ten, e.g. 90."""

    name: str
    sm: int
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """The GPUs that the driver lists, and the versions of what is installed."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    tensorrt: str | None = None
    tensorrt_llm: str | None = None
    cuda: str | None = None


def inspect() -> Machine:
    """Inspect this machine."""
    gpus, driver = _gpus()
    return Machine(gpus, driver, _tensorrt(), package("tensorrt_llm") or _in_image("tensorrt_llm"), _cuda())


def package(name: str) -> str | None:
    """Return the version of an installed Python package without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _in_image(name: str) -> str | None:
    """The version of a package in the image's environment, which this interpreter need not belong to."""
    folders = [str(folder) for folder in IMAGE_ENVIRONMENT.glob("lib/python3*/site-packages")]
    return next((found.version for found in importlib.metadata.distributions(name=name, path=folders)), None)


def tensorrt_version(number: int) -> str:
    """Convert libnvinfer's version number: 101401 → 10.14.1 (10 000 x major since 10.0), 8601 → 8.6.1."""
    scale = 10_000 if number >= 10_000 else 1000
    return f"{number // scale}.{number % scale // 100}.{number % 100}"


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        table = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return (), None  # no nvidia-smi, or no driver
    rows = [row for row in csv.reader(io.StringIO(table), skipinitialspace=True) if len(row) == len(QUERY)]
    gpus = tuple(_gpu(row) for row in rows)
    return gpus, rows[0][4] if rows else None


def _gpu(row: Sequence[str]) -> Gpu:
    mib = [int(text) * 1024 * 1024 if text.isdigit() else 0 for text in row[2:4]]
    return Gpu(row[0], int(row[1].replace(".", "")) if row[1].replace(".", "").isdigit() else 0, *mib)


def _tensorrt() -> str | None:
    for name in LIBNVINFER:
        try:
            return tensorrt_version(ctypes.CDLL(name).getInferLibVersion())
        except (OSError, AttributeError):
            continue
    # Wheels keep the library outside the loader's path; importing them would load all of CUDA.
    return next((v for name in TENSORRT_PACKAGES if (v := package(name) or _in_image(name))), None)


def _cuda() -> str | None:
    """The newest CUDA version that the driver supports."""
    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


if __name__ == "__main__":
    json.dump(asdict(inspect()), sys.stdout)
    print()
