import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from evals import results
from evals.results import Case, Results, Target, TaskResult


def result(**tasks):
    """Results of tasks, each a list of scores; None: failed."""
    made = {
        name: TaskResult(
            kind="choice",
            about="",
            sha256="d",
            cases=[
                Case(id=str(n), score=score, error="" if score is not None else "gone")
                for n, score in enumerate(scores)
            ],
        )
        for name, scores in tasks.items()
    }
    return Results(created="2026-11-23T06:00:00+00:00", target=Target(url="http://x/v1", model="m"), tasks=made)


def test_what_is_written_is_read_and_the_time_is_no_part_of_the_digest(tmp_path):
    made = result(one=[1.0, 0.5, None])
    path = tmp_path / "a.json"
    path.write_text(json.dumps(made.model_dump(mode="json", exclude_defaults=True) | {"format": 1}))
    assert results.read(path) == made
    later = made.model_copy(update={"created": "later"})
    assert later.sha256 == made.sha256 != result(one=[1.0, 0.5, 0.0]).sha256


@pytest.mark.parametrize(
    "text,problem",
    [("[", "must be a results file"), ("{}", "must be set"), ('{"format": 2}', r"format: must be 1, got 2")],
)
def test_a_wrong_file_is_refused(tmp_path, text, problem):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InvalidArgument, match=problem):
        results.read(tmp_path / "a.json")


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=40))
def test_failures_do_not_change_a_score(scores):
    one, two = (results.summary(result(t=cases).tasks["t"]) for cases in (scores, [*scores, None, None]))
    assert two["failed"] == 2 and {**two, "failed": 0} == one
    assert one["low"] <= one["score"] <= one["high"]


def test_tables_name_what_was_skipped_and_what_failed():
    made = result(one=[1.0, 0.0, None], two=[])
    skipped = made.tasks["two"].model_copy(update={"skipped": "no lm-eval"})
    table = results.table(made.model_copy(update={"tasks": {**made.tasks, "two": skipped}}))
    assert "| one | choice | 0.500 | 0.095 | 0.905 | 2 | 1 |" in table and "skipped: no lm-eval" in table
    table = results.compared(result(one=[1, 1, 0, 0, None]), result(one=[0, 0, 0, 1, 1]))
    assert "| one | 4 | 0.500 | 0.250 | -0.250 |" in table and "| 1 | 2 | 1.000 |" in table
    served = result(one=[1]).model_copy(update={"target": Target(url="", model="m", engine="e")})
    assert results.compared(served, result(one=[1])).startswith("A: m, engine e\nB: m at http://x/v1\n")
    assert "no case with two answers" in results.compared(result(one=[None]), result(one=[1]))


def test_only_the_same_tasks_are_paired():
    with pytest.raises(InvalidArgument, match=r"tasks\.two: must be the same on both sides, got not run and files d"):
        results.pairs(result(one=[1]), result(one=[1], two=[1]))
    [(one, two), (_, lost)] = results.pairs(result(one=[1, 0]), result(one=[0]))["one"]
    assert (one.score, two.score, lost.score) == (1, 0, None) and "no such case" in lost.error
    assert results.scores([one, lost]).tolist() == [1.0]
    assert results.interval(np.array([0.3, 0.3])) == pytest.approx((0.3, 0.3))
