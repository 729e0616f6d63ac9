"""Run every part of the benchmarks in bounded time, and compare with the last kept run on this kind of machine.

A part is a verb in a process of its own, ended when its time is up. What it has in its JSON file as ``compared`` (see
``Figure``), or what ``read`` makes of that file, is compared with baseline.json. A further part is one line of PARTS.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, plots, report
from benchmarks.child_process import ROOT, process
from benchmarks.figures import noise
from contract import step_model
from contract.errors import InvalidArgument

BASELINE = ROOT / "benchmarks" / "baseline.json"
PAGE = ROOT / "docs" / "performance.md"
LOWER, HIGHER = "lower", "higher"


@dataclass(frozen=True)
class Figure:
    """A measured figure. better: ``lower`` or ``higher``. values: of each round."""

    better: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def noise(self) -> float:
        """By how much the rounds differ."""
        return noise(self.values)

    def worse_by(self, before: Figure) -> float:
        """Return by which factor it is worse than ``before``, less 1."""
        ratio = self.median / before.median
        return (ratio if self.better == LOWER else 1 / ratio) - 1

    def regressed(self, before: Figure) -> bool:
        """Return whether it is worse than ``before`` by more than either run's noise."""
        return self.worse_by(before) > max(self.noise, before.noise)


Figures = dict[str, Figure]  # by ``GROUP: LABEL``; the figures of a group have one unit


def compared(table: Any) -> Figures:
    return {name: Figure(one["better"], one["values"]) for name, one in table["compared"].items()}


def _relaying(table: Any) -> Figures:
    rows = {(row["path"], row["streams"], row["paced"]): row["us_of_rounds"] for row in table["relayed"]}
    found: Figures = {}
    for (path, streams, paced), values in rows.items():
        name, _, protocol = path.rpartition(", ")
        label = f"{protocol}, {streams} {'paced' if paced else 'unpaced'}"
        if name:
            found[f"CPU of a token, µs: {name}, {label}"] = Figure(LOWER, values)
        bare = rows.get((f"bare relay, {protocol}", streams, paced))
        if name == "gateway" and bare:
            ratios = [ours / theirs for ours, theirs in zip(values, bare, strict=True)]
            found[f"CPU of the bare relay's: {label}"] = Figure(LOWER, ratios)
    return found


def _limits(table: Any) -> Figures:
    slow = table["connections"]
    found = {f"MiB of {one['streams']} streams: {one['protocol']}": [one["peak_rss_mib"]] for one in slow}
    found |= {f"recovery after a burst, s: {one['protocol']}": [one["recovered_s"]] for one in table["burst"]}
    return {name: Figure(LOWER, values) for name, values in found.items()}


def _efficiency(table: Any) -> Figures:
    found: dict[str, list[float]] = {}
    for engine, batches in table["batches"].items():
        speed = {(b["path"], b["concurrency"], b["round"]): b["tokens"] / b["wall_s"] for b in batches}
        for b in batches:
            if b["path"] != "raw engine":
                label, key = f"{engine}, {b['path']}, {b['concurrency']}", (b["concurrency"], b["round"])
                ratio = speed[(b["path"], *key)] / speed[("raw engine", *key)]
                found.setdefault(f"speed of the raw engine's: {label}", []).append(ratio)
                serving_us = 1e6 * sum(b["serving_cpu_s"].values()) / b["tokens"]
                found.setdefault(f"serving CPU of a token, µs: {label}", []).append(serving_us)
    return {name: Figure(HIGHER if name.startswith("speed") else LOWER, values) for name, values in found.items()}


def _hops(table: Any) -> Figures:
    return {
        f"CPU of a response, µs: {model}, {at}": Figure(
            LOWER, [1e6 * sum(b["serving_cpu_s"].values()) / b["messages"] for b in batches]
        )
        for at, found in table.items()
        if at.isdigit()
        for model, batches in found["batches"].items()
    }


def _cancel(table: Any) -> Figures:
    return {"cancel to the next request, ms: p50": Figure(LOWER, [1e3 * table["figures"]["p50"]])}


def _sweep(table: Any) -> Figures:
    return {f"tokens/s: {run['name']}": Figure(HIGHER, [run["figures"]["output_tokens_per_s"]]) for run in table}


def _peers(table: Any) -> Figures:
    found: dict[str, list[float]] = {}
    for one in table["rounds"]:
        found.setdefault(f"tokens/s: {one['peer']}, {one['concurrency']}", []).append(one["tokens_per_s"])
    return {name: Figure(HIGHER, values) for name, values in found.items()}


@dataclass(frozen=True)
class Part:
    """A verb of the benchmarks.

    options, limit_s: of a whole run. quick: both of a quick one; None leaves the part out.
    kind: stem of the JSON file that it writes; the verb by default.
    """

    name: str
    verb: str
    options: str
    limit_s: float
    quick: tuple[str, float] | None = None
    read: Callable[[Any], Figures] = compared
    kind: str = ""

    def file(self, out: Path) -> Path:
        return out / self.name / f"{self.kind or self.verb}.json"


_RELAYING = "--only latency,cost,workers --rounds 3 --seconds 2"
_RELAYING_QUICK = "--only latency,workers --rounds 2 --seconds 1 --without-peers"
_LIMITS = "--only connections,burst"
_EFFICIENCY_QUICK = "--engines demo --rounds 1 --concurrency 1,32"
_SWEEP_QUICK = "--engine demo --concurrency 1,8 --duration 3"
PARTS = (
    Part("relaying", "gateway", _RELAYING, 900, (_RELAYING_QUICK, 80), _relaying),
    Part("limits", "gateway", _LIMITS, 360, None, _limits),
    Part("efficiency", "efficiency", "--rounds 2", 480, (_EFFICIENCY_QUICK, 90), _efficiency),
    Part("hops", "hops", "--rounds 2", 240, None, _hops),
    Part("textbook", "textbook", "--rounds 2", 180, ("--rounds 1 --concurrency 8 --tokens 32", 30)),
    Part("calibrate", "calibrate", "--engine demo --seconds 90", 120),
    Part("cancel", "cancel", "--engine demo", 120, ("--engine demo --samples 10", 40), _cancel),
    Part("sweep", "sweep", "--engine demo --duration 5", 120, (_SWEEP_QUICK, 45), _sweep),
    Part("clients", "clients", "--engine demo", 480),
    Part("peers", "peers", "--rounds 1 --duration 3", 600, None, _peers),
)


def run(only: Sequence[str], quick: bool, keep: bool, out: Path, parts: Sequence[Part] = PARTS) -> int:
    """Run the parts, print their tables and the comparison, write all.json.

    A part whose JSON file is in ``out`` already is not run again. keep: make this run the one that later ones are
    compared with, and draw docs/performance.md.
    Returns 1 if a part failed or was not done in time, else 3 if a figure regressed, else 0.
    """
    if unknown := set(only) - {part.name for part in parts}:
        raise InvalidArgument("only", f"must be of {', '.join(part.name for part in parts)}, got {min(unknown)!r}")
    conditions = machine.described()
    kind = step_model.machine_kind()
    figures: Figures = {}
    failed: dict[str, str] = {}
    for part in parts:
        if (only and part.name not in only) or (quick and part.quick is None):
            continue
        print(f"== {part.name}", flush=True)
        problem = "" if part.file(out).exists() else _run(part, quick, out)
        if problem:
            failed[part.name] = problem
            print(f"  {part.name} {problem}", flush=True)
        if part.file(out).exists():
            table = json.loads(part.file(out).read_text())
            figures |= {f"{part.name}: {name}": one for name, one in part.read(table).items() if usable(one)}
    kept: dict[str, Any] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    before = {name: Figure(**one) for name, one in kept.get(kind, {}).get("figures", {}).items()}
    regressed = compare(figures, before)
    print(_comparison(figures, before, kind, kept.get(kind, {}).get("when", "")))
    written = {name: asdict(one) for name, one in figures.items()}
    load = f"{conditions['load_average_1min']:.1f}"
    entry = {"when": time.strftime("%Y-%m-%d", time.gmtime()), "commit": _commit(), "load": load, "figures": written}
    table = {"machine": kind, "conditions": conditions, **entry, "failed": failed, "regressed": regressed}
    report.write_json(table, out, "all")
    if keep:
        figures_kept = {name: asdict(one) for name, one in before.items()} | written
        kept[kind] = entry | {"figures": {name: _rounded(one) for name, one in figures_kept.items()}}
        BASELINE.write_text(json.dumps(kept, indent=1) + "\n")
        draw(kind, kept[kind])
    return 1 if failed else 3 if regressed else 0


def usable(figure: Figure) -> bool:
    return bool(figure.values) and all(0 < value < float("inf") for value in figure.values)


def compare(figures: Figures, before: Figures) -> list[str]:
    """Return the names of the figures that regressed."""
    return [name for name, one in figures.items() if name in before and one.regressed(before[name])]


def _run(part: Part, quick: bool, out: Path) -> str:
    """Run a part, print what it printed, and return why it failed; "" if it did not."""
    options, limit_s = part.quick if quick and part.quick else (part.options, part.limit_s)
    folder = part.file(out).parent
    command = [sys.executable, "-m", "benchmarks", part.verb, *options.split(), "--out", str(folder)]
    log = folder / "output.txt"
    with process(command, log, pipe_output=False) as child:
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"took more than {limit_s:g} s; see {log}"
    print(log.read_text(), flush=True)
    return "" if code in (0, 3) else f"ended with code {code}"


def _comparison(figures: Figures, before: Figures, kind: str, when: str) -> str:
    """Format the figures beside those of the kept run, the regressed ones named at the end."""
    rows = []
    for name, one in figures.items():
        cells = (f"{one.median:.4g}", f"{min(one.values):.4g} to {max(one.values):.4g}")
        verdict = "", "new"
        if name in before:
            change = -one.worse_by(before[name])
            verdict = f"{before[name].median:.4g}", "WORSE" if one.regressed(before[name]) else f"{change:+.0%}"
        rows.append((name, *cells, *verdict))
    regressed = compare(figures, before)
    found = report.table(rows, ("figure", "median", "range", "kept", "better by"))
    names = "".join(f"\n    {name}" for name in regressed)
    return (
        f"\n{kind}; kept run of {when or 'no day yet'}\n{found}\n"
        f"  {len(regressed)} figures are worse by more than the noise{names}"
    )


def _rounded(figure: Mapping[str, Any]) -> dict[str, Any]:
    return {"better": figure["better"], "values": [float(f"{value:.4g}") for value in figure["values"]]}


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def draw(kind: str, entry: Mapping[str, Any], page: Path = PAGE) -> None:
    """Write the page of a kept run, with a plot for each group of figures."""
    groups: dict[str, dict[str, Figure]] = {}
    for name, one in entry["figures"].items():
        part, group, label = name.split(": ", 2)
        groups.setdefault(f"{part}: {group}", {})[label] = Figure(**one)
    folder = page.with_suffix("")
    lines = [
        "# Performance",
        "Written by `make bench-all KEEP=1`, not by hand: medians, lines from smallest to largest round.",
        "Losses, conditions: [the log](../benchmarks/LOG.md). Method: [decision 0008](decisions/0008-benchmarks.md).",
        "",
        f"{kind}; {entry['when']}, commit {entry['commit']}; load average {entry['load']} before.",
    ]
    for name, figures in groups.items():
        path = folder / f"{''.join(c if c.isascii() and c.isalnum() else '-' for c in name.lower()).strip('-')}.svg"
        better = next(iter(figures.values())).better
        plots.ranges({label: one.values for label, one in figures.items()}, f"{name} ({better} is better)", path)
        lines += ["", f"## {name[0].upper()}{name[1:]}", f"![{name}]({folder.name}/{path.name})"]
    page.write_text("\n".join(lines) + "\n")
    print(f"  written: {page}")
