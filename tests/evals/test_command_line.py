import json

import pytest

from evals import lm_eval_run, results
from evals.command_line import main
from tests.evals.endpoint import endpoint, said
from tests.evals.test_results import result


def saved(path, made):
    path.write_text(json.dumps(made.model_dump(mode="json")))
    return str(path)


def test_a_run_writes_results_and_a_table_and_says_where_it_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lm_eval_run, "PYTHON", tmp_path / "none")

    def answer(path, body):
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "tiny", "object": "model", "created": 1, "owned_by": "x"}]}
        return (
            (400, {"error": {"message": "no"}})
            if body["messages"][0]["content"].startswith("Invent")
            else (200, said("[1, 2]"))
        )

    with endpoint(answer) as url:
        out = tmp_path / "deep" / "tiny.json"
        status = main(["run", "--url", url.removesuffix("/v1"), "--tasks", "schema,facts", "--out", str(out)])
    assert status == 1
    made = results.read(out)
    assert made.target.model == "tiny" and made.tasks["facts"].skipped
    assert [case.score for case in made.tasks["schema"].cases].count(1.0) == 1
    said_so = capsys.readouterr()
    assert (
        out.with_suffix(".md").read_text() == said_so.out and "facts skipped: lm-eval is not installed" in said_so.err
    )


@pytest.mark.parametrize(
    "arguments,problem",
    [
        (["run"], "url: must be set, or engine"),
        (["run", "--engine", "no-such"], "engine: must be built, got 'no-such'"),
        (["run", "--url", "http://127.0.0.1:1", "--tries", "1"], "lists no model"),
        (["run", "--url", "x", "--tasks", "song"], "tasks: must be among answers"),
        (["compare", "none.json", "none.json"], "none.json: must be a results file"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(arguments, problem, capsys):
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


def test_two_results_are_shown_side_by_side(tmp_path, capsys):
    paths = [saved(tmp_path / f"{n}.json", result(one=[1, n])) for n in (0, 1)]
    assert main(["compare", *paths]) == 0
    assert "| one | 2 | 0.500 | 1.000 | +0.500 |" in capsys.readouterr().out
