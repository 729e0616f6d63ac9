"""Run tasks by lm-eval against an OpenAI endpoint. A program of the environment that has lm-eval (.venv-evals).

Standard input: a JSON object, the arguments of ``run``. Standard output: a JSON line for each case, with ``task``,
``id``, ``score``, ``output`` and, where the endpoint did not answer, ``error`` in place of a score.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import aiohttp
from lm_eval import evaluator, tasks
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

FAILED = "\x00failed: "
GIVE_UP_AFTER = 8  # failures of a task one after the other: the endpoint is gone, and each would take all its tries
RETRY_S = 0.5


class Bounded(LocalCompletionsAPI):
    """lm-eval's client, with bounded tries; what still fails becomes a marked answer in place of the end of the run."""

    tries = 3
    failures = 0

    async def amodel_call(self, session: Any, sem: Any, messages: Any, **options: Any) -> Any:
        problem = "the endpoint was given up after failures one after the other"
        async with sem:  # all calls start at once, before any has failed: each looks when it is its turn
            for attempt in range(self.tries if self.failures < GIVE_UP_AFTER else 0):
                try:
                    found = await super().amodel_call(session, asyncio.Semaphore(), messages, **options)
                except (aiohttp.ClientError, asyncio.TimeoutError, KeyError, TypeError, ValueError) as exc:
                    problem = (str(exc) or type(exc).__name__)[:200]
                    if isinstance(exc, aiohttp.ClientResponseError) and exc.status < 500 and exc.status != 429:
                        break  # the endpoint is there, and would refuse the same request again
                    await asyncio.sleep(RETRY_S * 2**attempt)
                else:
                    self.failures = 0
                    return found
            else:
                self.failures += 1
        return [f"{FAILED}{problem}" if options.get("generate") else (math.nan, False)] * len(messages)


class BoundedChat(Bounded, LocalChatCompletion):
    """The same for chats."""


def run(
    url: str, model: str, folder: str, names: list[str], chat: bool, limit: int | None, tries: int, limits: Mapping
) -> Iterator[dict[str, Any]]:
    """Yield the cases of the tasks ``names`` in ``folder``.

    url: ends with /v1. chat: whether they are chats. limits: options of lm-eval's client.
    """
    os.chdir(folder)  # where the tasks' files are
    options: dict[str, Any] = {"model": model, "max_retries": 1, **limits}
    if chat:
        client: Any = BoundedChat(base_url=f"{url}/chat/completions", tokenizer_backend=None, **options)
    else:
        options |= {"tokenizer_backend": "remote", "auth_token": os.environ["OPENAI_API_KEY"]}
        client = Bounded(base_url=f"{url}/completions", **options)
        client.tokenizer.encode = _encoder(client.tokenizer, model)
    client.tries = tries
    manager = tasks.TaskManager(include_path=folder, include_defaults=False)
    for name in names:
        client.failures = 0
        asked = {"model": client, "tasks": [name], "task_manager": manager, "limit": limit, "apply_chat_template": chat}
        found = evaluator.simple_evaluate(**asked, bootstrap_iters=0)
        for sample in found["samples"][name]:
            yield {"task": name, "id": str(sample["doc"]["id"]), **_scored(sample)}


def _encoder(tokenizer: Any, model: str) -> Any:
    """Return lm-eval's remote ``encode`` with the model named, for endpoints with several, and without repetitions."""

    @lru_cache(maxsize=4096)
    def encode(text: str) -> tuple[int, ...]:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        said = tokenizer._request_with_retries("POST", f"{tokenizer.base_url}/tokenize", json=body)
        return tuple(said.json()["tokens"])

    return lambda text: list(encode(text))


def _scored(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return score and output of one of lm-eval's samples."""
    answers = [one for answer in sample["resps"] for one in answer]
    if isinstance(answers[0], str):
        failed = answers[0].startswith(FAILED)
        return {"error": answers[0].removeprefix(FAILED)} if failed else _score(sample, answers[0])
    numbers = [float(one[0] if isinstance(one, list | tuple) else one) for one in answers]
    if any(map(math.isnan, numbers)):
        return {"error": "the endpoint did not give the log probabilities"}
    if "bits_per_byte" in sample:  # as a score from 0 to 1: the geometric mean of a byte's probability
        return {"score": math.exp(numbers[0] / len(sample["doc"]["text"].encode()))}
    return _score(sample, f"choice {numbers.index(max(numbers))}")


def _score(sample: Mapping[str, Any], output: str) -> dict[str, Any]:
    return {"score": float(sample["acc"] if "acc" in sample else sample["exact_match"]), "output": output}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for case in run(**json.load(sys.stdin)):
        print(json.dumps(case), flush=True)
