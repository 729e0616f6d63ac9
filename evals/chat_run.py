"""Run the tasks that lm-eval has no kind for, chats with schemas, tools and rules, through OpenAI's client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessage

from evals import checks
from evals.results import Case
from evals.task import Task

KEPT_CHARACTERS = 4000
GIVE_UP_AFTER = 8  # failures of a task one after the other: the endpoint is gone
SCORES = {"schema": checks.schema, "tools": checks.tools, "instructions": checks.instructions}


@dataclass
class Endpoint:
    """An OpenAI endpoint, up to /v1. timeout_s, tries: of one request. price: input and output, of 1,000 tokens."""

    url: str
    model: str
    api_key: str
    timeout_s: float = 60.0
    tries: int = 3
    concurrency: int = 4
    price: tuple[float, float] | None = None
    failures: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.client = openai.OpenAI(
            base_url=self.url, api_key=self.api_key, timeout=self.timeout_s, max_retries=self.tries - 1
        )

    def cost(self, usage: Any) -> float | None:
        """Return the price of a request's tokens."""
        if self.price is None or getattr(usage, "completion_tokens", None) is None:
            return None
        return (usage.prompt_tokens * self.price[0] + usage.completion_tokens * self.price[1]) / 1000

    def chat(self, **request: Any) -> Any:
        """Return the completion of a chat. Raises openai.OpenAIError after the last try."""
        if self.failures >= GIVE_UP_AFTER:
            raise openai.OpenAIError("the endpoint was given up after failures one after the other")
        try:
            found = self.client.chat.completions.create(model=self.model, **request)
            message = getattr(next(iter(getattr(found, "choices", None) or ()), None), "message", None)
            if not isinstance(message, ChatCompletionMessage) or not isinstance(message.content, str | None):
                raise ValueError("the answer has no choice with a message")
        except (openai.OpenAIError, ValueError) as exc:  # ValueError: also of a body that is no JSON
            status = exc.status_code if isinstance(exc, openai.APIStatusError) else 500
            if status >= 500 or status == 429:  # else the endpoint is there, and refuses this request
                self.failures += 1
            raise exc if isinstance(exc, openai.OpenAIError) else openai.OpenAIError(str(exc)) from exc
        self.failures = 0
        return found


def run(endpoint: Endpoint, task: Task, limit: int | None) -> Iterator[Case]:
    """Yield the answers to a task's cases, in order."""
    endpoint.failures = 0
    with ThreadPoolExecutor(endpoint.concurrency) as threads:
        yield from threads.map(lambda case: _answered(endpoint, task, case), task.cases[:limit])


def _answered(endpoint: Endpoint, task: Task, case: Mapping[str, Any]) -> Case:
    turns = case.get("messages") or [{"role": "user", "content": case["prompt"]}]
    request = {"messages": turns, "extra_body": task.settings.get("request", {})}
    if task.kind == "schema":
        schema = {"name": "answer", "schema": case["schema"], "strict": True}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    if task.kind == "tools":
        request |= {"tools": case["tools"], "tool_choice": case.get("tool_choice", "auto")}
    began_s = time.monotonic()
    try:
        found = endpoint.chat(**request)
    except openai.OpenAIError as exc:
        return Case(id=case["id"], error=str(exc)[:200] or type(exc).__name__)
    choice = found.choices[0]
    text, calls = choice.message.content or "", choice.message.tool_calls or ()
    called = [(call.function.name, call.function.arguments) for call in calls]
    output = "\n".join([text, *(f"{name}({arguments})" for name, arguments in called)]).strip()
    return Case(
        id=case["id"],
        score=SCORES[task.kind](case, text, called),
        output=output[:KEPT_CHARACTERS],
        refused=checks.refused(text, choice.finish_reason),
        tokens=getattr(found.usage, "completion_tokens", None),
        latency_s=time.monotonic() - began_s,
        cost=endpoint.cost(found.usage),
    )
