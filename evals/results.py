"""Results of a run: the file that holds every case, and tables of one or two runs."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from contract import paired_scores, toml_table
from contract.errors import InvalidArgument

_Model = TypeVar("_Model", bound=BaseModel)


class Strict(BaseModel):
    """A model that is not changed and has no other fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Case(Strict):
    """One answer.

    score: 0 to 1; None where the endpoint did not answer, for the reason in ``error``.
    refused, tokens (of the output), latency_s, cost: None where the run could not tell.
    """

    id: str
    score: float | None = None
    error: str = ""
    output: str = ""
    refused: bool | None = None
    tokens: int | None = None
    latency_s: float | None = None
    cost: float | None = None


class TaskResult(Strict):
    """skipped: why the task was not run; "" if it was. sha256: of the task's files."""

    kind: str
    about: str
    sha256: str
    skipped: str = ""
    cases: Sequence[Case] = ()


class Target(Strict):
    """What was asked. engine: its name, manifest_sha256: of its manifest.json; "" where that is not known."""

    url: str
    model: str
    engine: str = ""
    manifest_sha256: str = ""


class Results(Strict):
    format: Literal[1] = 1
    created: str
    target: Target
    tasks: Mapping[str, TaskResult]

    @property
    def sha256(self) -> str:
        """Digest of everything but the time, for what is made from these results."""
        text = json.dumps(self.model_dump(mode="json", exclude={"created"}), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def read(path: Path) -> Results:
    return written_by("run", Results, path)


def written_by(command: str, model: type[_Model], path: Path) -> _Model:
    """Return what a command of `python -m evals` wrote. Raises InvalidArgument that names file and field."""
    try:
        table = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise InvalidArgument(str(path), f"must be a results file of `python -m evals {command}`: {exc}") from exc
    return toml_table.checked(model, table, str(path))


def pairs(baseline: Results, candidate: Results) -> dict[str, list[tuple[Case, Case]]]:
    """Return the cases of both, by task. A case that the candidate lacks failed there. Raises InvalidArgument where the
    two did not run the same tasks."""
    found = {}
    for name in sorted({*baseline.tasks, *candidate.tasks}):
        one, two = baseline.tasks.get(name), candidate.tasks.get(name)
        if one is None or two is None or one.sha256 != two.sha256 or bool(one.skipped) != bool(two.skipped):
            said = ["not run" if side is None else side.skipped or f"files {side.sha256[:12]}" for side in (one, two)]
            raise InvalidArgument(f"tasks.{name}", f"must be the same on both sides, got {said[0]} and {said[1]}")
        theirs = {case.id: case for case in two.cases}
        lost = "the candidate has no such case"
        found[name] = [(case, theirs.get(case.id) or Case(id=case.id, error=lost)) for case in one.cases]
    return found


def scores(cases: Iterable[Case]) -> np.ndarray:
    """Return the scores of the cases that have one: f64[n]."""
    return np.array([case.score for case in cases if case.score is not None], np.float64)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the mean: Wilson's for scores of 0 and 1, else the bootstrap's; 0 to 1 without."""
    if np.isin(values, (0.0, 1.0)).all():
        return paired_scores.wilson(int(values.sum()), len(values))
    return paired_scores.mean_interval(values)


def summary(task: TaskResult) -> dict[str, float | None]:
    """Return the figures of a task. failed: cases without an answer, which no score counts."""
    values = scores(task.cases)
    low, high = interval(values)
    found = {"score": float(values.mean()) if len(values) else None, "low": low, "high": high}
    found |= {"cases": len(values), "failed": len(task.cases) - len(values)}
    for name in ("refused", "tokens", "latency_s", "cost"):
        known = [float(value) for case in task.cases if (value := getattr(case, name)) is not None]
        average = statistics.median if name == "latency_s" else statistics.fmean
        found[name] = average(known) if known else None
    return found


def table(results: Results) -> str:
    """Return the results as a Markdown table."""
    header = ("task", "kind", "score", "95 % from", "to", "cases", "failed", "refused", "tokens", "latency s", "cost")
    rows = []
    for name, task in results.tasks.items():
        figures = [f"skipped: {task.skipped}"] if task.skipped else map(shown, summary(task).values())
        rows.append((name, task.kind, *figures))
    return f"{_title(results.target)}\n\n{markdown(rows, header)}"


def _title(of: Target) -> str:
    return f"{of.model}{' at ' * bool(of.url)}{of.url}{', engine ' * bool(of.engine)}{of.engine}"


def compared(baseline: Results, candidate: Results) -> str:
    """Return both runs side by side as a Markdown table. Raises: as ``pairs``."""
    rows = []
    for name, cases in pairs(baseline, candidate).items():
        both = [(one.score, two.score) for one, two in cases if one.score is not None and two.score is not None]
        if not both:
            rows.append([name, "no case with two answers"])
            continue
        one, two = np.array(both, np.float64).T
        better, worse = int((two > one).sum()), int((two < one).sum())
        chance = min(1.0, 2 * paired_scores.sign_test(min(better, worse), max(better, worse)))
        numbers = (len(both), one.mean(), two.mean(), (two - one).mean(), *paired_scores.mean_interval(two - one))
        rows.append([name, *map(shown, (*numbers, better, worse, chance))])
    header = ("task", "cases", "A", "B", "B - A", "95 % from", "to", "better", "worse", "sign test p")
    sides = [f"{side}: {_title(of.target)}" for side, of in (("A", baseline), ("B", candidate))]
    return "\n".join([*sides, "", markdown(rows, header)])


def markdown(rows: Iterable[Sequence[object]], header: Sequence[str]) -> str:
    """Return a Markdown table; short rows end in empty cells."""
    lines = [header, ["---"] * len(header), *([*row, *[""] * (len(header) - len(row))] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def shown(value: object) -> str:
    """Return a cell of a table."""
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
