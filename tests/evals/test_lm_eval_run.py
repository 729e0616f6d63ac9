import json
import sys

import pytest

from contract.errors import Unavailable
from evals import lm_eval_run, task
from evals.chat_run import Endpoint
from tests.evals.endpoint import endpoint


@pytest.fixture
def python(tmp_path, monkeypatch):
    """A stand-in for the environment's interpreter, as a shell script that may be written."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(lm_eval_run, "PYTHON", program)
    return program


def test_without_lm_eval_tasks_are_skipped_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(lm_eval_run, "PYTHON", tmp_path / "none")
    made = Endpoint("http://127.0.0.1:1/v1", "m", "key")
    with made.client:
        assert lm_eval_run.missing(made, False) == "lm-eval is not installed: make setup-evals"


def test_an_endpoint_without_log_probabilities_is_named(python):
    asked = []

    def answer(path, body):
        asked.append(path)
        choice = {"index": 0, "text": "a b", "finish_reason": "length", "logprobs": None}
        return 200, {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}

    with endpoint(answer) as url:
        made = Endpoint(url, "m", "key", tries=1)
        with made.client:
            assert "no completions with echo and logprobs" in lm_eval_run.missing(made, False)
            assert lm_eval_run.missing(made, True) == ""
    assert asked == ["/tokenizer_info", "/v1/completions"]


def test_an_endpoint_that_does_not_answer_ends_the_run(python):
    made = Endpoint("http://127.0.0.1:9/v1", "m", "key", tries=1)
    with made.client, pytest.raises(Unavailable, match="http://127.0.0.1:9/v1: Connection error"):
        lm_eval_run.missing(made, False)


def test_what_lm_eval_does_not_answer_has_failed_with_its_last_words(python):
    python.write_text(
        '#!/bin/sh\necho noise\necho \'{"task": "answers", "id": "answers-01", "score": 1.0, "output": "I cannot"}\'\n'
        "echo one >&2\necho it broke >&2\nexit 1\n"
    )
    made = Endpoint("http://127.0.0.1:1/v1", "m", "key")
    with made.client:
        found = lm_eval_run.run(made, task.read(names=["answers"]), task.FOLDER, 2)
    [good, lost] = found["answers"]
    assert (good.score, good.refused, good.output) == (1.0, True, "I cannot")
    assert (lost.score, lost.error) == (None, "it broke")


def test_what_was_scored_before_the_time_was_up_counts(python, monkeypatch):
    python.write_text(
        '#!/bin/sh\necho \'{"task": "answers", "id": "answers-01", "score": 1.0, "output": "x"}\'\n'
        'printf \'{"task": "answers", "id": "answers-02", "sco\'\nexec sleep 30\n'
    )
    monkeypatch.setattr(lm_eval_run, "RUN_TIMEOUT_S", 1)
    made = Endpoint("http://127.0.0.1:1/v1", "m", "key")
    with made.client:
        [good, lost] = lm_eval_run.run(made, task.read(names=["answers"]), task.FOLDER, 2)["answers"]
    assert good.score == 1.0 and lost.error == "lm-eval took more than 1 s"


def test_lm_eval_is_told_how_many_requests_may_run_at_once(python, tmp_path):
    python.write_text(f"#!/bin/sh\ncat > {tmp_path}/asked\n")
    made = Endpoint("http://127.0.0.1:1/v1", "m", "key", concurrency=9)
    with made.client:
        lm_eval_run.run(made, task.read(names=["answers"]), task.FOLDER, 1)
    assert json.loads((tmp_path / "asked").read_text())["limits"] == {"timeout": 60, "num_concurrent": 9}
