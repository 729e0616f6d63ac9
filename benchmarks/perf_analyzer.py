"""NVIDIA's perf_analyzer against the ensemble, streaming and unary.

It lives in an environment of its own, made on first use: the package ``perf_analyzer`` where the C
library is new enough for it (2.38), else the one that ``tritonclient`` 2.51.0 carries (2.34), which is the server's own
version and needs two libraries that nvidia-pytriton brings under other names.

The ensemble is decoupled, so perf_analyzer must use gRPC streams for unary answers too (``stream`` false: one
response). Answers have a fixed length: ``ignore_eos`` in the input file.
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import platform
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environments import Environment
from benchmarks.other_clients import TOKENS, Found, Tool
from benchmarks.prompts import PromptSource
from contract.errors import NotFound

RESULT, PROFILE = "perf_analyzer.csv", "profile.json"
OLD, OLD_GLIBC = "tritonclient==2.51.0", (2, 34)
NEW, NEW_GLIBC = "perf_analyzer==2.60.0", (2, 38)
# The name that perf_analyzer loads → the beginning of the name nvidia-pytriton's wheel gives the library.
LIBRARIES = {"libb64.so.0d": "libb64-", "libcudart.so.12": "libcudart-"}


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
    """Return what the perf_analyzer of ``made``, installed if needed, needs beside our environment. Raises NotFound."""
    made.ensure()
    if made.installs != ((OLD,),):
        return {}
    path = filter(None, (link_libraries(made.folder / "lib-perf"), os.environ.get("LD_LIBRARY_PATH")))
    return {"LD_LIBRARY_PATH": os.pathsep.join(path)}


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


def tool(url: str, prompts: PromptSource, stream: bool = True) -> Tool:
    """Return perf_analyzer for a server's ensemble, installed if needed. Raises NotFound.

    Each load is measured once, over its requests: the search for a stable window fails on a busy machine. No two
    requests of a load have the same prompt.
    """
    made = environment()
    environ = variables(made)

    def command(load: Sequence[str], requests: int, seed: int, folder: Path) -> list[str]:
        rng = random.Random(f"perf_analyzer {seed}")
        texts = [prompts.text(rng, TOKENS[0]) for _ in range(requests)]
        (folder / "inputs.json").write_text(json.dumps(inputs(texts, TOKENS[1], stream)))
        for written in (RESULT, PROFILE):  # it refuses to write a profile again
            (folder / written).unlink(missing_ok=True)
        return [
            *(str(made.program("perf_analyzer")), "-m", "ensemble", "-u", url, "-i", "grpc", "--streaming", "--async"),
            *("--input-data", str(folder / "inputs.json"), *load, "--request-count", str(requests)),
            *("--percentile", "95", "-f", str(folder / RESULT)),
            *("--profile-export-file", str(folder / PROFILE)),
        ]

    return Tool("perf_analyzer", "--concurrency-range", "--request-rate-range", (), command, read, environ)


def inputs(texts: Sequence[str], tokens: int, stream: bool) -> dict[str, object]:
    """Return perf_analyzer's input file: a greedy answer of so many tokens to each text."""
    options = {"max_tokens": [tokens], "ignore_eos": [True], "top_k": [1], "stream": [stream]}
    return {"data": [{"text_input": [text]} | options for text in texts]}


def read(folder: Path) -> Found:
    """Return the figures of perf_analyzer's CSV, and the TTFT of its profile: that of the first response.

    It leaves some profiles empty (32 streams of 2.51.0) or cut off, without saying so.
    """
    with (folder / RESULT).open(newline="") as file:
        row = next(csv.DictReader(file))
    rates = {"requests/s": row["Inferences/Second"], "responses/s": row.get("Response Throughput") or "nan"}
    latencies = {f"latency p{q}, ms": float(row[f"p{q} latency"]) / 1e3 for q in (50, 95, 99)}
    try:
        sent = json.loads((folder / PROFILE).read_text())["experiments"][0]["requests"]
    except json.JSONDecodeError:
        sent = []
    firsts_ms = [(one["response_timestamps"][0] - one["timestamp"]) / 1e6 for one in sent if one["response_timestamps"]]
    ttft = {"TTFT p50, ms": statistics.median(firsts_ms)} if firsts_ms else {}
    return {name: float(value) for name, value in rates.items()} | ttft | latencies
