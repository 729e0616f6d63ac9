"""NVIDIA's load generators under a load, and the figures that they write: perf_analyzer and AIPerf.

Each lives in an environment of its own, made on first use. Answers have a fixed length (``ignore_eos``).
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child_process import last_lines, process
from benchmarks.environments import Environment
from benchmarks.prompts import PromptSource
from contract.errors import EngineFailed, NotFound

START_S = 300.0  # that a tool may take besides its load
TOKENS = (128, 64)  # of a prompt and of an answer
Found = dict[str, float]  # by the figure's name: requests/s, tokens/s; ms: TTFT, ITL and latency p50 and p95

# The perf_analyzer that the server's own version of tritonclient carries. It needs two libraries that nvidia-pytriton
# brings under other names: the name that it loads → the beginning of that name.
PERF_ANALYZER = Environment("perf_analyzer", (("tritonclient==2.51.0",),))
LIBRARIES = {"libb64.so.0d": "libb64-", "libcudart.so.12": "libcudart-"}
TABLE, PROFILE = "perf_analyzer.csv", "profile.json"

AIPERF = Environment("aiperf", (("aiperf==0.13.0",),))
AIPERF_RESULT = "profile_export_aiperf.json"
# Our name of a figure → AIPerf's metric and statistic.
_FIGURES = {
    "requests/s": ("request_throughput", "avg"),
    "tokens/s": ("output_token_throughput", "avg"),
    **{f"TTFT {q}, ms": ("time_to_first_token", q) for q in ("p50", "p95")},
    **{f"ITL {q}, ms": ("inter_token_latency", q) for q in ("p50", "p95")},
    **{f"latency {q}, ms": ("request_latency", q) for q in ("p50", "p95")},
    "failed": ("error_request_count", "avg"),
}


@dataclass(frozen=True)
class Tool:
    """A load generator and the server that it is to load.

    concurrency, rate: options in front of a closed loop's requests in flight and of an open loop's requests per second;
        evenly: those of an open loop besides, for equal distances.
    command: returns the argv of the load's options, the number of requests, the seed, and the folder for its files.
    read: returns what it wrote there. Raises OSError, LookupError or ValueError if that is no result.
    """

    name: str
    concurrency: str
    rate: str
    evenly: tuple[str, ...]
    command: Callable[[Sequence[str], int, int, Path], list[str]]
    read: Callable[[Path], Found]
    environ: Mapping[str, str]

    def measure(self, load: Sequence[str], requests: int, seed: int, folder: Path, limit_s: float = START_S) -> Found:
        """Run one load. Raises EngineFailed with the end of its output, or if it takes longer than ``limit_s``."""
        folder.mkdir(parents=True, exist_ok=True)
        argv, log = self.command(load, requests, seed, folder), folder / "output.txt"
        print(shlex.join(argv), file=sys.stderr, flush=True)
        # Also what it started itself ends with it.
        with process(argv, log, self.environ, pipe_output=False) as child:
            try:
                code = child.wait(limit_s)
            except subprocess.TimeoutExpired as error:
                raise EngineFailed(f"{self.name} took more than {limit_s:g} s") from error
        if code:
            raise EngineFailed(last_lines(log) or f"{self.name} ended with code {code}")
        try:
            return self.read(folder)
        except (OSError, LookupError, ValueError) as error:
            raise EngineFailed(f"{self.name} wrote no result: {error!r}; see {log}") from error


def perf_analyzer(url: str, prompts: PromptSource, stream: bool = True) -> Tool:
    """Return perf_analyzer for a server's ensemble, installed if needed. Raises NotFound.

    The ensemble is decoupled: unary answers come over gRPC streams too. Each load is measured once, over its requests,
    whose prompts all differ: the search for a stable window fails on a busy machine.
    """
    environ = libraries()

    def command(load: Sequence[str], requests: int, seed: int, folder: Path) -> list[str]:
        rng = random.Random(f"perf_analyzer {seed}")
        texts = [prompts.text(rng, TOKENS[0]) for _ in range(requests)]
        (folder / "inputs.json").write_text(json.dumps(inputs(texts, TOKENS[1], stream)))
        for written in (TABLE, PROFILE):  # it refuses to write a profile again
            (folder / written).unlink(missing_ok=True)
        return [
            *(str(PERF_ANALYZER.program("perf_analyzer")), "-m", "ensemble", "-u", url, "-i", "grpc"),
            *("--streaming", "--async", "--input-data", str(folder / "inputs.json"), *load),
            *("--request-count", str(requests), "--percentile", "95", "-f", str(folder / TABLE)),
            *("--profile-export-file", str(folder / PROFILE)),
        ]

    return Tool("perf_analyzer", "--concurrency-range", "--request-rate-range", (), command, read_csv, environ)


def libraries() -> dict[str, str]:
    """Install perf_analyzer if needed, and return the variable that names its libraries. Raises NotFound."""
    PERF_ANALYZER.ensure()
    path = filter(None, (link_libraries(PERF_ANALYZER.folder / "lib-perf"), os.environ.get("LD_LIBRARY_PATH")))
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


def inputs(texts: Sequence[str], tokens: int, stream: bool) -> dict[str, object]:
    """Return perf_analyzer's input file: a greedy answer of so many tokens to each text."""
    options = {"max_tokens": [tokens], "ignore_eos": [True], "top_k": [1], "stream": [stream]}
    return {"data": [{"text_input": [text]} | options for text in texts]}


def read_csv(folder: Path) -> Found:
    """Return the figures of perf_analyzer's CSV, and of its profile the TTFT, that of the first response, and the
    requests/s: the CSV divides by whole seconds, so that 12 requests in 2.1 s are 4 a second.

    It leaves some profiles empty (32 streams) or cut off, without saying so.
    """
    with (folder / TABLE).open(newline="") as file:
        row = next(csv.DictReader(file))
    rates = {"requests/s": row["Inferences/Second"], "responses/s": row.get("Response Throughput") or "nan"}
    latencies = {f"latency p{q}, ms": float(row[f"p{q} latency"]) / 1e3 for q in (50, 95, 99)}
    try:
        sent = json.loads((folder / PROFILE).read_text())["experiments"][0]["requests"]
    except json.JSONDecodeError:
        sent = []
    answered = [one for one in sent if one["response_timestamps"]]
    profiled: Found = {}
    if answered:
        firsts_ms = [(one["response_timestamps"][0] - one["timestamp"]) / 1e6 for one in answered]
        took_ns = max(one["response_timestamps"][-1] for one in answered) - min(one["timestamp"] for one in answered)
        profiled = {"TTFT p50, ms": statistics.median(firsts_ms), "requests/s": len(answered) / took_ns * 1e9}
    return {name: float(value) for name, value in rates.items()} | profiled | latencies


def aiperf(url: str, model: str, tokenizer: Path) -> Tool:
    """Return AIPerf for an OpenAI endpoint, installed if needed, with its own synthetic prompts. Raises NotFound."""
    AIPERF.ensure()

    def command(load: Sequence[str], requests: int, seed: int, folder: Path) -> list[str]:
        return [
            *(str(AIPERF.program("aiperf")), "profile", "--model", model, "--url", url),
            *("--endpoint-type", "completions", "--streaming", "--tokenizer", str(tokenizer)),
            *("--isl", str(TOKENS[0]), "--osl", str(TOKENS[1]), "--extra-inputs", json.dumps({"ignore_eos": True})),
            *("--random-seed", str(seed), "--use-server-token-count", "--use-legacy-max-tokens"),
            *(*load, "--request-count", str(requests), "--artifact-dir", str(folder), "--ui", "none"),
        ]

    online = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}  # else it refuses a local folder
    evenly = ("--arrival-pattern", "constant")
    return Tool("AIPerf", "--concurrency", "--request-rate", evenly, command, read_json, online)


def read_json(folder: Path) -> Found:
    """Return the figures that AIPerf wrote. Raises IndexError if it wrote none."""
    table = json.loads(sorted(folder.rglob(AIPERF_RESULT))[0].read_text())
    measured = {name: (table.get(metric) or {}).get(kind) for name, (metric, kind) in _FIGURES.items()}
    return {name: float(value) for name, value in measured.items() if value is not None}
