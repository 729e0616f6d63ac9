"""What OpenAI's own types say of responses and their events, and what the events of a stream add up to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, get_args

import orjson
from openai.types import responses as types
from openai.types.responses import response_item_list
from pydantic import TypeAdapter

Event = dict[str, Any]


@cache
def _event_types() -> dict[str, TypeAdapter]:
    union = get_args(types.ResponseStreamEvent)[0]
    return {get_args(one.model_fields["type"].annotation)[0]: TypeAdapter(one) for one in get_args(union)}


def check_event(event: Event) -> None:
    _event_types()[event["type"]].validate_json(orjson.dumps(event), strict=True)


def check_response(response: Event) -> None:
    TypeAdapter(types.Response).validate_json(orjson.dumps(response), strict=True)


def check_list(page: Event) -> None:
    TypeAdapter(response_item_list.ResponseItemList).validate_json(orjson.dumps(page), strict=True)


def folded(events: Sequence[Event]) -> Event:
    """The response that a client makes of the events alone; checks their order on the way."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response = dict(events[0]["response"])
    assert response["output"] == [] and response["status"] == "in_progress" and response["usage"] is None
    assert events[1]["response"] == response
    items: list[Event] = []
    open_item: Event | None = None
    part: Event | None = None
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items) - (open_item is not None and kind != "output_item.added")
        if kind == "output_item.added":
            assert open_item is None and event["item"]["status"] == "in_progress"
            open_item = {**event["item"]}
            items.append(open_item)
            continue
        assert open_item is not None
        if kind == "output_item.done":
            assert part is None and event["item"] == {**open_item, "status": event["item"]["status"]}
            open_item["status"] = event["item"]["status"]
            open_item = None
            continue
        assert event["item_id"] == open_item["id"]
        if open_item["type"] == "function_call":
            if kind == "function_call_arguments.delta":
                open_item["arguments"] += event["delta"]
            else:
                assert kind == "function_call_arguments.done" and event["arguments"] == open_item["arguments"]
            continue
        name = {"message": "output_text", "reasoning": "reasoning_text"}[open_item["type"]]
        assert event["content_index"] == 0
        if kind == "content_part.added":
            part = {**event["part"]}
        elif kind == f"{name}.delta":
            assert part is not None
            part["text"] += event["delta"]
            if name == "output_text":
                part["logprobs"] = [*part["logprobs"], *event["logprobs"]]
        elif kind == f"{name}.done":
            assert part is not None and event["text"] == part["text"]
            assert event.get("logprobs") == part.get("logprobs")
        else:
            assert kind == "content_part.done" and event["part"] == part
            open_item["content"] = [part]
            part = None
    assert open_item is None
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    ends = ("status", "incomplete_details", "usage", "error")
    return {**response, "output": items, **{name: last["response"][name] for name in ends}}
