"""Write docs/performance.md from the kept runs: a table and a plot for each group of figures, and the goals missed.

``make bench-all KEEP=1`` calls it. The words are in page.toml, every number is from the runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.child_process import ROOT
from benchmarks.figures import HIGHER, rounds_of
from benchmarks.self_check import OTHERS_SHARE
from contract import toml_table

PAGE = ROOT / "docs" / "performance.md"
Entry = Mapping[str, Any]
# Groups of the peers' figures in the first table, by name.
RATIOS = {
    "tokens/s": "tokens/s",
    "TTFT p95, ms": "time to first token, p95",
    "start, s": "time from start to first token",
    "memory at most, MB": "memory",
}
OTHERS = "others used"
WORDS = toml_table.read(Path(__file__).with_suffix(".toml"))


def write(kind: str, parts: Mapping[str, Entry], page: Path = PAGE) -> None:
    """Write the page and its plots. parts: by name, as ``benchmarks.suite`` keeps them, figures by ``GROUP: LABEL``."""
    folder = page.with_suffix("")
    for old in folder.glob("*.svg"):
        old.unlink()
    lines = [WORDS["head"].format(kind=kind), *_short(parts)]
    for name, entry in parts.items():
        title, about = _words(name)
        others = f"other processes used {entry['others']:.0%} of the machine"
        others = f"**{others}: only ratios mean something here**" if entry["others"] > OTHERS_SHARE else others
        where = f" (FOLDER: {entry['model']})" if entry.get("model") else ""
        command = f"`{entry.get('command', name)}`{where} on {entry['when']}, commit {entry['commit']}; {others}."
        lines += ["", f"## {title}", about, "", command]
        for group, rows in groups(entry["figures"]).items():
            better, best = next(iter(rows.values()))["better"], name.startswith("peers")
            lines += ["", f"**{group}** ({better} is better)", "", *table(rows, best)]
            slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in f"{name} {group}".lower()).strip("-")
            values = {label: rounds_of(one) for label, one in rows.items()}
            if drawn := {label: of for label, of in values.items() if max(of) < math.inf}:
                plots.ranges(drawn, f"{group} ({better} is better)", folder / f"{slug}.svg")
                lines += ["", f"![{group}]({folder.name}/{slug}.svg)"]
        if missed := [goal for goal in entry.get("goals", ()) if not goal[3]]:
            lines += ["", f"Goals missed here ({len(missed)} of {len(entry['goals'])}):", ""]
            lines += [f"- {what} {number(bound)}: {number(value)}" for what, value, bound, _ in missed]
        if notes := entry.get("notes"):
            lines += ["", "Conditions:", "", *(f"- {note}" for note in notes)]
    page.write_text("\n".join(lines) + "\n")
    print(f"  written: {page}")


def groups(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures by group and label."""
    found: dict[str, dict[str, Any]] = {}
    for name, one in figures.items():
        group, _, label = name.partition(": ")
        found.setdefault(group, {})[label] = one
    return found


def table(rows: Mapping[str, Any], best: bool = False) -> list[str]:
    """Format figures of one unit. Labels of the form ``ROW, COLUMN`` share a row. best: mark that of each column."""
    if all(", " in label for label in rows):
        cells = {tuple(label.rsplit(", ", 1)): one for label, one in rows.items()}
    else:
        cells = {(label, "median (range)"): one for label, one in rows.items()}
    columns, names = (list(dict.fromkeys(key[nth] for key in cells)) for nth in (1, 0))
    corner = "streams at once" if all(column.isdecimal() for column in columns) else ""
    if all(column[:1].isdecimal() for column in columns):
        columns.sort(key=lambda column: (column.partition(" ")[2], float(column.partition(" ")[0])))  # as ``16 paced``
    marked = set()
    for column in columns if best and len(names) > 1 else ():
        of = [key for key in cells if key[1] == column]
        most = max if cells[of[0]]["better"] == HIGHER else min
        marked.add(most(of, key=lambda key: _median(cells[key])))
    lines = [f"| {corner} | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    shown = {key: _cell(rounds_of(one), key in marked) for key, one in cells.items()}
    return lines + [f"| {name} | {' | '.join(shown.get((name, column), '') for column in columns)} |" for name in names]


def _cell(values: Sequence[float], bold: bool) -> str:
    median = number(statistics.median(values))
    spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
    return f"**{median}**{spread}" if bold else f"{median}{spread}"


def _median(figure: Mapping[str, Any]) -> float:
    return statistics.median(rounds_of(figure))


def number(value: float | None) -> str:
    """Format a figure; None and inf are of what failed."""
    if value is None or math.isinf(value):
        return "failed"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _short(parts: Mapping[str, Entry]) -> list[str]:
    """Return where Trident is ahead of the peers and where behind, how many goals it meets, and what was disturbed."""
    columns: list[str] = []
    rows: dict[str, dict[str, str]] = {}
    for name, entry in parts.items():
        found = groups(entry["figures"])
        for group, what in RATIOS.items():
            # By the last word of a label: streams at once, or nothing.
            for label, one in found.get(group, {}).items():
                if label.startswith("Trident, gRPC") and (theirs := _best(found[group], label)):
                    ratio = _median(one) / theirs
                    worse = ratio < 1 if one["better"] == HIGHER else ratio > 1
                    column = f"at {label.rpartition(', ')[2]}" if label != "Trident, gRPC" else "any"
                    columns += [column] if column not in columns else []
                    title = f"{_words(name)[0].partition(':')[0]}: {what}"
                    row = rows.setdefault(title, {OTHERS: _others(entry)})
                    row[column] = f"**{number(ratio)}**" if worse else number(ratio)
    columns += [OTHERS]
    lines = ["## In short", WORDS["short"].strip(), ""]
    lines += [f"| | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"] if rows else ["No peer was measured."]
    lines += [f"| {title} | {' | '.join(of.get(column, '') for column in columns)} |" for title, of in rows.items()]
    lines += ["", WORDS["goals"].strip(), "", f"| | met | missed | {OTHERS} |", "|---|--:|--:|--:|"]
    for name, entry in parts.items():
        if entry.get("goals"):
            met = sum(goal[3] for goal in entry["goals"])
            lines.append(f"| {_words(name)[0]} | {met} | {len(entry['goals']) - met} | {_others(entry)} |")
    return lines


def _others(entry: Entry) -> str:
    """Return the share of the machine that others used, and whether that was too much."""
    return f"{entry['others']:.0%}{': disturbed' if entry['others'] > OTHERS_SHARE else ''}"


def _best(rows: Mapping[str, Any], ours: str) -> float:
    """Return the best peer's median under the load of one of our figures; 0 without a peer."""
    load = ours.removeprefix("Trident, gRPC")
    peers = (label for label in rows if not label.startswith("Trident") and label.endswith(load))
    theirs = [_median(rows[label]) for label in peers]
    best = max if rows[ours]["better"] == HIGHER else min
    return best(filter(math.isfinite, theirs), default=0.0)


def _words(part: str) -> tuple[str, str]:
    """Return the title and the explanation of a part."""
    words = WORDS.get(part, {})
    return words.get("title", part), words.get("about", "").strip()
