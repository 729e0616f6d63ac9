"""Measure what the prefix cache gives to prompts that share a system prompt: first token and tokens not read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, figures, machine, measurement, report
from benchmarks.driver import Extent
from benchmarks.lengths import Fixed
from benchmarks.server_process import running_server
from benchmarks.workload import Workload
from contract.errors import EngineFailed

INPUT_TOKENS, SHARED_TOKENS, OUTPUT_TOKENS = 640, 512, 16
FRESH, SHARED = "fresh", "shared"


def run(engine: str, concurrencies: Sequence[int], rounds: int, out: Path) -> int:
    """Measure, print, write prefix.json. Fresh and shared prompts take turns; what is shared differs between rounds."""
    engine, conditions = checkpoint.named(engine), machine.described()
    first, cached = (dict[str, list[float]]() for _ in range(2))
    extra: dict[str, dict[str, Any]] = {FRESH: {}, SHARED: {"prefix_groups": 1, "prefix_tokens": SHARED_TOKENS}}
    with running_server(engine) as server:
        for n in range(-1, rounds):  # round -1 warms up
            for at in concurrencies:
                for kind, options in extra.items():
                    lengths = Fixed(INPUT_TOKENS), Fixed(OUTPUT_TOKENS)
                    load = Workload(at, None, *lengths, seed=1000 * (n + 1) + 2 * at + len(options), **options)
                    if options:  # what is shared is not in the cache yet
                        before = replace(load, input_tokens=Fixed(SHARED_TOKENS + 16))
                        measurement.measure(kind, before, server, Extent(None, 0.0, 1))
                    found = measurement.measure(kind, load, server, Extent(None, 0.0, max(8, 2 * at)))
                    if found.figures.failed or found.server is None:
                        problem = f"{found.figures.failed} requests failed, metrics: {found.server is not None}"
                        raise EngineFailed(problem)
                    if n >= 0:
                        first.setdefault(f"TTFT p50, ms: {kind}, {at}", []).append(1e3 * found.figures.ttft_s.p50)
                        share = found.server.cached_tokens / found.server.input_tokens
                        cached.setdefault(f"from the cache: {kind}, {at}", []).append(share)
    about = f"{engine}: prompts of {INPUT_TOKENS} tokens, of which {SHARED_TOKENS} are shared"
    print(f"{about}; {rounds} rounds; {report.on(conditions)}\n{report.medians(first | cached, 'figure')}")
    compared = figures.compared(figures.LOWER, first) | figures.compared(figures.HIGHER, cached)
    return report.write_json({"conditions": conditions, "compared": compared, "notes": [about]}, out, "prefix")
