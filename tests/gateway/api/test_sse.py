"""The events of a response's deltas: what each one adds, its id, and the usage at the end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.generation import FinishReason, TokenDelta, Usage
from gateway.api.formatters import ChatFormatter, CompletionFormatter
from gateway.api.schemas import ChatRequest, CompletionRequest
from gateway.api.sse import DONE, EventEncoder, encode_event, usage_fields
from gateway.choices import ChoiceDelta
from gateway.tools.vocabulary import Vocabulary

DELTAS = st.lists(
    st.builds(
        lambda choice, text, ended, counted: ChoiceDelta(
            choice, TokenDelta(text, (5,), (-0.5,) * counted, FinishReason.STOP if ended else None)
        ),
        st.integers(0, 2),
        st.text(max_size=5),
        st.booleans(),
        st.booleans(),
    )
)


def chat(logprobs: bool = False, **more: Any) -> ChatFormatter:
    messages: Any = [{"role": "user", "content": "x"}]
    request = ChatRequest(model="demo", messages=messages, stream=True, logprobs=logprobs, **more)
    return ChatFormatter(request, "r", 7, Vocabulary())


def completion(logprobs: bool = False, **more: Any) -> CompletionFormatter:
    request = CompletionRequest(model="demo", prompt="x", stream=True, logprobs=1 if logprobs else None, **more)
    return CompletionFormatter(request, "r", 7, Vocabulary())


def fields(data: bytes) -> list[dict[str, Any]]:
    """The JSON of every event in ``data``, each of which is one ``data:`` line however lines are split."""
    events = data.decode().split("\n\n")[:-1]
    assert all(len(event.splitlines()) == 1 for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


@given(
    deltas=DELTAS,
    more=st.fixed_dictionaries({}, optional={"stream_options": st.just({"include_usage": True})}),
    logprobs=st.booleans(),
    make=st.sampled_from([chat, completion]),
)
def test_events_hold_what_the_formatter_says_of_each_delta(deltas: list, more: dict, logprobs: bool, make: Any) -> None:
    encoder, plain, begun = EventEncoder(make(logprobs, **more)), make(logprobs, **more), 0
    for item in deltas:
        first = [plain.first_chunk(choice) for choice in range(begun, item.choice + 1)]  # choices begin in order
        begun = max(begun, item.choice + 1)
        expected = [chunk for chunk in (*first, plain.chunk(*item)) if chunk is not None]
        assert fields(encoder.encode(item)) == expected


@given(DELTAS, st.integers(0, 30), st.sampled_from([chat, completion]))
def test_a_resumed_stream_sends_the_rest_of_the_events_with_the_same_ids(deltas: list, start: int, make: Any) -> None:
    start = min(start, len(deltas))
    whole = EventEncoder(make(), first_event=0)
    resumed = EventEncoder(make(), first_event=start, replayed=deltas[:start])
    events = [whole.encode(item) for item in deltas]
    assert [resumed.encode(item) for item in deltas[start:]] == events[start:]
    for number, event in enumerate(events):
        assert not event or f"id: {number}\n" in event.decode()
        assert event.count(b"id: ") == bool(event)


def test_a_choice_begins_with_its_role_and_the_id_stands_at_its_last_event() -> None:
    first, text = EventEncoder(chat(), first_event=4).encode(ChoiceDelta(0, TokenDelta("a"))).split(b"\n\n")[:2]
    assert b"role" in first and b"id: 4" not in first and text.startswith(b"id: 4\n")


def test_a_delta_that_adds_nothing_has_no_event() -> None:
    encoder = EventEncoder(completion())
    assert encoder.encode(ChoiceDelta(0, TokenDelta("", (5,)))) == b""


def test_the_stream_ends_with_the_usage_of_all_choices_only_if_it_is_requested() -> None:
    both = chat(n=2, stream_options={"include_usage": True})
    encoder = EventEncoder(both, replayed=[ChoiceDelta(1, TokenDelta("", usage=Usage(3, 5)))])
    encoder.encode(ChoiceDelta(0, TokenDelta("", finish_reason=FinishReason.STOP, usage=Usage(3, 4, 2))))
    usage, done = encoder.end().split(b"\n\n")[:2]
    expected = {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert json.loads(usage[6:])["usage"] == expected | {
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert done + b"\n\n" == DONE == EventEncoder(chat()).end()


@pytest.mark.parametrize(
    ("usages", "choices", "tokens"),
    [
        ([], 1, (0, 0)),
        ([None], 1, (0, 0)),
        ([Usage(3, 1), Usage(3, 2)], 2, (3, 3)),
        ([Usage(3, 1), Usage(3, 2), Usage(5, 3), None], 2, (8, 6)),
        ([Usage(3, 1), Usage(5, 2)], 1, (8, 3)),
    ],
)
def test_a_prompt_counts_once_however_many_choices_it_has(usages: list, choices: int, tokens: tuple[int, int]) -> None:
    found = usage_fields(usages, choices)
    assert (found["prompt_tokens"], found["completion_tokens"]) == tokens


@given(st.text())
def test_an_event_is_one_line_for_every_way_to_split_lines(text: str) -> None:
    data = encode_event({"text": text})
    assert len(data.decode().splitlines()) == 2 and json.loads(data[6:]) == {"text": text}
