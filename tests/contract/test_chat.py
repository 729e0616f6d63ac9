import pytest

from contract.chat import check_tool_turns
from contract.errors import InvalidArgument

USER = {"role": "user", "content": "a"}


def asks(*ids):
    return {"role": "assistant", "content": "", "tool_calls": [{"id": one} for one in ids]}


def tells(call):
    return {"role": "tool", "tool_call_id": call, "content": "1"}


@pytest.mark.parametrize(
    "chat",
    [
        [USER],
        [USER, asks("a", "b"), tells("b"), tells("a")],
        [USER, asks("a"), tells("a"), asks("a"), tells("a"), USER],  # an id counts within its turn
    ],
)
def test_answered_calls_are_a_chat(chat):
    check_tool_turns(chat)


@pytest.mark.parametrize(
    ("chat", "problem"),
    [
        ([USER, tells("a")], "entry 1 must have as tool_call_id the id of a call in the message before, got 'a'"),
        ([asks("a", "b"), tells("c")], "entry 1 must have as tool_call_id one of a, b, got 'c'"),
        ([asks("a"), tells("a"), tells("a")], "entry 2 must have as tool_call_id the id"),
        ([asks("a"), {"role": "tool", "content": "1"}], "entry 1 must have as tool_call_id one of a, got None"),
        ([asks("a", "b"), tells("a"), USER], "entry 2 must be the tool message that answers the call 'b'"),
        ([asks("a")], "entry 1 is missing: a tool message that answers the call 'a'"),
        ([asks("a", "a")], "entry 0 must have tool_calls with different ids"),
    ],
)
def test_calls_and_answers_belong_together(chat, problem):
    with pytest.raises(InvalidArgument) as caught:
        check_tool_turns(chat)
    assert caught.value.field == "messages" and problem in str(caught.value)
