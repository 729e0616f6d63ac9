"""NVIDIA's AIPerf against an OpenAI endpoint, in an environment of its own.

It needs no model hub: the tokenizer is the engine's own, and the prompts are AIPerf's synthetic ones. Answers have a
fixed length (``ignore_eos``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environments import Environment
from benchmarks.other_clients import TOKENS, Found, Tool

ENVIRONMENT = Environment("aiperf", (("aiperf==0.13.0",),))
RESULT = "profile_export_aiperf.json"
# Our name of a figure → AIPerf's metric and statistic.
_FIGURES = {
    "requests/s": ("request_throughput", "avg"),
    "tokens/s": ("output_token_throughput", "avg"),
    **{f"TTFT {q}, ms": ("time_to_first_token", q) for q in ("p50", "p95")},
    **{f"ITL {q}, ms": ("inter_token_latency", q) for q in ("p50", "p95")},
    **{f"latency {q}, ms": ("request_latency", q) for q in ("p50", "p95")},
    "failed": ("error_request_count", "avg"),
}


def tool(url: str, model: str, tokenizer: Path) -> Tool:
    """Return AIPerf for an endpoint, installed if needed. Raises NotFound."""
    ENVIRONMENT.ensure()

    def command(load: Sequence[str], requests: int, seed: int, folder: Path) -> list[str]:
        return [
            *(str(ENVIRONMENT.program("aiperf")), "profile", "--model", model, "--url", url),
            *("--endpoint-type", "completions", "--streaming", "--tokenizer", str(tokenizer)),
            *("--isl", str(TOKENS[0]), "--osl", str(TOKENS[1]), "--extra-inputs", json.dumps({"ignore_eos": True})),
            *("--random-seed", str(seed), "--use-server-token-count", "--use-legacy-max-tokens"),
            *(*load, "--request-count", str(requests), "--artifact-dir", str(folder), "--ui", "none"),
        ]

    online = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}  # else it refuses a local folder
    evenly = ("--arrival-pattern", "constant")
    return Tool("AIPerf", "--concurrency", "--request-rate", evenly, command, read, online)


def read(folder: Path) -> Found:
    """Return the figures that AIPerf wrote. Raises IndexError if it wrote none."""
    table = json.loads(sorted(folder.rglob(RESULT))[0].read_text())
    measured = {name: (table.get(metric) or {}).get(kind) for name, (metric, kind) in _FIGURES.items()}
    return {name: float(value) for name, value in measured.items() if value is not None}
