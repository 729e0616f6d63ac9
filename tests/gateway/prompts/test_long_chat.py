"""What is left out of a chat that is too long, as laws."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contract.chat import check_tool_turns
from gateway.prompts.long_chat import drop_order, shortened, summary_prompt, with_summary


def said(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    texts = st.text("ab ", max_size=30)
    messages = [said("system", draw(texts))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 6))):
        messages.append(said("user", draw(texts)))
        for call in range(draw(st.integers(0, 2))):
            ids = [f"{turn}.{call}.{number}" for number in range(draw(st.integers(1, 2)))]
            calls = [{"id": one, "function": {"name": "f", "arguments": "{}"}} for one in ids]
            messages.append(said("assistant", "", tool_calls=calls))
            messages += [said("tool", draw(texts), tool_call_id=one) for one in ids]
        if draw(st.booleans()):
            messages.append(said("assistant", draw(texts)))
        if draw(st.integers(0, 9)) == 0:
            messages.append(said("system", draw(texts)))
    return [{**message, "number": number} for number, message in enumerate(messages)]


def size(messages: Any) -> int:
    return 7 + sum(5 + len(message["content"]) for message in messages)


@given(chats(), st.booleans(), st.integers(10, 300))
def test_what_stays_fits_in_order_with_whole_tool_turns(messages, keep_system, room):
    order = drop_order(messages, keep_system, range(len(messages)))
    found = shortened(messages, order, lambda chat: size(chat) <= room)
    if found is None:
        gone = {index for group in order for index in group}
        assert size([one for index, one in enumerate(messages) if index not in gone]) > room
        return
    stays, dropped = found
    assert size(stays) <= room
    numbers = [message["number"] for message in stays]
    assert numbers == sorted(numbers) and messages[-1] in stays
    assert sorted([*numbers, *(message["number"] for message in dropped)]) == list(range(len(messages)))
    check_tool_turns(stays)
    if keep_system:
        assert not any(message["role"] == "system" for message in dropped)
    # As little as possible, and nothing more the second time.
    if size(messages) <= room:
        assert not dropped
    again = shortened(stays, drop_order(stays, keep_system, range(len(stays))), lambda chat: size(chat) <= room)
    assert again == (stays, [])


@given(chats(), st.integers(10, 300))
def test_the_first_question_stays_while_it_fits_beside_the_last_turn(messages, room):
    order = drop_order(messages, True, range(len(messages)))
    found = shortened(messages, order, lambda chat: size(chat) <= room)
    users = [message for message in messages if message["role"] == "user"]
    if found and len(users) > 1 and users[0] in found[1]:
        assert order[-1] == [users[0]["number"]] and size([*found[0], users[0]]) > room


def test_messages_of_a_template_stay():
    messages = [said("system", "a"), said("user", "b"), said("user", "c"), said("user", "d"), said("user", "e")]
    assert drop_order(messages, False, range(2, 4)) == [[2]]
    assert drop_order(messages, False, range(5)) == [[0], [1], [2], [3]]
    assert drop_order(messages, False, range(2, 2)) == []


def test_a_summary_is_part_of_the_first_system_message():
    assert with_summary([said("user", "x")], " s ")[0]["content"].endswith("conversation:\ns")
    assert with_summary([said("system", "a"), said("user", "x")], "s")[0]["content"].startswith("a\n\nSummary of")
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    asked = summary_prompt([said("user", "x"), said("assistant", "", tool_calls=calls)], 50)
    assert "50 words" in asked[0]["content"] and asked[1]["content"] == "user: x\nassistant: f({'a': 1})"
