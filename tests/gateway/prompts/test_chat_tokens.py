"""Tokens of a chat by its model's own template and tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.prompts.chat_tokens import chat_tokens, counted

TOKENIZER = Path(__file__).resolve().parents[3] / "engines" / "demo" / "tokenizer.json"


def test_texts_are_estimated_without_a_tokenizer():
    assert counted(None, ["hello there"]) > 0


@pytest.mark.slow
def test_a_chat_is_counted_as_its_template_writes_it():
    counter = chat_tokens(TOKENIZER)
    messages = [{"role": "user", "content": "hello there"}]
    assert counter.count(messages, None, None) > counted(TOKENIZER, ["hello there"]) > 0
    assert counter.max_model_len and counter.max_model_len > 100
