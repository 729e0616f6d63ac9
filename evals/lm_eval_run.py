"""Run lm-eval's kinds of tasks, in the environment that has it: the program evals/lm_eval_driver.py."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from contract.errors import Unavailable
from evals import checks
from evals.chat_run import KEPT_CHARACTERS, Endpoint
from evals.results import Case
from evals.task import Task

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-evals" / "bin" / "python"  # made by `make setup-evals`
DRIVER = Path(__file__).with_name("lm_eval_driver.py")
RUN_TIMEOUT_S = 3600


def missing(endpoint: Endpoint, chat: bool) -> str:
    """Return why tasks cannot be run by lm-eval; "" if they can. chat: whether they are chats. Raises Unavailable where
    the endpoint does not answer."""
    if not PYTHON.exists():
        return "lm-eval is not installed: make setup-evals"
    if chat:
        return ""
    lacks = "the endpoint has no /tokenizer_info, or no completions with echo and logprobs"
    try:
        endpoint.client.get(f"{endpoint.url.removesuffix('/v1')}/tokenizer_info", cast_to=object)
        options: dict[str, Any] = {"echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}
        found = endpoint.client.completions.create(model=endpoint.model, prompt="a b", **options)
        return "" if found.choices[0].logprobs.token_logprobs[1:] else lacks
    except (openai.BadRequestError, openai.NotFoundError, AttributeError, IndexError, TypeError) as exc:
        return f"{lacks}: {str(exc)[:120]}"
    except openai.OpenAIError as exc:
        raise Unavailable(f"{endpoint.url}: {exc}") from exc


def run(endpoint: Endpoint, tasks: Sequence[Task], folder: Path, limit: int | None) -> dict[str, list[Case]]:
    """Return the cases of every task, which are all chats or all completions."""
    asked = {"url": endpoint.url, "model": endpoint.model, "tries": endpoint.tries, "limit": limit}
    asked |= {"names": [task.name for task in tasks], "folder": str(folder.resolve()), "chat": tasks[0].is_chat}
    asked["limits"] = {"timeout": math.ceil(endpoint.timeout_s), "num_concurrent": endpoint.concurrency}
    with tempfile.TemporaryDirectory(prefix="trident-evals-") as cache:
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": cache, "OPENAI_API_KEY": endpoint.api_key}
        command, given = [PYTHON, DRIVER], json.dumps(asked).encode()
        try:
            done = subprocess.run(command, input=given, env=environ, capture_output=True, timeout=RUN_TIMEOUT_S)
            words = done.stderr.decode(errors="replace").strip().splitlines() or ["lm-eval said nothing"]
            output, problem = done.stdout, words[-1]
        except subprocess.TimeoutExpired as exc:
            output, problem = exc.stdout or b"", f"lm-eval took more than {RUN_TIMEOUT_S} s"
    whole = output.split(b"\n")[:-1]  # a process that was killed may have written part of a line
    lines = [json.loads(line) for line in whole if line.startswith(b"{")]
    answers = {(said.pop("task"), said["id"]): said for said in lines}
    return {task.name: [_case(task, case["id"], answers, problem) for case in task.cases[:limit]] for task in tasks}


def _case(task: Task, name: str, answers: dict[tuple[str, str], dict], problem: str) -> Case:
    """Return one case; one that lm-eval did not get to has failed with what it said last."""
    said = answers.get((task.name, name))
    if said is None:
        return Case(id=name, error=problem[:200])
    if (output := said.get("output", "")) and task.is_chat:
        said["refused"] = checks.refused(output)
    return Case(**{**said, "output": output[:KEPT_CHARACTERS]})
