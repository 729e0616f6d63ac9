"""Responses through OpenAI's client, the gateway and the real server: streamed, called, parsed, continued and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from server.replica import Replica
from tests.gateway.api.responses.contract import check_event, check_response, folded
from tests.gateway.running import gateway

PARAMETERS = {
    "type": "object",
    "properties": {"op": {"enum": ["add", "sub"]}, "a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["op", "a"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "name": "calculate", "parameters": PARAMETERS, "strict": True}]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    op: Literal["add", "sub"]
    sure: bool


async def test_responses_are_streamed_called_parsed_continued_and_kept(
    replica: Replica, engine_dir: Path, tmp_path: Path
) -> None:
    served = {"replicas": replica.grpc_url, "metrics_urls": {replica.grpc_url: replica.metrics_url}}
    served |= {"tokenizer": engine_dir / "tokenizer.json", "response_db": tmp_path / "responses"}
    asked: Any = {"model": "demo", "temperature": 0, "max_output_tokens": 40}
    async with gateway(**served) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="any", max_retries=0) as ask:
            fresh = {"extra_headers": {"cache-control": "no-store"}}
            whole = await ask.responses.create(**asked, input="def add(a, b):", **fresh)
            stream = await ask.responses.create(**asked, input="def add(a, b):", stream=True, **fresh)
            events = [json.loads(event.to_json()) async for event in stream]
            for event in events:
                check_event(event)
            streamed = folded(events)
            assert sum(event["type"] == "response.output_text.delta" for event in events) > 3
            assert streamed["output"][0]["content"] == json.loads(whole.output[0].to_json())["content"]
            assert (streamed["status"], streamed["usage"]) == (whole.status, json.loads(whole.usage.to_json()))
            assert whole.status == "incomplete" and whole.usage.output_tokens == 40

            forced: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
            asked["max_output_tokens"] = 100
            called = await ask.responses.create(**asked, **forced, input="What is 2 + 3?")
            asked["max_output_tokens"] = 40
            check_response(json.loads(called.to_json()))
            [call] = called.output
            arguments = json.loads(call.arguments)
            assert call.name == "calculate" and arguments["op"] in ("add", "sub") and 0 <= arguments["a"] <= 99
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
            answer = await ask.responses.create(**asked, input=[result], previous_response_id=called.id, tools=TOOLS)
            assert answer.usage.input_tokens > called.usage.input_tokens
            with pytest.raises(openai.BadRequestError, match="input: entry 0 must be the function_call_output"):
                await ask.responses.create(**asked, input="x", previous_response_id=called.id)

            async with ask.responses.stream(**asked, input="What is 2 + 3?", text_format=Answer) as parsed:
                async for _ in parsed:
                    pass
                assert (await parsed.get_final_response()).output_parsed is not None
    async with gateway(**served) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="any", max_retries=0) as ask:
            assert (await ask.responses.retrieve(answer.id)).to_json() == answer.to_json()
            kinds = [item.type async for item in ask.responses.input_items.list(answer.id, order="asc")]
            assert kinds == ["message", "function_call", "function_call_output"]
            again = await ask.responses.create(**asked, input="and then?", previous_response_id=answer.id, tools=TOOLS)
            assert again.usage.input_tokens > answer.usage.input_tokens
            await ask.responses.delete(again.id)
            with pytest.raises(openai.NotFoundError):
                await ask.responses.retrieve(again.id)
