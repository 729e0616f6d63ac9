"""The JSON of chat responses: chunks, complete responses and log probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from clients.wire import completion
from contract.generation import FinishReason, Sections, TokenDelta, ToolCallDelta
from gateway.api.chat import ChatFormatter
from gateway.api.schemas import ChatRequest
from gateway.api.vocabulary import Vocabulary


def formatter(**more: Any) -> ChatFormatter:
    messages: Any = [{"role": "user", "content": "x"}]
    return ChatFormatter(ChatRequest(model="demo", messages=messages, **more), "r", 7, Vocabulary())


def test_a_choice_begins_with_the_assistants_role() -> None:
    chunk = formatter().first_chunk(2)
    assert chunk is not None and chunk["choices"][0]["index"] == 2
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (chunk["id"], chunk["created"], chunk["object"]) == ("chatcmpl-r", 7, "chat.completion.chunk")


def test_a_chunk_holds_the_text_and_the_reason_of_the_end() -> None:
    chunk = formatter().chunk(0, TokenDelta("a", finish_reason=FinishReason.LENGTH))
    assert chunk is not None and "usage" not in chunk
    assert chunk["choices"][0] == {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": "length"}
    assert formatter().chunk(0, TokenDelta("", (5,))) is None


def test_chunks_have_a_null_usage_only_if_the_client_asked_for_the_usage() -> None:
    chunk = formatter(stream=True, stream_options={"include_usage": True}).chunk(0, TokenDelta("a"))
    assert chunk is not None and chunk["usage"] is None


def test_log_probs_name_each_token_and_its_candidates() -> None:
    delta = TokenDelta("a", (5,), (-0.5,), top_log_probs=(((5, -0.5), (6, -1.0)),))
    chunk = formatter(logprobs=True, top_logprobs=2).chunk(0, delta)
    assert chunk is not None
    [token] = chunk["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"]) == ("token_id:5", -0.5)
    assert [top["logprob"] for top in token["top_logprobs"]] == [-0.5, -1.0]


def test_a_complete_response_has_a_message_for_each_choice() -> None:
    deltas = [[TokenDelta("a"), TokenDelta("b", finish_reason=FinishReason.STOP)], [TokenDelta("c")]]
    found = formatter().response([completion.join(each, "r") for each in deltas[:1]], {"total_tokens": 3})
    assert found["object"] == "chat.completion" and found["usage"] == {"total_tokens": 3}
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert found["choices"][0]["finish_reason"] == "stop"


CALLED = [
    TokenDelta("Wait.", sections=Sections("why", (ToolCallDelta(0, "a", "f", '{"x":'),))),
    TokenDelta(sections=Sections("", (ToolCallDelta(0, arguments=" 1}"), ToolCallDelta(1, "b", "g", "{}")))),
    TokenDelta(finish_reason=FinishReason.STOP),
]


def test_a_call_is_named_first_and_its_arguments_follow() -> None:
    each = formatter()
    chunks = [each.chunk(0, delta)["choices"][0] for delta in CALLED]  # type: ignore[index]
    first = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":'}}
    assert chunks[0]["delta"] == {"content": "Wait.", "reasoning_content": "why", "tool_calls": [first]}
    second = {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    assert chunks[1]["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}, second]}
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, "tool_calls"]


def test_a_complete_response_has_its_calls_and_its_reasoning() -> None:
    [choice] = formatter().response([completion.join(CALLED, "r")], {})["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Wait.",
        "refusal": None,
        "reasoning_content": "why",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    [silent] = formatter(include_reasoning=False).response([completion.join(CALLED[1:], "r")], {})["choices"]
    assert "reasoning_content" not in silent["message"] and silent["message"]["content"] is None


def test_calls_that_the_limit_has_cut_are_no_end_by_calls() -> None:
    each = formatter()
    each.chunk(0, CALLED[0])
    chunk = each.chunk(0, TokenDelta(finish_reason=FinishReason.LENGTH))
    assert chunk is not None and chunk["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "cut", [CALLED[:1], [*CALLED[:2], TokenDelta(sections=Sections("", (ToolCallDelta(2, "c", "f"),)))]]
)
def test_a_call_that_a_stop_string_has_cut_is_no_end_by_calls(cut: list[TokenDelta]) -> None:
    each, deltas = formatter(), [*cut, CALLED[-1]]
    chunks = [each.chunk(0, delta)["choices"][0] for delta in deltas]  # type: ignore[index]
    [choice] = formatter().response([completion.join(deltas, "r")], {})["choices"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "stop"
