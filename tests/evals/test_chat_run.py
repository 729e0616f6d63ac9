import contextlib

import pytest

from evals import chat_run
from evals.chat_run import GIVE_UP_AFTER, Endpoint
from evals.task import Task
from tests.evals.endpoint import endpoint, said


def of(kind, *cases):
    numbered = [{"id": str(number), "prompt": "?", **case} for number, case in enumerate(cases)]
    return Task("one", kind, "", "chat", "", {"kind": kind, "request": {"max_tokens": 5}}, numbered)


@contextlib.contextmanager
def client(answer, **limits):
    with endpoint(answer) as url:
        made = Endpoint(url, "m", "key", **limits)
        with made.client:
            yield made


def test_every_kind_asks_in_its_form_and_is_scored():
    asked = []

    def answer(path, body):
        asked.append(body)
        if "tools" in body:
            return 200, said("", [("add", '{"a": 1}')])
        return 200, said("[]" if "response_format" in body else "I'm sorry, but I can't.")

    with client(answer, price=(1.0, 2.0)) as made:
        [schema] = chat_run.run(made, of("schema", {"schema": {"type": "array"}}), None)
        tool = {"tools": [{"type": "function"}], "tool_choice": "required"}
        [tools] = chat_run.run(made, of("tools", tool | {"expected": {"name": "add", "arguments": {"a": 1}}}), None)
        rules = {"rules": [{"rule": "contains", "value": "sorry"}]}
        [refused, _] = chat_run.run(made, of("instructions", rules, rules, rules), 2)
    assert (schema.score, tools.score, refused.score, refused.refused) == (1, 1, 1, True)
    assert tools.output == 'add({"a": 1})' and schema.tokens == 5 and schema.cost == (10 + 2 * 5) / 1000
    assert schema.latency_s > 0 and len(asked) == 4
    assert asked[0]["response_format"]["json_schema"] == {"name": "answer", "schema": {"type": "array"}, "strict": True}
    assert asked[0]["max_tokens"] == 5 and asked[1]["tool_choice"] == "required"


def test_a_failure_is_counted_and_not_scored_and_a_try_that_helps_is_used():
    tries = []

    def answer(path, body):
        tries.append(1)
        return (503, {"error": {"message": "busy"}}) if len(tries) < 3 else (200, said("[]"))

    task = of("schema", {"schema": {}})
    with client(answer, tries=2, concurrency=1) as made:
        [failed] = chat_run.run(made, task, None)
        [good] = chat_run.run(made, task, None)
    assert failed.score is None and "503" in failed.error and (good.score, good.error) == (1, "")


@pytest.mark.parametrize(
    "odd",
    [
        b"<html>busy</html>",
        b'{"choices": [',
        {"choices": None},
        {"choices": [None]},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": []}}]},
    ],
)
def test_an_answer_that_is_no_chat_completion_is_one_failure(odd):
    with client(lambda path, body: (200, said("[]") if "last" in body["messages"][0]["content"] else odd)) as made:
        bad, good = chat_run.run(made, of("schema", {"schema": {}}, {"schema": {}, "prompt": "last"}), None)
    assert bad.score is None and bad.error and good.score == 1


def test_usage_without_tokens_is_no_failure():
    with client(lambda path, body: (200, said("[]") | {"usage": {}}), price=(1.0, 2.0)) as made:
        [case] = chat_run.run(made, of("schema", {"schema": {}}), None)
    assert (case.score, case.tokens, case.cost) == (1, None, None)


def test_a_request_may_hold_what_openais_client_does_not_know():
    asked = []
    task = of("schema", {"schema": {}})
    task.settings["request"]["top_k"] = 3
    with client(lambda path, body: asked.append(body) or (200, said("[]"))) as made:
        [case] = chat_run.run(made, task, None)
    assert case.score == 1 and asked[0]["top_k"] == 3 and asked[0]["max_tokens"] == 5


@pytest.mark.parametrize("status", [429, 503])
def test_an_endpoint_that_is_gone_is_given_up(status):
    tries = []

    def answer(path, body):
        tries.append(1)
        return status, {"error": {"message": "no"}}

    with client(answer, tries=1, concurrency=1) as made:
        found = list(chat_run.run(made, of("schema", *[{"schema": {}}] * 30), None))
    assert len(tries) == GIVE_UP_AFTER and all(case.score is None for case in found)
    assert "given up" in found[-1].error


def test_the_next_task_is_asked_after_one_that_was_given_up():
    def answer(path, body):
        return (500, {"error": {"message": "no"}}) if "response_format" in body else (200, said("yes"))

    rules = {"rules": [{"rule": "contains", "value": "yes"}]}
    with client(answer, tries=1, concurrency=1) as made:
        lost = list(chat_run.run(made, of("schema", *[{"schema": {}}] * (GIVE_UP_AFTER + 1)), None))
        [good] = chat_run.run(made, of("instructions", rules), None)
    assert "given up" in lost[-1].error and (good.score, good.error) == (1, "")


def test_every_case_is_asked_once_where_the_endpoint_refuses_each():
    tries = []

    def answer(path, body):
        tries.append(1)
        return 400, {"error": {"message": "no"}}

    with client(answer, tries=3, concurrency=1) as made:
        found = list(chat_run.run(made, of("schema", *[{"schema": {}}] * 30), None))
    assert len(tries) == 30 and all(case.score is None and "400" in case.error for case in found)
