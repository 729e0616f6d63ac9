"""Run NVIDIA's perf_analyzer against the ensemble: streaming and unary, at concurrencies and at request rates.

It lives in an environment of its own, made on first use: the package ``perf_analyzer`` where the C
library is new enough for it (2.38), else the one that ``tritonclient`` 2.51.0 carries (2.34), which is the server's own
version and needs two libraries that nvidia-pytriton brings under other names.

The ensemble is decoupled, so perf_analyzer must use gRPC streams for unary answers too (``stream`` false: one
response). Answers have a fixed length: ``ignore_eos`` in the input files.
"""

from __future__ import annotations

import csv
import importlib.metadata
import itertools
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environments import Environment, loads, measure, report_of
from benchmarks.measurement import ServerUnderTest
from contract.errors import NotFound

INPUTS = Path(__file__).resolve().parent / "perf_analyzer_inputs"
OLD, OLD_GLIBC = "tritonclient==2.51.0", (2, 34)
NEW, NEW_GLIBC = "perf_analyzer==2.60.0", (2, 38)
# The name that perf_analyzer loads → the beginning of the name nvidia-pytriton's wheel gives the library.
LIBRARIES = {"libb64.so.0d": "libb64-", "libcudart.so.12": "libcudart-"}
KINDS = ("streaming", "unary")


def glibc() -> tuple[int, int]:
    """Return the C library's version; (0, 0) if it is not glibc."""
    name, version = platform.libc_ver()
    numbers = version.split(".")[:2]
    return (int(numbers[0]), int(numbers[1])) if name == "glibc" and len(numbers) == 2 else (0, 0)


def package(version: tuple[int, int]) -> str:
    """Return the package for a glibc. Raises NotFound if none runs with it."""
    if version >= NEW_GLIBC:
        return NEW
    if version >= OLD_GLIBC:
        return OLD
    raise NotFound(f"no perf_analyzer runs with glibc {version[0]}.{version[1]}; it must be 2.34 or newer")


def environment() -> Environment:
    """Return the environment of the newest perf_analyzer that runs here. Raises NotFound if there is none."""
    return Environment("perf_analyzer", ((package(glibc()),),))


def variables(made: Environment) -> dict[str, str]:
    """Return the process environment for the perf_analyzer of ``made``, installed if needed. Raises NotFound."""
    made.ensure()
    if made.installs != ((OLD,),):
        return dict(os.environ)
    path = filter(None, (link_libraries(made.folder / "lib-perf"), os.environ.get("LD_LIBRARY_PATH")))
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(path)}


def link_libraries(folder: Path) -> str:
    """Link the two libraries by the names that perf_analyzer loads. Raises NotFound without nvidia-pytriton."""
    try:
        site = Path(str(importlib.metadata.distribution("nvidia-pytriton").locate_file("nvidia_pytriton.libs")))
    except importlib.metadata.PackageNotFoundError as exc:
        raise NotFound("perf_analyzer needs libraries of nvidia-pytriton, which is not installed: make setup") from exc
    folder.mkdir(parents=True, exist_ok=True)
    for name, beginning in LIBRARIES.items():
        found = sorted(site.glob(f"{beginning}*"))
        if not found:
            raise NotFound(f"there is no {beginning}* in {site}, which perf_analyzer needs as {name}")
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(found[0])
    return str(folder)


def command(program: Path, url: str, kind: str, load: list[str], out: Path, requests: int) -> list[str]:
    """Return one run's argv. ``load``: the options for concurrency or request rate.

    Each load is measured once, over ``requests``: perf_analyzer's search for a stable window fails on a busy machine.
    """
    return [
        str(program),
        *("-m", "ensemble", "-u", url, "-i", "grpc", "--streaming", "--async"),
        *("--input-data", str(INPUTS / f"{kind}.json")),
        *load,
        *("--request-count", str(requests)),
        *("--percentile", "95", "-f", str(out.with_suffix(".csv"))),
        *("--profile-export-file", str(out.with_suffix(".json"))),
    ]


def run(server: ServerUnderTest, concurrencies: Sequence[int], rates: Sequence[float], requests: int, out: Path) -> int:
    """Run both kinds under every load; print a table, leave perf_analyzer's CSV and profiles in ``out``."""
    made = environment()
    environ = variables(made)
    out.mkdir(parents=True, exist_ok=True)
    options = ("--concurrency-range", "--request-rate-range", "--request-distribution", "poisson")
    runs = []
    for kind, (name, load, _) in itertools.product(KINDS, loads(concurrencies, rates, *options)):
        path = out / f"{kind}-{name.replace(' ', '-')}"
        path.with_suffix(".csv").unlink(missing_ok=True)
        argv = command(made.program("perf_analyzer"), server.url, kind, load, path, requests)
        runs.append((f"{kind}, {name}", argv, path.with_suffix(".txt")))
    failures = measure("perf_analyzer", runs, environ)
    rows = [row for name, _, log in runs for row in read(log.with_suffix(".csv"), name)]
    header = ("requests/s", "responses/s", "p50 ms", "p95 ms", "p99 ms")
    return report_of("perf_analyzer", rows, header, failures, out)


def read(path: Path, label: str) -> list[tuple]:
    """Return the rows of perf_analyzer's CSV in our columns; [] if it wrote none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        (
            label,
            f"{float(row['Inferences/Second']):.2f}",
            f"{float(row.get('Response Throughput') or 'nan'):.1f}",
            *(f"{float(row[f'p{q} latency']) / 1e3:.1f}" for q in (50, 95, 99)),
        )
        for row in rows
    ]
