"""A model as the judge of two answers: by a rubric, in both orders, and only where it agrees with people's labels."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
from pydantic import ValidationError

from contract import toml_table
from contract.errors import InvalidArgument
from evals import results, task
from evals.chat_run import Endpoint
from evals.results import Results, Strict
from evals.task import Task

FOLDER = Path(__file__).resolve().parent / "judge_labels"
FEWEST_LABELS = 20
_SCORES = {"a": -1, "tie": 0, "b": 1}


class Label(Strict):
    """Two answers to a prompt, and which one people found better."""

    prompt: str
    a: str
    b: str
    label: Literal["a", "tie", "b"]


class Said(Strict):
    """What the judge must answer with: no free text, whose length a grammar can only bound at a cost in each token."""

    better: Literal["first", "second", "neither"]


class Judged(Strict):
    """What a judge said of two runs, for the gate.

    kappa: Cohen's, of the judge with ``labels`` labelled pairs; None where both say the same of all.
    verdicts: by task and id: 1 where it found the candidate better, -1 the baseline, 0 neither or once each.
    failed: pairs that it did not answer.
    """

    baseline_sha256: str
    candidate_sha256: str
    model: str
    labels: int
    kappa: float | None
    least_kappa: float
    verdicts: Mapping[str, int]
    failed: int

    @property
    def counts(self) -> bool:
        """Whether the judge agrees with people enough to be heard."""
        return self.labels >= FEWEST_LABELS and self.kappa is not None and self.kappa >= self.least_kappa


def labels(path: Path) -> list[Label]:
    """Return the labelled pairs of a JSONL file. Raises InvalidArgument that names the line."""
    return [toml_table.checked(Label, table, place) for place, table in task.lines(path, task.text(path))]


def judge(
    endpoint: Endpoint,
    rubric: str,
    baseline: Results,
    candidate: Results,
    tasks: Sequence[Task],
    labelled: Sequence[Label],
    least_kappa: float,
) -> Judged:
    """Ask the judge about the labelled pairs, and about every pair of answers to the tasks."""
    pairs = results.pairs(baseline, candidate)
    asked = {}
    for of in tasks:
        if of.name in pairs and of.sha256 != baseline.tasks[of.name].sha256:
            raise InvalidArgument("folder", f"must have the task {of.name} as it was run, got another one")
        prompts = {case["id"]: str(asks) for case in of.cases if (asks := case.get("prompt") or case.get("question"))}
        for one, two in pairs.get(of.name, ()):
            if not one.error and not two.error and one.id in prompts:
                asked[f"{of.name}/{one.id}"] = (prompts[one.id], one.output, two.output)
    with ThreadPoolExecutor(endpoint.concurrency) as threads:
        known = threads.map(lambda label: _verdict(endpoint, rubric, label.prompt, label.a, label.b), labelled)
        heard = threads.map(lambda pair: _verdict(endpoint, rubric, *pair), asked.values())
        said = dict(zip(asked, heard, strict=True))
        agreed = [(_SCORES[label.label], of) for label, of in zip(labelled, known, strict=True) if of is not None]
    return Judged(
        baseline_sha256=baseline.sha256,
        candidate_sha256=candidate.sha256,
        model=endpoint.model,
        labels=len(agreed),
        kappa=kappa(agreed),
        least_kappa=least_kappa,
        verdicts={name: verdict for name, verdict in said.items() if verdict is not None},
        failed=sum(verdict is None for verdict in said.values()),
    )


def kappa(pairs: Sequence[tuple[Any, Any]]) -> float | None:
    """Return Cohen's kappa of two raters; None where chance alone would make them agree always, or without pairs."""
    count = len(pairs)
    one_of, other_of = Counter(one for one, _ in pairs), Counter(two for _, two in pairs)
    by_chance = sum(times * other_of[value] for value, times in one_of.items())
    if by_chance == count**2:
        return None
    return (sum(one == two for one, two in pairs) * count - by_chance) / (count**2 - by_chance)


def _verdict(endpoint: Endpoint, rubric: str, prompt: str, one: str, two: str) -> int | None:
    """Return -1 for the first answer, 1 for the second, 0 where the two orders disagree; None without an answer."""
    said, swapped = (_asked(endpoint, rubric, prompt, *order) for order in ((one, two), (two, one)))
    if said is None or swapped is None:
        return None
    return said if said == -swapped else 0


def _asked(endpoint: Endpoint, rubric: str, prompt: str, first: str, second: str) -> int | None:
    question = f"{rubric}\n\n# Request\n{prompt}\n\n# First answer\n{first}\n\n# Second answer\n{second}"
    schema = {"name": "verdict", "schema": Said.model_json_schema(), "strict": True}
    request = {"temperature": 0, "max_tokens": 50, "response_format": {"type": "json_schema", "json_schema": schema}}
    try:
        found = endpoint.chat(messages=[{"role": "user", "content": question}], **request)
        said = Said.model_validate_json(found.choices[0].message.content or "")
    except (openai.OpenAIError, ValidationError) as exc:
        print(f"evals: the judge did not answer: {' '.join(str(exc).split())[:200]}", file=sys.stderr)
        return None
    return {"first": -1, "neither": 0, "second": 1}[said.better]
