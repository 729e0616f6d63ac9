"""Format measurements: tables for the terminal, CSV files. (JSON is ``measurement.save``.)"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import self_check
from benchmarks.figures import Spread
from benchmarks.measurement import Measurement

Goal = tuple[str, float, float, bool]  # what, measured, the bound, whether it is met
_MB = 1e6
_COUNTS = (
    *("requests", "ok", "failed", "cancelled", "window_s", "requests_per_s", "input_tokens_per_s"),
    *("output_tokens_per_s", "tokens_per_message", "goodput_per_s", "good_fraction", "slo_met"),
)
_SPREAD_NAMES = {
    "ttft_s": "time to first token",
    "itl_s": "inter-token latency",
    "gap_s": "gap between messages",
    "latency_s": "end to end",
}
SPREADS = tuple(_SPREAD_NAMES)


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Format aligned columns: the first to the left, the others to the right."""
    text = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in text) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  " + "  ".join(cells).rstrip()

    return "\n".join([line(text[0]), "  " + "  ".join("-" * width for width in widths), *map(line, text[1:])])


def medians(found: Mapping[str, Sequence[float]], what: str) -> str:
    """Format figures of several rounds."""
    rows = []
    for name, of in found.items():
        median, low, high = (number(value, 2) for value in (statistics.median(of), min(of), max(of)))
        rows.append((name, median, f"{low} to {high}"))
    return table(rows, (what, "median", "range"))


def ranged(values: Sequence[float]) -> str:
    """Format the median of ratios and, in brackets, their range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})" if values else "–"


def ms(seconds: float) -> str:
    """Format seconds as milliseconds with about three digits; "-" for nan."""
    if math.isnan(seconds):
        return "-"
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def number(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def on(conditions: Mapping[str, object]) -> str:
    """Describe the machine in one line."""
    cores, load = conditions["cores"], conditions["load_average_1min"]
    return f"{conditions['cpu']}, {cores} cores, load average {load:.1f} before"


def at_most(what: str, value: float, bound: float) -> Goal:
    return f"{what}, at most", value, bound, value <= bound


def at_least(what: str, value: float, bound: float) -> Goal:
    return f"{what}, at least", value, bound, value >= bound


def verdicts(goals: Sequence[Goal]) -> str:
    """Format figures beside their goals, a line each."""
    marks = {True: "met   ", False: "MISSED"}
    return "\n".join(f"  {marks[met]}  {what} {bound:g}: {value:.3g}" for what, value, bound, met in goals)


def write_json(table: object, folder: Path, kind: str) -> int:
    """Write ``folder``/``kind``.json and print where it is; return 0."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(table) + "\n")
    print(f"\n  written: {path}")
    return 0


def disturbance(others: float) -> str:
    """Format the share of the machine that other processes used, with a warning if it was too much."""
    warning = "; too much, do not use these figures" if others > self_check.OTHERS_SHARE else ""
    return f"  other processes used {others:.0%} of the machine meanwhile{warning}"


def of_run(run: Measurement) -> str:
    """Format everything about one run."""
    figures = run.figures
    parts = [
        f"{run.name}: {run.workload['loop']}; {lengths(run)}",
        f"  {on(run.conditions)}",
        f"  {figures.requests} requests in {figures.window_s:.1f} s: {figures.ok} answered, {figures.failed} failed, "
        f"{figures.cancelled} cancelled",
        *(f"    {count} × {name}, {_first(run, name)}" for name, count in figures.errors.items()),
    ]
    if run.records and not figures.requests:
        parts.append(f"  warmup: must end before the load does, all {len(run.records)} requests were sent within it")
    parts += [
        "",
        table(
            [(_SPREAD_NAMES[name], *_cells(getattr(figures, name))) for name in SPREADS],
            ("ms", "p50", "p90", "p95", "p99", "max", "mean"),
        ),
        "",
        f"  tokens/s out {number(figures.output_tokens_per_s)}, in {number(figures.input_tokens_per_s)}; "
        f"requests/s {number(figures.requests_per_s, 2)}; tokens per message {number(figures.tokens_per_message, 2)}",
        f"  goodput {number(figures.goodput_per_s, 2)} requests/s ({share(figures.good_fraction)}) under TTFT "
        f"{figures.slo.ttft_s * 1e3:g} ms and latency {figures.slo.latency_s:g} s; at P95 "
        + ("both are met" if figures.slo_met else "they are not met"),
    ]
    parts += _server(run) + _processes(run)
    parts += ["", f"  self-check: {self_check.verdict(run.checks)}"]
    marks = {True: "ok", False: "NOT OK", None: "-"}
    parts += [f"    {marks[check.ok]:>6}  {check.name}: {check.detail}" for check in run.checks]
    return "\n".join(parts)


def lengths(run: Measurement) -> str:
    """Describe prompts and answers; the server may count the prompts' tokens with another tokenizer than we did."""
    counted = [record.input_tokens for record in run.records if record.input_tokens]
    theirs = f" (median by the server's count {statistics.median(counted):g})" if counted else ""
    of_trace = "lengths of the trace, where it has none " if run.workload.get("replays_trace") else ""
    return f"{of_trace}in {run.workload['input_tokens']}{theirs}, out {run.workload['output_tokens']}"


def _first(run: Measurement, error_type: str) -> str:
    """Return the message of the first error of a type; those of others may have other numbers."""
    messages = (record.error.partition(": ")[2] for record in run.records if record.error_type == error_type)
    return f"the first with: {next(messages)[:200]}"


def _server(run: Measurement) -> list[str]:
    if run.server is None:
        return ["", "  no metrics of the server (set --metrics-url)"]
    server = run.server
    found = {"TTFT": server.latencies["ttft"]} | {f"  {phase}": one for phase, one in server.phases.items()}
    found |= {name: server.latencies[name] for name in ("itl", "coalescing wait", "latency")}
    rows = [(name, one.count, *map(ms, (one.mean_s, one.p50_s, one.p95_s, one.p99_s))) for name, one in found.items()]
    out = ["", table(rows, ("server's metrics, ms", "count", "mean", "p50", "p95", "p99"))]
    if server.bottleneck:
        out.append(f"  largest part of the time to first token: {server.bottleneck}")
    if server.cached_tokens:
        out.append(f"  {server.cached_tokens:,} of {server.input_tokens:,} prompt tokens came from the prefix cache")
    return out


def _processes(run: Measurement) -> list[str]:
    if not run.processes:
        return ["", "  no processes of the server on this machine"]
    per_token = run.cpu_us_per_token
    wall_s = max((use.wall_s for use in run.generators), default=0.0)

    def row(name: str, count: int, cpu_s: float, waited_s: float, peak: str) -> tuple:
        share = f"{waited_s / wall_s:.0%}" if wall_s else "-"
        return (name, count, number(cpu_s, 2), number(per_token.get(name, math.nan)), share, peak)

    rows = [
        row(name, use.processes, use.cpu_s, use.waited_s, number(use.peak_rss_bytes / _MB, 0))
        for name, use in sorted(run.processes.items())
    ]
    client_s, client_waited_s = (sum(getattr(u, name) for u in run.generators) for name in ("cpu_s", "waited_s"))
    rows.append(row("client", len(run.generators), client_s, client_waited_s, "-"))
    serving = run.serving_us_per_token
    return [
        "",
        table(rows, ("process", "number", "CPU s", "µs per token", "waited for a core", "peak RSS MB")),
        f"  serving (all but engine worker and client): {number(serving)} µs of CPU per token",
    ]


def of_sweep(runs: Sequence[Measurement]) -> str:
    rows: list[tuple] = []
    for run in runs:
        figures = run.figures
        ttft, itl, latency = figures.ttft_s, figures.itl_s, figures.latency_s
        rates = number(figures.output_tokens_per_s, 0), number(figures.requests_per_s, 2)
        times = map(ms, (ttft.p50, ttft.p95, ttft.p99, itl.p50, itl.p99, latency.p50, latency.p95))
        slo = number(figures.goodput_per_s, 2), "yes" if figures.slo_met else "no"
        sound = self_check.verdict(run.checks).partition(":")[0].partition(" ")[0]
        rows.append((run.name, *rates, *times, *slo, number(run.serving_us_per_token, 0), figures.failed, sound))
    header = ("load", "tok/s", "req/s", "TTFT p50", "p95", "p99", "ITL p50", "p99", "e2e p50", "p95", "goodput", "SLO")
    return table(rows, (*header, "CPU µs/tok", "failed", "check"))


def write_csv(runs: Sequence[Measurement], folder: Path, kind: str) -> list[Path]:
    """Write ``kind``.csv, a row per run, and ``kind``-requests.csv, a row per request. Times in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    per_run, per_request = [], []
    for run in runs:
        row: dict[str, object] = {"name": run.name} | {name: getattr(run.figures, name) for name in _COUNTS}
        for name in SPREADS:
            spread = asdict(getattr(run.figures, name))
            row |= {f"{name.removesuffix('_s')}_{key}_s": value for key, value in spread.items() if key != "count"}
        verdict = self_check.verdict(run.checks)
        per_run.append(row | {"serving_cpu_us_per_token": run.serving_us_per_token, "verdict": verdict})
        for r in run.records:
            instants = {"intended_s": r.intended_s - run.started_s, "sent_s": r.sent_s - run.started_s}
            times = instants | {"ttft_s": r.ttft_s, "latency_s": r.latency_s}
            written = {name: "" if at_s is None else f"{at_s:.6f}" for name, at_s in times.items()}
            counts = {"input_tokens": r.input_tokens, "output_tokens": r.tokens, "messages": len(r.messages)}
            ended = {"finish_reason": r.finish_reason, "cancelled": int(r.cancelled), "error": r.error}
            per_request.append({"name": run.name, "index": r.index} | written | counts | ended)
    paths = [folder / f"{kind}.csv", folder / f"{kind}-requests.csv"]
    for path, rows in zip(paths, (per_run, per_request), strict=True):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0] if rows else ())
            writer.writeheader()
            writer.writerows(rows)
    return paths


def _cells(spread: Spread) -> list[str]:
    return [ms(value) for value in (spread.p50, spread.p90, spread.p95, spread.p99, spread.max, spread.mean)]
