"""The JSON of chats and completions: chunks, complete responses, log probabilities and the offsets of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from clients.wire import completion
from contract.generation import FinishReason, Sections, TokenDelta, ToolCallDelta, Usage
from gateway.api.formatters import ChatFormatter, CompletionFormatter
from gateway.api.schemas import ChatRequest, CompletionRequest
from gateway.tools.vocabulary import Vocabulary

TOKENIZER = Path(__file__).resolve().parents[3] / "build" / "demo_model" / "checkpoint" / "tokenizer.json"


def completion_formatter(**more: Any) -> CompletionFormatter:
    return CompletionFormatter(CompletionRequest(model="demo", prompt="x", **more), "r", 7, Vocabulary())


def test_a_completion_has_no_first_chunk_and_none_for_a_delta_without_text() -> None:
    assert (
        completion_formatter().first_chunk(0) is None and completion_formatter().chunk(0, TokenDelta("", (5,))) is None
    )


def test_a_chunk_holds_the_text_of_its_choice() -> None:
    chunk = completion_formatter().chunk(1, TokenDelta("a"))
    assert chunk is not None and (chunk["id"], chunk["object"]) == ("cmpl-r", "text_completion")
    assert chunk["choices"] == [{"text": "a", "index": 1, "logprobs": None, "finish_reason": None}]


def test_text_offsets_go_on_from_chunk_to_chunk_by_choice() -> None:
    made = completion_formatter(logprobs=1)
    delta = TokenDelta("a", (5, 60), (-0.5, -0.25))
    offsets = []
    for choice in (0, 0, 1):
        chunk = made.chunk(choice, delta)
        assert chunk is not None
        offsets.append(chunk["choices"][0]["logprobs"]["text_offset"])
    first = len("token_id:5")
    whole = first + len("token_id:60")
    assert offsets == [[0, first], [whole, whole + first], [0, first]]


@pytest.mark.parametrize("text", ["plain text", "😀 a é b", "日本 x"])
@pytest.mark.parametrize("shown", [False, True])
def test_text_offsets_are_places_in_the_text(text: str, shown: bool) -> None:
    """Also of tokens that are a part of a character, and beside a special token that the text has or leaves out."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    request = CompletionRequest(model="demo", prompt="x", logprobs=0, skip_special_tokens=not shown)
    made = CompletionFormatter(request, "r", 7, Vocabulary(TOKENIZER))
    special = tokenizer.token_to_id("<|endoftext|>")
    ids = [special, *tokenizer.encode(text, add_special_tokens=False).ids]
    whole = "<|endoftext|>" * shown + text
    chunk = made.chunk(0, TokenDelta(whole, tuple(ids), (-0.5,) * len(ids)))
    assert chunk is not None
    found = chunk["choices"][0]["logprobs"]
    assert found["text_offset"][:2] == [0, len("<|endoftext|>") * shown] and found["text_offset"][-1] < len(whole)
    for token, offset in list(zip(found["tokens"], found["text_offset"], strict=True))[1:]:
        assert "\ufffd" in token or whole[offset : offset + len(token)] == token


def test_an_echoed_prompts_first_token_has_no_log_probability() -> None:
    made = completion_formatter(logprobs=1, echo=True)
    deltas = [
        TokenDelta("ab", (5, 6), (0.0, -0.25), top_log_probs=(((-1, 0.0),), ((7, -0.125),))),
        TokenDelta("c", (8,), (-0.5,), FinishReason.LENGTH, top_log_probs=(((8, -0.5),),)),
    ]
    made.chunk(0, TokenDelta("x"))  # as an event's template is made
    first, second = (made.chunk(0, delta)["choices"][0]["logprobs"] for delta in deltas)
    whole = made.response([completion.join(deltas, "r")] * 2)["choices"][1]["logprobs"]
    assert whole["token_logprobs"] == [None, -0.25, -0.5] == first["token_logprobs"] + second["token_logprobs"]
    assert whole["top_logprobs"] == [None, {"token_id:7": -0.125}, {"token_id:8": -0.5}]
    assert whole["top_logprobs"] == first["top_logprobs"] + second["top_logprobs"]
    assert (whole["tokens"], whole["text_offset"]) == (["token_id:5", "token_id:6", "token_id:8"], [0, 10, 20])


def test_a_complete_response_has_a_text_for_each_choice() -> None:
    last = TokenDelta("b", finish_reason=FinishReason.STOP, usage=Usage(1, 2))
    joined = completion.join([TokenDelta("a"), last], "r")
    found = completion_formatter().response([joined, joined])
    assert [(one["index"], one["text"], one["finish_reason"]) for one in found["choices"]] == [
        (0, "ab", "stop"),
        (1, "ab", "stop"),
    ]
    assert found["usage"]["total_tokens"] == 6


def test_of_alternatives_with_the_same_text_the_likeliest_is_shown() -> None:
    vocabulary = Vocabulary(TOKENIZER)
    same = [token for token in range(300) if vocabulary.token(token)[0] == "\ufffd"][:2]
    made = CompletionFormatter(CompletionRequest(model="demo", prompt="x", logprobs=2), "r", 7, vocabulary)
    top = ((same[0], -0.25), (same[1], -5.0))
    chunk = made.chunk(0, TokenDelta("", (same[0],), (-0.25,), top_log_probs=(top,)))
    assert chunk is not None and chunk["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.25}]


def chat_formatter(**more: Any) -> ChatFormatter:
    messages: Any = [{"role": "user", "content": "x"}]
    return ChatFormatter(ChatRequest(model="demo", messages=messages, **more), "r", 7, Vocabulary())


def test_a_choice_begins_with_the_assistants_role() -> None:
    chunk = chat_formatter().first_chunk(2)
    assert chunk is not None and chunk["choices"][0]["index"] == 2
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (chunk["id"], chunk["created"], chunk["object"]) == ("chatcmpl-r", 7, "chat.completion.chunk")


def test_a_chunk_holds_the_text_and_the_reason_of_the_end() -> None:
    chunk = chat_formatter().chunk(0, TokenDelta("a", finish_reason=FinishReason.LENGTH))
    assert chunk is not None and "usage" not in chunk
    assert chunk["choices"][0] == {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": "length"}
    assert chat_formatter().chunk(0, TokenDelta("", (5,))) is None


def test_chunks_have_a_null_usage_only_if_the_client_asked_for_the_usage() -> None:
    chunk = chat_formatter(stream=True, stream_options={"include_usage": True}).chunk(0, TokenDelta("a"))
    assert chunk is not None and chunk["usage"] is None


def test_log_probs_name_each_token_and_its_candidates() -> None:
    delta = TokenDelta("a", (5,), (-0.5,), top_log_probs=(((5, -0.5), (6, -1.0)),))
    chunk = chat_formatter(logprobs=True, top_logprobs=2).chunk(0, delta)
    assert chunk is not None
    [token] = chunk["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"]) == ("token_id:5", -0.5)
    assert [top["logprob"] for top in token["top_logprobs"]] == [-0.5, -1.0]


def test_a_complete_response_has_a_message_for_each_choice() -> None:
    last = TokenDelta("b", finish_reason=FinishReason.STOP, usage=Usage(1, 2))
    deltas = [[TokenDelta("a"), last], [TokenDelta("c")]]
    found = chat_formatter().response([completion.join(each, "r") for each in deltas[:1]])
    assert found["object"] == "chat.completion" and found["usage"]["total_tokens"] == 3
    assert found["choices"][0]["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert found["choices"][0]["finish_reason"] == "stop"


CALLED = [
    TokenDelta("Wait.", sections=Sections("why", (ToolCallDelta(0, "a", "f", '{"x":'),))),
    TokenDelta(sections=Sections("", (ToolCallDelta(0, arguments=" 1}"), ToolCallDelta(1, "b", "g", "{}")))),
    TokenDelta(finish_reason=FinishReason.STOP),
]


def test_a_call_is_named_first_and_its_arguments_follow() -> None:
    each = chat_formatter()
    chunks = [each.chunk(0, delta)["choices"][0] for delta in CALLED]  # type: ignore[index]
    first = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":'}}
    assert chunks[0]["delta"] == {"content": "Wait.", "reasoning_content": "why", "tool_calls": [first]}
    second = {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    assert chunks[1]["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": " 1}"}}, second]}
    assert [chunk["finish_reason"] for chunk in chunks] == [None, None, "tool_calls"]


def test_a_complete_response_has_its_calls_and_its_reasoning() -> None:
    [choice] = chat_formatter().response([completion.join(CALLED, "r")])["choices"]
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
    [silent] = chat_formatter(include_reasoning=False).response([completion.join(CALLED[1:], "r")])["choices"]
    assert "reasoning_content" not in silent["message"] and silent["message"]["content"] is None


def test_calls_that_the_limit_has_cut_are_no_end_by_calls() -> None:
    each = chat_formatter()
    each.chunk(0, CALLED[0])
    chunk = each.chunk(0, TokenDelta(finish_reason=FinishReason.LENGTH))
    assert chunk is not None and chunk["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "cut", [CALLED[:1], [*CALLED[:2], TokenDelta(sections=Sections("", (ToolCallDelta(2, "c", "f"),)))]]
)
def test_a_call_that_a_stop_string_has_cut_is_no_end_by_calls(cut: list[TokenDelta]) -> None:
    each, deltas = chat_formatter(), [*cut, CALLED[-1]]
    chunks = [each.chunk(0, delta)["choices"][0] for delta in deltas]  # type: ignore[index]
    [choice] = chat_formatter().response([completion.join(deltas, "r")])["choices"]
    assert chunks[-1]["finish_reason"] == choice["finish_reason"] == "stop"
