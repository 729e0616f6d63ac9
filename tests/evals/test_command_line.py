import json

import pytest

from contract import gate_result
from evals import lm_eval_run, results
from evals.command_line import main
from evals.judge import Judged
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
    failed = sum(bool(case.error) for case in made.tasks["schema"].cases)
    assert f"evals: schema: {failed} cases without an answer, the first: Error code: 400" in said_so.err


@pytest.mark.parametrize("name,table", [("out.md", "out.md.md"), ("v1.2", "v1.2.md"), ("v1.2.json", "v1.2.md")])
def test_the_table_of_a_run_never_takes_the_place_of_its_results(name, table, tmp_path):
    def answer(path, body):
        return 200, said("[1, 2]")

    with endpoint(answer) as url:
        main(["run", "--url", url, "--model", "m", "--tasks", "schema", "--limit", "1", "--out", str(tmp_path / name)])
    assert results.read(tmp_path / name).tasks["schema"].cases
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, table])


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


@pytest.mark.parametrize(
    "arguments,problem",
    [
        (["gate", "GOOD", "GOOD", "--judged", "BINARY"], "must be a results file of `python -m evals judge`"),
        (["curate", "BINARY", "--name", "x", "--out", "x"], "must be a readable file in UTF-8"),
        (["judge", "GOOD", "GOOD", "--out", "x", "--labels", "BINARY"], "must be a readable file in UTF-8"),
        (["judge", "GOOD", "GOOD", "--out", "x", "--rubric", "BINARY"], "must be a readable file in UTF-8"),
        (["judge", "GOOD", "GOOD", "--out", "x", "--rubric", "NONE"], "must be a readable file in UTF-8"),
        (["run", "--url", "http://[x"], "url: must be of the form http://HOST:PORT, got 'http://[x'"),
        (["run", "--url", "http://x:y"], "url: must be of the form http://HOST:PORT, got 'http://x:y'"),
    ],
)
def test_a_file_and_a_url_of_another_kind_are_named(arguments, problem, tmp_path, capsys):
    (tmp_path / "binary").write_bytes(b"\xff\xfe{}")
    named = {"GOOD": saved(tmp_path / "good.json", result(a=[1])), "BINARY": str(tmp_path / "binary"), "NONE": "none"}
    assert main([named.get(argument, argument) for argument in arguments]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf", "x"])
def test_the_limit_of_a_request_is_a_time(seconds, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--url", "http://127.0.0.1:1", "--timeout", seconds])
    assert f"must be more than 0, at most 86400, got {seconds}" in capsys.readouterr().err


@pytest.mark.parametrize("price", ["1", "1,x", "1,-2", "nan,1", "1,2,3"])
def test_a_price_is_two_numbers(price, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--url", "http://127.0.0.1:1", "--price", price])
    assert f"argument --price: must be two numbers from 0 with a comma between, got {price}" in capsys.readouterr().err


def test_an_endpoint_whose_models_are_a_page_of_html_is_named(capsys):
    with endpoint(lambda path, body: (200, b"<html>")) as url:
        assert main(["run", "--url", url, "--tasks", "schema"]) == 2
    assert "/models lists no model" in capsys.readouterr().err


def test_two_results_are_shown_side_by_side(tmp_path, capsys):
    paths = [saved(tmp_path / f"{n}.json", result(one=[1, n])) for n in (0, 1)]
    assert main(["compare", *paths]) == 0
    assert "| one | 2 | 0.500 | 1.000 | 0.500 |" in capsys.readouterr().out


def test_the_gate_has_a_status_for_each_verdict_and_writes_a_file_for_releases(tmp_path, capsys):
    good, bad, few = (
        saved(tmp_path / f"{name}.json", made)
        for name, made in (("good", result(a=[1] * 100)), ("bad", result(a=[0] * 100)), ("few", result(a=[1] * 9)))
    )
    out = tmp_path / "gate.json"
    assert main(["gate", good, good, "--out", str(out)]) == 0
    written = gate_result.read(out)
    assert (
        written["verdict"] == "pass" and written["candidate"]["sha256"] == results.read(tmp_path / "good.json").sha256
    )
    assert main(["gate", good, bad]) == 1 and main(["gate", few, few]) == 3
    assert "fail\nquality: -1.0000" in capsys.readouterr().out
    rules = tmp_path / "rules.toml"
    rules.write_text("quality = 2\n")
    assert main(["gate", good, good, "--rules", str(rules)]) == 2
    assert "rules.toml: quality: must be less than 1, got 2" in capsys.readouterr().err
    rules.write_text("speed = 2\n")
    assert main(["gate", good, good, "--rules", str(rules)]) == 2
    assert "rules.toml: speed: is not known: must be one of alpha, power, quality" in capsys.readouterr().err


def test_a_judges_verdicts_reach_the_gate_only_if_it_agrees_with_people(tmp_path, capsys):
    good = saved(tmp_path / "good.json", result(a=[1] * 100))
    digest = results.read(tmp_path / "good.json").sha256
    heard = Judged(
        baseline_sha256=digest, candidate_sha256=digest, model="j", labels=30, kappa=0.9, least_kappa=0.6,
        verdicts={str(n): -1 for n in range(40)}, failed=0,
    )  # fmt: skip
    path = tmp_path / "judged.json"
    path.write_text(heard.model_dump_json())
    assert main(["gate", good, good, "--judged", str(path)]) == 1
    path.write_text(heard.model_copy(update={"kappa": 0.5}).model_dump_json())
    assert main(["gate", good, good, "--judged", str(path)]) == 0
    assert "the judge j is left out: kappa 0.5" in capsys.readouterr().err
    path.write_text(heard.model_copy(update={"baseline_sha256": "x"}).model_dump_json())
    assert main(["gate", good, good, "--judged", str(path)]) == 2


def test_a_judge_is_asked_and_its_agreement_said(tmp_path, capsys):
    good = saved(tmp_path / "good.json", result(a=[1] * 100))
    out = tmp_path / "judged.json"
    verdict = said('{"better": "first"}')
    with endpoint(lambda path, body: (200, verdict)) as url:
        assert main(["judge", good, good, "--url", url, "--model", "j", "--out", str(out)]) == 0
    assert "j agrees with 28 labels at kappa 0.00, and does not count" in capsys.readouterr().out
    assert Judged.model_validate_json(out.read_text()).labels == 28
