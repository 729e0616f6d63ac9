import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import InvalidArgument
from evals import gate
from evals.gate import Metric, Rules
from tests.evals.test_results import result


def with_fields(made, **fields):
    """The same results, each case with these fields."""
    table = json.loads(made.model_dump_json())
    for task in table["tasks"].values():
        for case in task["cases"]:
            case.update(fields)
    return type(made).model_validate(table)


def scores(seed, cases, right):
    return (np.random.default_rng(seed).random(cases) < right).astype(float).tolist()


def test_a_candidate_against_itself_passes_and_a_broken_one_fails():
    one = result(a=scores(1, 100, 0.7), b=scores(2, 50, 0.5))
    found = gate.gate(one, one, Rules())
    assert (found.verdict, found.reasons, found.needed) == ("pass", (), None)
    broken = gate.gate(one, result(a=[0.0] * 100, b=[0.0] * 50), Rules())
    assert broken.verdict == "fail" and broken.reasons[0].startswith("quality: -0.6")
    assert broken.metrics["task a"]["verdict"] == "fail"


def test_few_cases_are_undecided_and_as_many_more_as_it_says_decide():
    few = gate.gate(result(a=[1.0] * 20), result(a=[1.0] * 20), Rules(failures=0.5))
    assert few.verdict == "undecided" and f"about {few.needed} more cases decide" in few.reasons[0]
    more = result(a=[1.0] * (20 + few.needed))
    assert gate.gate(more, more, Rules(failures=0.5)).verdict == "pass"


def test_one_task_that_breaks_fails_the_candidate_whatever_the_others_do():
    one = result(a=scores(1, 500, 0.5), b=[1.0] * 30)
    found = gate.gate(one, result(a=scores(1, 500, 0.5), b=[0.0] * 20 + [1.0] * 10), Rules(quality=0.2))
    assert found.verdict == "fail" and found.metrics["quality"]["verdict"] == "pass"
    assert [reason.split(":")[0] for reason in found.reasons] == ["task b"]


def test_a_task_of_the_rules_must_be_shown_to_be_kept_and_be_there():
    one = result(a=[1.0] * 200, b=[1.0] * 10)
    assert gate.gate(one, one, Rules()).verdict == "pass"
    assert gate.gate(one, one, Rules(tasks={"b": 0.05})).verdict == "undecided"
    with pytest.raises(InvalidArgument, match=r"tasks\.c: must be among a, b, with cases"):
        gate.gate(one, one, Rules(tasks={"c": 0.05}))


def test_failures_are_no_wrong_answers_but_have_a_budget():
    one = result(a=[1.0] * 200)
    assert gate.gate(one, result(a=[1.0] * 199 + [None]), Rules()).verdict == "pass"
    found = gate.gate(one, result(a=[1.0] * 120 + [None] * 80), Rules())
    assert found.verdict == "fail" and [reason.split(":")[0] for reason in found.reasons] == ["failures"]
    assert found.metrics["quality"]["cases"] == 120
    lost = gate.gate(one, result(a=[1.0] * 120), Rules())
    assert lost.verdict == "fail", "cases that the candidate leaves out are failures"


@pytest.mark.parametrize(
    "field,name,same,more",
    [("tokens", "length", 20, 60), ("latency_s", "latency", 0.5, 2.5), ("cost", "cost", 0.1, 0.3)],
)
def test_length_latency_and_cost_have_budgets(field, name, same, more):
    one = result(a=[1.0] * 100)
    assert name not in gate.gate(one, one, Rules()).metrics, "what no run could tell is not judged"
    fast, slow = with_fields(one, **{field: same}), with_fields(one, **{field: more})
    assert gate.gate(fast, fast, Rules()).verdict == gate.gate(slow, fast, Rules()).verdict == "pass"
    found = gate.gate(fast, slow, Rules())
    assert found.verdict == "fail" and f"{name}: {more / same:.3g} times as much" in found.reasons[0]
    assert gate.gate(fast, slow, Rules(**{name: 100.0})).verdict == "pass"


def test_refusals_have_a_budget_and_a_judge_is_heard():
    one = with_fields(result(a=[1.0] * 100), refused=False)
    assert gate.gate(one, with_fields(one, refused=True), Rules()).reasons[0].startswith("refusals: -1.0")
    assert gate.gate(one, one, Rules(), judged=[0] * 60).verdict == "pass"
    assert gate.gate(one, one, Rules(), judged=[-1] * 40 + [0] * 20).reasons[0].startswith("judge: -0.66")


@settings(max_examples=10)
@given(st.permutations(range(60)), st.integers(0, 5))
def test_the_order_of_the_cases_changes_nothing(order, seed):
    one, two = scores(seed, 60, 0.7), scores(seed + 9, 60, 0.6)
    found = [
        gate.decide([Metric("quality", np.array(two)[of] - np.array(one)[of], 0.05)], 0.05, 0.8).metrics["quality"]
        for of in (list(range(60)), list(order))
    ]
    assert found[0] == pytest.approx(found[1])


def rates(baseline, candidate, cases, rules=None, seeds=400, tasks=4):
    """The share of seeds with each verdict, of models that are right so often on all tasks, with independent answers
    to a third of the cases."""
    rules, counts = rules or Rules(), dict.fromkeys(("pass", "fail", "undecided"), 0)
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        easy = rng.random((tasks, cases)) < 2 / 3  # answered alike by both, but for the loss
        draw = rng.random((2, tasks, cases))
        one = draw[0] < baseline
        two = np.where(easy, (draw[0] < candidate), draw[1] < candidate)
        pairs = [Metric("quality", (two - one.astype(float)).ravel(), rules.quality)]
        pairs += [Metric(f"task {n}", two[n] - one[n].astype(float), rules.task, False) for n in range(tasks)]
        counts[gate.decide(pairs, rules.alpha, rules.power).verdict] += 1
    return {name: count / seeds for name, count in counts.items()}


@pytest.mark.slow
def test_an_equal_model_passes_and_a_worse_one_fails_at_the_rates_of_the_docs():
    equal = rates(0.7, 0.7, 200)
    assert equal["fail"] <= 0.02 and equal["pass"] >= 0.7
    at_the_margin = rates(0.7, 0.65, 200)
    assert at_the_margin["pass"] <= 0.08 and at_the_margin["fail"] <= 0.08
    worse = rates(0.7, 0.55, 200)
    assert worse["pass"] == 0 and worse["fail"] >= 0.9
    assert math.isclose(sum(worse.values()), 1.0)
