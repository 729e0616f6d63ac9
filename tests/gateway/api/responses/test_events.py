"""The events of a response add up to it, however its output is divided into deltas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import EngineFailed, InvalidArgument, Overloaded
from contract.generation import FinishReason, Sections, TokenDelta, ToolCallDelta, Usage
from gateway.api.responses.events import ResponseEvents, ResponseFold
from gateway.api.responses.schemas import ResponsesRequest
from gateway.cache.reuse import ResponseDeltas
from gateway.choices import ChoiceDelta
from gateway.tools.chat_format import HERMES, TAGGED, ChatFormat
from gateway.tools.cutter import Cutter, CutterRules
from tests.gateway.api.responses.contract import check_event, check_response, folded
from tests.gateway.tools.letters import MARKERS, Letters, deltas

CALL, END, THINK, END_THINK, *_ = MARKERS
RULES = CutterRules(ChatFormat(HERMES, TAGGED), ("f", "g"), reasoning=True)
HEAD = {"id": "resp_x", "object": "response", "created_at": 7, "model": "demo"}
HEAD |= ResponsesRequest(model="demo", input="x").returned()
LETTERS = Letters()


def events_of(found: Sequence[TokenDelta], **more: Any) -> tuple[list[dict], dict]:
    fold = ResponseFold(HEAD, **more)
    events = [event for delta in found for event in fold.feed(delta)]
    assert fold.done
    return events, fold.response


def cut(pieces: Sequence[str], splits: Sequence[int] = (), end: FinishReason = FinishReason.STOP, lag: int = 0) -> list:
    cutter = Cutter(RULES, LETTERS, "call_{}".format)
    return [cutter.feed(one) for one in deltas(LETTERS, LETTERS.ids(pieces), splits, end=end, lag=lag)]


def shape(response: dict) -> list:
    return [
        (item["type"], item["status"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in response["output"]
    ]


def test_a_text_has_openais_events_in_their_order() -> None:
    found = [TokenDelta("Hel", (1,)), TokenDelta("lo", (2,)), TokenDelta("", (3,), finish_reason=FinishReason.STOP)]
    events, response = events_of([*found[:2], TokenDelta(finish_reason=FinishReason.STOP, usage=Usage(3, 2, 1))])
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert folded(events) == response
    assert shape(response) == [("message", "completed", "Hello")]
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }


def test_reasoning_text_and_calls_are_items_in_the_order_of_the_output() -> None:
    arguments = json.dumps({"name": "f", "arguments": {"x": 1}})
    pieces = [THINK, "why", END_THINK, "Wait.", CALL, arguments, END, CALL, arguments, END, "Then."]
    events, response = events_of(cut(pieces, range(80)))
    assert shape(response) == [
        ("reasoning", "completed", "why"),
        ("message", "completed", "Wait."),
        ("function_call", "completed", '{"x": 1}'),
        ("function_call", "completed", '{"x": 1}'),
        ("message", "completed", "Then."),
    ]
    assert [item.get("call_id") for item in response["output"]] == [None, None, "call_0", "call_1", None]
    assert len({item["id"] for item in response["output"]}) == 5
    assert folded(events) == response
    for event in events:
        check_event(event)
    check_response(response)


@st.composite
def outputs(draw: st.DrawFn) -> tuple[list[str], FinishReason]:
    sections = st.one_of(
        st.text("ab {}\n", max_size=6).map(lambda text: [text]),
        st.text("ab\n", max_size=6).map(lambda text: [THINK, text, END_THINK]),
        st.sampled_from(["f", "g", "h"]).map(
            lambda name: [CALL, json.dumps({"name": name, "arguments": {"a": [1, "x"]}}), END]
        ),
    )
    pieces = [piece for section in draw(st.lists(sections, max_size=5)) for piece in section]
    end = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    if end is FinishReason.LENGTH and pieces:
        pieces = pieces[: draw(st.integers(1, len(pieces)))]
        pieces[-1] = pieces[-1] if pieces[-1] in MARKERS else pieces[-1][: draw(st.integers(0, len(pieces[-1])))]
    return pieces, end


@given(outputs(), st.lists(st.integers(0, 120), max_size=30), st.integers(0, 3))
def test_every_division_of_an_output_gives_the_same_response(output: Any, splits: list[int], lag: int) -> None:
    pieces, end = output
    _, whole = events_of(cut(pieces, end=end))
    events, response = events_of(cut(pieces, splits, end, lag))
    assert response == whole
    assert folded(events) == whole


def test_a_limit_leaves_the_last_item_incomplete() -> None:
    found = [TokenDelta("a", (1,)), TokenDelta("b", (2,), finish_reason=FinishReason.LENGTH, usage=Usage(1, 2))]
    events, response = events_of(found)
    assert shape(response) == [("message", "incomplete", "ab")]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-1]["type"] == "response.incomplete"
    _, response = events_of(cut([CALL, '{"name": "f", "arguments": {"x": '], end=FinishReason.LENGTH))
    assert shape(response) == [("function_call", "incomplete", '{"x": ')]
    for event in events:
        check_event(event)


def test_a_call_that_a_stop_string_has_cut_is_incomplete() -> None:
    events, response = events_of(cut([CALL, '{"name": "f", "arguments": {"x": ']))
    assert shape(response) == [("function_call", "incomplete", '{"x": ')] and response["status"] == "completed"
    assert folded(events) == response
    for event in events:
        check_event(event)


def test_an_output_without_text_is_an_empty_message() -> None:
    events, response = events_of([TokenDelta(finish_reason=FinishReason.STOP)])
    assert shape(response) == [("message", "completed", "")] and folded(events) == response


def test_log_probs_stand_with_the_text_of_their_tokens() -> None:
    found = [TokenDelta("", (1,)), TokenDelta("ab", (2, 3)), TokenDelta("", (4,), finish_reason=FinishReason.STOP)]
    listed = {"token": "t", "logprob": -1.0, "bytes": [], "top_logprobs": []}
    events, response = events_of(found, log_probs=lambda delta: [{**listed, "token": str(t)} for t in delta.token_ids])
    assert [one["token"] for one in response["output"][0]["content"][0]["logprobs"]] == ["1", "2", "3", "4"]
    assert folded(events) == response
    for event in events:
        check_event(event)


def test_what_an_upstream_has_separated_is_told_in_the_usual_order() -> None:
    first = TokenDelta("Wait.", sections=Sections("why", (ToolCallDelta(0, "a", "f", "{"),)))
    last = TokenDelta(sections=Sections("", (ToolCallDelta(0, arguments="}"),)), finish_reason=FinishReason.STOP)
    _, response = events_of([first, last])
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    mixed = TokenDelta(sections=Sections("", (ToolCallDelta(1, arguments="}"),)))
    with pytest.raises(EngineFailed, match="were mixed"):
        events_of([first, mixed])


def test_a_failure_is_an_error_before_the_response_and_part_of_it_after() -> None:
    fold = ResponseFold(HEAD)
    [event] = fold.failed(InvalidArgument("input", "is too long"))
    assert (event["type"], event["param"], event["message"]) == ("error", "input", "input: is too long")
    check_event(event)
    fold = ResponseFold(HEAD)
    fold.feed(TokenDelta("a"))
    [event] = fold.failed(Overloaded("full"))
    assert event["response"]["error"] == {"code": "rate_limit_exceeded", "message": "full"}
    assert event["type"] == "response.failed" and event["response"]["status"] == "failed"
    check_event(event)


async def test_a_retry_gets_the_events_after_the_last_that_it_has() -> None:
    found = [ChoiceDelta(0, one) for one in cut([THINK, "why", END_THINK, "text"], range(20))]

    async def rest(start: int) -> Any:
        for item in found[start:]:
            yield item

    async def sent(start: int) -> bytes:
        stream = ResponseDeltas(rest(start), {}, lambda error: None, "r", 7, start, tuple(found[:start]))
        ended: list[str] = []

        def on_end(response: Any) -> None:
            ended.append(response["status"])

        events = ResponseEvents(stream, ResponseFold(HEAD), on_end)
        data = b"".join([events.encode(item) async for item in events]) + events.end()
        await events.aclose()
        assert ended == ["completed"]
        return data

    whole = await sent(0)
    assert whole.startswith(b"event: response.created\ndata: {")
    for start in (1, 3, len(found) - 1):
        assert whole.endswith(await sent(start))
        assert b"id: %d\n" % start not in whole[: -len(await sent(start))]
