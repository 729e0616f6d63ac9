"""Run NVIDIA's AIPerf against the gateway's OpenAI endpoint.

It is installed into an environment of its own on first use. It needs no model hub: the tokenizer is the engine's own,
and the prompts are AIPerf's synthetic ones. Answers have a fixed length (``ignore_eos``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.environments import Environment, loads, measure, report_of

ENVIRONMENT = Environment("aiperf", (("aiperf==0.13.0",),))
RESULT = "profile_export_aiperf.json"
# AIPerf's name of a metric → (ours, its statistics).
_COLUMNS = {
    "request_throughput": ("requests/s", ("avg",)),
    "output_token_throughput": ("tok/s", ("avg",)),
    "time_to_first_token": ("TTFT ms", ("p50", "p95")),
    "inter_token_latency": ("ITL ms", ("p50", "p95")),
    "request_latency": ("e2e ms", ("p50", "p95")),
}


def command(
    url: str, model: str, tokenizer: Path, load: Sequence[str], tokens: tuple[int, int], out: Path
) -> list[str]:
    """Return one run's argv.

    load: the options for concurrency or request rate, and the number of requests.
    tokens: of a prompt and of an answer.
    """
    return [
        *(str(ENVIRONMENT.program("aiperf")), "profile", "--model", model, "--url", url),
        *("--endpoint-type", "completions", "--streaming", "--tokenizer", str(tokenizer)),
        *("--isl", str(tokens[0]), "--osl", str(tokens[1]), "--extra-inputs", json.dumps({"ignore_eos": True})),
        *("--random-seed", "0", "--use-server-token-count", "--use-legacy-max-tokens"),
        *load,
        *("--artifact-dir", str(out), "--ui", "none"),
    ]


def run(
    url: str,
    model: str,
    tokenizer: Path,
    concurrencies: Sequence[int],
    rates: Sequence[float],
    requests: int,
    out: Path,
    tokens: tuple[int, int] = (128, 64),
) -> int:
    """Run every load; print a table, leave AIPerf's own files in ``out``. Raises NotFound if it cannot be installed."""
    ENVIRONMENT.ensure()
    runs, poisson = [], ("--arrival-pattern", "poisson")
    for name, load, least in loads(concurrencies, rates, "--concurrency", "--request-rate", *poisson):
        folder = out / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        count = ["--request-count", str(max(requests, 2 * least))]
        runs.append((name, command(url, model, tokenizer, [*load, *count], tokens, folder), folder / "aiperf.txt"))
    # HF_HUB_OFFLINE makes its tokenizer loader refuse a local folder.
    failures = measure("AIPerf", runs, {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"})
    written = [(name, next(log.parent.rglob(RESULT), None)) for name, _, log in runs]
    rows = [(name, *read(path)) for name, path in written if path is not None]
    return report_of("AIPerf", rows, (*header(), "failed"), failures, out)


def header() -> list[str]:
    return [f"{name} {kind}" if kind != "avg" else name for name, kinds in _COLUMNS.values() for kind in kinds]


def read(path: Path) -> list[str]:
    """Return a row of AIPerf's JSON in our columns; "-" for what it did not measure."""
    table = json.loads(path.read_text())
    cells = [
        report.number(float((table.get(metric) or {}).get(kind, "nan")), 1)
        for metric, (_, kinds) in _COLUMNS.items()
        for kind in kinds
    ]
    return [*cells, str(int((table.get("error_request_count") or {}).get("avg", 0)))]
