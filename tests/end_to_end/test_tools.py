"""Tools through OpenAI's client, the gateway and the real server: calls are valid whatever the model would write.

The demo model can do nothing but complete code, so that every call here is one that the grammar holds it to.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from server.replica import Replica
from tests.gateway.running import gateway

USER = [{"role": "user", "content": "What is 2 + 3?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"op": {"enum": ["add", "sub"]}, "a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["op", "a"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "calculate", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture
async def ask(replica: Replica, engine_dir: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    served = {"replicas": replica.grpc_url, "metrics_urls": {replica.grpc_url: replica.metrics_url}}
    async with gateway(**served, tokenizer=engine_dir / "tokenizer.json") as running:
        async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="any", max_retries=0) as client:
            yield client


def is_valid(name: str, arguments: str) -> bool:
    found = json.loads(arguments)
    if name == "now":
        return found == {}
    return found.keys() == {"op", "a"} and found["op"] in ("add", "sub") and 0 <= found["a"] <= 99


async def test_a_call_that_is_required_is_valid_and_its_result_goes_back(ask: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "demo", "messages": USER, "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 100}
    named = {"type": "function", "function": {"name": "calculate"}}
    for choice, temperature in (("required", 0), ("required", 1.5), (named, 0), (named, 1.5)):
        done = await ask.chat.completions.create(**asked, tool_choice=choice, temperature=temperature, seed=1)
        answer = done.choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        [call] = answer.message.tool_calls
        assert is_valid(call.function.name, call.function.arguments)
        assert choice == "required" or call.function.name == "calculate"
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    end = await ask.chat.completions.create(**{**asked, "messages": [*USER, answer.message, result], "max_tokens": 4})
    assert end.usage.prompt_tokens > done.usage.prompt_tokens


async def test_streamed_calls_are_those_of_the_whole_answer(ask: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "demo", "messages": USER, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    whole = await ask.chat.completions.create(**asked, max_tokens=60, extra_headers={"cache-control": "no-store"})
    expected = [(one.function.name, one.function.arguments) for one in whole.choices[0].message.tool_calls]
    stream = await ask.chat.completions.create(**asked, max_tokens=60, n=2, stream=True)
    calls: list[dict[int, list[str]]] = [{}, {}]
    reasons = []
    async for chunk in stream:
        choice = chunk.choices[0]
        assert not choice.delta.content
        for call in choice.delta.tool_calls or ():
            parts = calls[choice.index].setdefault(call.index, [call.function.name, ""])
            parts[1] += call.function.arguments
        reasons += [choice.finish_reason] if choice.finish_reason else []
    for one in calls:
        assert [tuple(one[index]) for index in sorted(one)] == expected
    assert reasons == [whole.choices[0].finish_reason] * 2
    assert all(is_valid(*call) for call in (expected if "length" not in reasons else expected[:-1]))


async def test_a_model_that_may_call_may_also_write_text(ask: openai.AsyncOpenAI) -> None:
    done = await ask.chat.completions.create(model="demo", messages=USER, tools=TOOLS, max_tokens=20, temperature=0)
    assert done.choices[0].message.content and not done.choices[0].message.tool_calls
    with pytest.raises(openai.BadRequestError, match="tool_choice: must be none or auto without tools"):
        await ask.chat.completions.create(model="demo", messages=USER, tool_choice="required")
