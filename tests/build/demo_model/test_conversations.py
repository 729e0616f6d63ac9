"""The question-and-answer examples made from docstrings."""

import pytest

from build.demo_model.conversations import Conversation, conversations, conversations_of
from build.demo_model.corpus import Document, gather

MODULE = '''
def area(width: float, height=1.0) -> float:
    """The area of a rectangle.

    Both sides are in metres.
    """
    return width * height


class Door:
    async def open(self, *, slowly):
        """Swing the door open."""
        if slowly:
            return 1

    def bare(self):
        return 2
'''


def test_conversations_ask_about_documented_functions_and_answer_from_the_source():
    found = [c for number in range(40) for c in conversations_of(Document(f"shapes_{number}.py", MODULE))]
    assert {c.assistant for c in found} == {
        "The area of a rectangle.",
        "Swing the door open.",
        MODULE[MODULE.index("def area") : MODULE.index("\n\n\nclass")],
        'async def open(self, *, slowly):\n    """Swing the door open."""\n    if slowly:\n        return 1',
    }
    questions = {c.user for c in found}
    assert "Write `async def open(self, *, slowly):`" in questions
    assert "Write `def area(width: float, height=1.0) -> float:`" in questions
    assert "Write a Python function `area`: The area of a rectangle." in questions
    assert any(question.startswith("What does `Door.open` in the module `shapes_") for question in questions)


@pytest.mark.slow
def test_conversations_are_the_same_every_time_and_come_from_the_given_modules_alone():
    corpus = gather()

    once = conversations(corpus.training)
    assert once == conversations(corpus.training)
    assert len(once) > 1000
    assert {conversation.system == "" for conversation in once} == {True, False}


def test_a_conversation_renders_as_turns_that_end():
    assert Conversation("", "Hi", "Ho").rendered() == "<|user|>Hi<|end|><|assistant|>Ho<|end|>"
    assert Conversation("S", "Hi", "Ho").rendered().startswith("<|system|>S<|end|><|user|>Hi<|end|>")
