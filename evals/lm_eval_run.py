"""Run lm-eval's kinds of tasks, in the environment that has it: the program evals/lm_eval_driver.py."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from evals import checks
from evals.chat_run import KEPT_CHARACTERS, Endpoint
from evals.results import Case
from evals.task import Task

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-evals" / "bin" / "python"  # made by `make setup-evals`
DRIVER = Path(__file__).with_name("lm_eval_driver.py")
RUN_TIMEOUT_S = 3600


def missing(endpoint: Endpoint, chat: bool) -> str:
    """Return why tasks cannot be run by lm-eval; "" if they can. chat: whether they are chats."""
    if not PYTHON.exists():
        return "lm-eval is not installed: make setup-evals"
    if chat:
        return ""
    try:
        endpoint.client.get(f"{endpoint.url.removesuffix('/v1')}/tokenizer_info", cast_to=object)
        options: dict[str, Any] = {"max_tokens": 1, "logprobs": 1, "temperature": 0}
        found = endpoint.client.completions.create(model=endpoint.model, prompt="a b", echo=True, **options)
        scored = found.choices[0].logprobs.token_logprobs[1:]
    except (openai.OpenAIError, AttributeError, IndexError, TypeError) as exc:
        return f"the endpoint has no /tokenizer_info, or no completions with echo and logprobs: {str(exc)[:120]}"
    return "" if scored else "the endpoint's completions do not echo the prompt's log probabilities"


def run(endpoint: Endpoint, tasks: Sequence[Task], folder: Path, limit: int | None) -> dict[str, list[Case]]:
    """Return the cases of every task, which are all chats or all completions."""
    chat = tasks[0].is_chat
    asked: dict[str, Any] = {
        "url": endpoint.url,
        "model": endpoint.model,
        "folder": str(folder.resolve()),
        "chat": chat,
        "limit": limit,
    }
    asked |= {"names": [task.name for task in tasks], "timeout_s": endpoint.timeout_s, "tries": endpoint.tries}
    with tempfile.TemporaryDirectory(prefix="trident-evals-") as cache:
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": cache, "TQDM_DISABLE": "1"}
        environ = {**os.environ, **offline, "OPENAI_API_KEY": endpoint.api_key, "TOKENIZERS_PARALLELISM": "false"}
        try:
            done = subprocess.run(
                [PYTHON, DRIVER],
                input=json.dumps(asked),
                env=environ,
                capture_output=True,
                text=True,
                timeout=RUN_TIMEOUT_S,
            )
            output, problem = done.stdout, (done.stderr.strip().splitlines() or ["lm-eval said nothing"])[-1]
        except subprocess.TimeoutExpired as exc:
            output = (exc.stdout or b"").decode() if isinstance(exc.stdout, bytes) else exc.stdout or ""
            problem = f"lm-eval took more than {RUN_TIMEOUT_S} s"
    answers = {}
    for line in output.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            answers[said.pop("task"), said["id"]] = said
    return {task.name: [_case(task, case["id"], answers, problem) for case in task.cases[:limit]] for task in tasks}


def _case(task: Task, name: str, answers: dict[tuple[str, str], dict], problem: str) -> Case:
    """Return one case; one that lm-eval did not get to has failed with what it said last."""
    said = answers.get((task.name, name))
    if said is None:
        return Case(id=name, error=problem[:200])
    if (output := said.get("output", "")) and task.is_chat:
        said["refused"] = checks.refused(output)
    return Case(**{**said, "output": output[:KEPT_CHARACTERS]})
