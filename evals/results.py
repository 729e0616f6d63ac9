"""Results of a run: the file that holds every case, and tables of one or two runs."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from contract import paired_scores, toml_table
from contract.errors import InvalidArgument

_STRICT = ConfigDict(extra="forbid", frozen=True)


class Case(BaseModel):
    """One answer.

    score: 0 to 1; None where the endpoint did not answer, for the reason in ``error``.
    refused, tokens (of the output), latency_s, cost: None where the run could not tell.
    """

    model_config = _STRICT
    id: str
    score: float | None = None
    error: str = ""
    output: str = ""
    refused: bool | None = None
    tokens: int | None = None
    latency_s: float | None = None
    cost: float | None = None


class TaskResult(BaseModel):
    """skipped: why the task was not run; "" if it was. sha256: of the task's files."""

    model_config = _STRICT
    kind: str
    about: str
    sha256: str
    skipped: str = ""
    cases: Sequence[Case] = ()


class Target(BaseModel):
    """What was asked. engine: its name, manifest_sha256: of its manifest.json; "" where that is not known."""

    model_config = _STRICT
    url: str
    model: str
    engine: str = ""
    manifest_sha256: str = ""


class Results(BaseModel):
    model_config = _STRICT
    format: Literal[1] = 1
    created: str
    target: Target
    tasks: Mapping[str, TaskResult]

    @property
    def sha256(self) -> str:
        """Digest of everything but the time, for the results that are made from these."""
        text = json.dumps(self.model_dump(mode="json", exclude={"created"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> Results:
    """Return the results in a file. Raises InvalidArgument that names file and field."""
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as exc:
        raise InvalidArgument(str(path), f"must be a results file of `python -m evals run`: {exc}") from exc
    return toml_table.checked(Results, table, str(path))


def pairs(baseline: Results, candidate: Results) -> dict[str, list[tuple[Case, Case]]]:
    """Return the cases of both, by task. A case that the candidate lacks failed there.

    Raises InvalidArgument where the two did not run the same tasks.
    """
    found = {}
    for name in sorted({*baseline.tasks, *candidate.tasks}):
        one, two = baseline.tasks.get(name), candidate.tasks.get(name)
        if one is None or two is None or one.sha256 != two.sha256 or bool(one.skipped) != bool(two.skipped):
            said = ["not run" if side is None else side.skipped or f"files {side.sha256[:12]}" for side in (one, two)]
            raise InvalidArgument(f"tasks.{name}", f"must be the same on both sides, got {said[0]} and {said[1]}")
        theirs = {case.id: case for case in two.cases}
        lost = [Case(id=case.id, error="the candidate has no such case") for case in one.cases if case.id not in theirs]
        theirs |= {case.id: case for case in lost}
        found[name] = [(case, theirs[case.id]) for case in one.cases]
    return found


def scores(cases: Iterable[Case]) -> np.ndarray:
    """Return the scores of the cases that have one: f64[n]."""
    return np.array([case.score for case in cases if case.score is not None], np.float64)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean: Wilson's for scores of 0 and 1, else the bootstrap's; 0 to 1 without."""
    if np.isin(values, (0.0, 1.0)).all():
        return paired_scores.wilson(int(values.sum()), len(values))
    return paired_scores.mean_interval(values)


def summary(task: TaskResult) -> dict[str, object]:
    """Return the figures of a task. failed: cases without an answer, which no score counts."""
    values, answered = scores(task.cases), [case for case in task.cases if not case.error]
    low, high = interval(values)
    found: dict[str, object] = {
        "kind": task.kind,
        "cases": len(values),
        "score": float(values.mean()) if len(values) else None,
        "low": low,
        "high": high,
        "failed": len(task.cases) - len(values),
    }
    for name in ("refused", "tokens", "latency_s", "cost"):
        known = [float(value) for case in answered if (value := getattr(case, name)) is not None]
        average = statistics.median if name == "latency_s" else statistics.fmean
        found[name] = average(known) if known else None
    return found


def table(results: Results) -> str:
    """Return the results as a Markdown table."""
    rows: list[Sequence[object]] = []
    for name, task in results.tasks.items():
        if task.skipped:
            rows.append((name, task.kind, f"skipped: {task.skipped}", *[""] * 6))
            continue
        found = summary(task)
        bounds = f"{found['low']:.3f} to {found['high']:.3f}"
        numbers = (_shown(found["score"]), bounds, found["cases"], found["failed"], _shown(found["refused"]))
        rows.append((name, task.kind, *numbers, _shown(found["tokens"], 1), _shown(found["latency_s"])))
    title = f"{results.target.model} at {results.target.url}" + (
        f", engine {results.target.engine}" * bool(results.target.engine)
    )
    header = ("task", "kind", "score", "95 %", "cases", "failed", "refused", "tokens", "latency s (median)")
    return f"{title}\n\n{markdown(rows, header)}"


def compared(baseline: Results, candidate: Results) -> str:
    """Return both runs side by side as a Markdown table. Raises: as ``pairs``."""
    rows: list[Sequence[object]] = []
    for name, cases in pairs(baseline, candidate).items():
        both = [(one.score, two.score) for one, two in cases if one.score is not None and two.score is not None]
        if not both:
            rows.append((name, "no case with two answers", *[""] * 6))
            continue
        one, two = np.array(both, np.float64).T
        differences = two - one
        low, high = paired_scores.mean_interval(differences)
        better, worse = int((differences > 0).sum()), int((differences < 0).sum())
        chance = min(1.0, 2 * paired_scores.sign_test(min(better, worse), max(better, worse)))
        shown = f"{differences.mean():+.3f}", f"{low:+.3f} to {high:+.3f}", better, worse, f"{chance:.3f}"
        rows.append((name, len(both), _shown(one.mean()), _shown(two.mean()), *shown))
    header = ("task", "cases", "A", "B", "B - A", "95 %", "better", "worse", "sign test p")
    sides = [f"{side}: {of.target.model} at {of.target.url}" for side, of in (("A", baseline), ("B", candidate))]
    return "\n".join([*sides, "", markdown(rows, header)])


def markdown(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _shown(value: object, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"
