"""The JSON of text completions: chunks, complete responses and the offsets of their tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from clients.wire import completion
from contract.generation import FinishReason, TokenDelta
from gateway.api.completions import CompletionFormatter
from gateway.api.schemas import CompletionRequest
from gateway.api.vocabulary import Vocabulary

TOKENIZER = Path(__file__).resolve().parents[3] / "build" / "demo_model" / "checkpoint" / "tokenizer.json"


def formatter(**more: Any) -> CompletionFormatter:
    return CompletionFormatter(CompletionRequest(model="demo", prompt="x", **more), "r", 7, Vocabulary())


def test_a_completion_has_no_first_chunk_and_none_for_a_delta_without_text() -> None:
    assert formatter().first_chunk(0) is None and formatter().chunk(0, TokenDelta("", (5,))) is None


def test_a_chunk_holds_the_text_of_its_choice() -> None:
    chunk = formatter().chunk(1, TokenDelta("a"))
    assert chunk is not None and (chunk["id"], chunk["object"]) == ("cmpl-r", "text_completion")
    assert chunk["choices"] == [{"text": "a", "index": 1, "logprobs": None, "finish_reason": None}]


def test_text_offsets_go_on_from_chunk_to_chunk_by_choice() -> None:
    made = formatter(logprobs=1)
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
    made = formatter(logprobs=1, echo=True)
    deltas = [
        TokenDelta("ab", (5, 6), (0.0, -0.25), top_log_probs=(((-1, 0.0),), ((7, -0.125),))),
        TokenDelta("c", (8,), (-0.5,), FinishReason.LENGTH, top_log_probs=(((8, -0.5),),)),
    ]
    made.chunk(0, TokenDelta("x"))  # as an event's template is made
    first, second = (made.chunk(0, delta)["choices"][0]["logprobs"] for delta in deltas)
    whole = made.response([completion.join(deltas, "r")] * 2, {})["choices"][1]["logprobs"]
    assert whole["token_logprobs"] == [None, -0.25, -0.5] == first["token_logprobs"] + second["token_logprobs"]
    assert whole["top_logprobs"] == [None, {"token_id:7": -0.125}, {"token_id:8": -0.5}]
    assert whole["top_logprobs"] == first["top_logprobs"] + second["top_logprobs"]
    assert (whole["tokens"], whole["text_offset"]) == (["token_id:5", "token_id:6", "token_id:8"], [0, 10, 20])


def test_a_complete_response_has_a_text_for_each_choice() -> None:
    joined = completion.join([TokenDelta("a"), TokenDelta("b", finish_reason=FinishReason.STOP)], "r")
    found = formatter().response([joined, joined], {"total_tokens": 3})
    assert [(one["index"], one["text"], one["finish_reason"]) for one in found["choices"]] == [
        (0, "ab", "stop"),
        (1, "ab", "stop"),
    ]
    assert found["usage"] == {"total_tokens": 3}


def test_of_alternatives_with_the_same_text_the_likeliest_is_shown() -> None:
    vocabulary = Vocabulary(TOKENIZER)
    same = [token for token in range(300) if vocabulary.token(token)[0] == "\ufffd"][:2]
    made = CompletionFormatter(CompletionRequest(model="demo", prompt="x", logprobs=2), "r", 7, vocabulary)
    top = ((same[0], -0.25), (same[1], -5.0))
    chunk = made.chunk(0, TokenDelta("", (same[0],), (-0.25,), top_log_probs=(top,)))
    assert chunk is not None and chunk["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -0.25}]
