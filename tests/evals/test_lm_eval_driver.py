"""The program and its test run in the environment of lm-eval, against an endpoint that is scripted."""

import pytest

from evals import lm_eval_run, task
from evals.chat_run import Endpoint
from tests.evals.endpoint import endpoint, said

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not lm_eval_run.PYTHON.exists(), reason="lm-eval is not installed: make setup-evals"),
]


def answer(path, body):
    """A model whose tokens are bytes, which likes spaces followed by P, and refuses Madrid."""
    if path == "/tokenizer_info":
        return 200, {"bos_token": "\x01", "eos_token": "\x01"}
    if path == "/tokenize":
        return 200, {"tokens": list(body["prompt"].encode())}
    if path.endswith("/chat/completions"):
        question = body["messages"][-1]["content"]
        return (400, {"error": "no"}) if "Spain" in question else (200, said("London."))
    prompts = [body["prompt"]] if isinstance(body["prompt"][0], int) else body["prompt"]
    choices = []
    for index, prompt in enumerate(prompts):
        logs = [-1.0 if token == ord("P") else -2.0 for token in prompt] + [-2.0]
        top = [{"x": max(log, -1.5)} for log in logs]
        given = {"token_logprobs": [None, *logs[1:]], "top_logprobs": [None, *top[1:]]}
        choices.append({"index": index, "text": "", "logprobs": given, "finish_reason": "length"})
    return 200, {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": choices}


def test_lm_eval_scores_choices_clozes_likelihoods_and_answers():
    with endpoint(answer) as url:
        made = Endpoint(url, "m", "key", tries=1)
        with made.client:
            found = lm_eval_run.run(made, task.read(names=["cloze", "facts", "prose"]), task.FOLDER, 2)
            chats = lm_eval_run.run(made, task.read(names=["answers"]), task.FOLDER, 2)["answers"]
    assert [case.error for cases in found.values() for case in cases] == [""] * 6
    # " Paris" and " Oslo" beside " Madrid" and " Berlin": four tokens of -2 are more likely than five with one of -1.
    assert [case.score for case in found["facts"]][0] == 0.0 and all(case.output for case in found["facts"])
    assert 0 < found["prose"][0].score < 1 and [case.score for case in found["cloze"]] == [0.0, 0.0]
    assert chats[0].score is None and "400" in chats[0].error
    assert (chats[1].score, chats[1].output) == (1.0, "London.")


def test_a_task_that_was_given_up_ends_no_other_task():
    asked = []
    questions = [case["question"] for case in task.read(names=["python"])[0].cases]

    def failing(path, body):
        if path == "/v1/completions" and any(one in bytes(body["prompt"][0]).decode() for one in questions):
            asked.append(path)
            return 503, {"error": "no"}
        return answer(path, body)

    with endpoint(failing) as url:
        made = Endpoint(url, "m", "key", tries=1)
        with made.client:
            found = lm_eval_run.run(made, task.read(names=["python", "facts"]), task.FOLDER, 20)
    assert len(asked) < 20 and all(case.error for case in found["python"])
    assert [case.error for case in found["facts"]] == [""] * 20


def test_every_case_is_asked_once_where_the_endpoint_refuses_each():
    asked = []

    def refusing(path, body):
        asked.append(path)
        return 400, {"error": "no"}

    with endpoint(refusing) as url:
        made = Endpoint(url, "m", "key", tries=3)
        with made.client:
            found = lm_eval_run.run(made, task.read(names=["answers"]), task.FOLDER, 20)["answers"]
    assert len(asked) == 20 and all(case.score is None and "400" in case.error for case in found)
