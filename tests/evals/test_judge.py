import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from evals import judge, task
from evals.chat_run import Endpoint
from tests.evals.endpoint import endpoint, said
from tests.evals.test_gate import with_fields
from tests.evals.test_results import result

LABELS = judge.labels(judge.FOLDER / "labels.jsonl")
RIGHT = {label.prompt: label for label in LABELS}


def parts(body):
    """Request, first and second answer, as the judge reads them."""
    text = body["messages"][0]["content"]
    return [part.partition("\n")[2].strip() for part in text.split("\n\n# ")[1:]]


def answers(choose):
    """An endpoint whose judge says what ``choose`` of request, first and second answer does."""

    def answer(path, body):
        assert body["response_format"]["json_schema"]["schema"]["required"] == ["better"]
        return 200, said(json.dumps({"better": choose(*parts(body))}))

    return endpoint(answer)


def wise(prompt, first, second):
    label = RIGHT[prompt]
    better = {"a": label.a, "b": label.b}.get(label.label)
    return {first: "first", second: "second"}.get(better, "neither")


def judged(choose, name="instructions", labels=LABELS):
    tasks = task.read(names=[name])
    ids = [case["id"] for case in tasks[0].cases]
    sides = [with_fields(result(**{name: [1.0] * len(ids)}), output=text) for text in ("one", "two")]
    for side in sides:
        object.__setattr__(side.tasks[name], "sha256", tasks[0].sha256)
        for case, own in zip(side.tasks[name].cases, ids, strict=True):
            object.__setattr__(case, "id", own)
    with answers(choose) as url:
        made = Endpoint(url, "wise", "key", tries=1)
        with made.client:
            return judge.judge(made, "Which is better?", *sides, tasks, labels, 0.6), sides


def test_answers_to_no_request_are_not_judged():
    found, _ = judged(lambda *of: "first", "cloze", [])
    assert (found.verdicts, found.failed) == ({}, 0)


def test_the_labels_that_ship_are_balanced():
    assert len(LABELS) >= judge.FEWEST_LABELS + 5
    assert all(8 <= sum(label.label == one for label in LABELS) for one in ("a", "tie", "b"))


@pytest.mark.slow
def test_a_judge_that_agrees_with_people_counts():
    found, sides = judged(lambda *of: wise(*of) if of[0] in RIGHT else ("first" if of[1] == "two" else "second"))
    assert (found.kappa, found.counts, found.failed) == (1.0, True, 0)
    assert set(found.verdicts.values()) == {1} and "instructions/instructions-01" in found.verdicts
    assert (found.baseline_sha256, found.candidate_sha256) == (sides[0].sha256, sides[1].sha256)


@pytest.mark.slow
def test_a_judge_that_prefers_a_place_says_tie_and_does_not_count():
    found, _ = judged(lambda *of: "first")
    assert set(found.verdicts.values()) == {0} and found.kappa == pytest.approx(0.0) and not found.counts


@pytest.mark.slow
def test_a_judge_that_does_not_answer_has_no_verdict():
    with endpoint(lambda path, body: (200, said("I think the first."))) as url:
        made = Endpoint(url, "vague", "key", tries=1)
        with made.client:
            found = judge.judge(made, "?", result(), result(), [], LABELS, 0.0)
    assert found.labels == 0 and found.kappa is None and not found.counts


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), max_size=30))
def test_kappa_is_at_most_one_and_knows_no_first_rater(pairs):
    found = judge.kappa(pairs)
    assert found == judge.kappa([(two, one) for one, two in pairs])
    assert found is None or (found <= 1 and (found == 1) == all(one == two for one, two in pairs))


def test_kappa_is_the_textbooks():
    pairs = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15
    assert judge.kappa(pairs) == pytest.approx(0.4)


def test_a_wrong_label_is_named_by_its_line(tmp_path):
    path = tmp_path / "labels.jsonl"
    path.write_text('{"prompt": "?", "a": "x", "b": "y", "label": "c"}\n')
    with pytest.raises(InvalidArgument, match="labels.jsonl:1: label: must be 'a', 'tie' or 'b', got 'c'"):
        judge.labels(path)
    path.write_text("x\n")
    with pytest.raises(InvalidArgument, match="labels.jsonl:1: must be a JSON object"):
        judge.labels(path)


def test_a_task_that_changed_since_the_run_is_named():
    tasks = [one for one in task.read() if one.name == "instructions"]
    made = Endpoint("http://x", "m", "key")
    with made.client, pytest.raises(InvalidArgument, match="folder: must have the task instructions as it was run"):
        judge.judge(made, "", *[result(instructions=[1.0])] * 2, tasks, [], 0.6)
