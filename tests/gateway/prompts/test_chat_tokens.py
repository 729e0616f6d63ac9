"""Tokens of a chat by its model's own template and tokenizer."""

from __future__ import annotations

from pathlib import Path

from gateway.config.policy import ModelRules
from gateway.prompts.chat_tokens import chat_tokens, context_limit, counted

TOKENIZER = Path(__file__).resolve().parents[3] / "build" / "demo_model" / "checkpoint" / "tokenizer.json"


def test_texts_are_estimated_without_a_tokenizer():
    assert counted(None, ["hello there"]) > 0


def test_a_chat_fits_as_its_template_writes_it():
    counter = chat_tokens(TOKENIZER)
    chat = [{"role": "user", "content": "hello there " * 40}]
    size = len(counter.ids(counter.template.render('[{"role": "user", "content": "%s"}]' % ("hello there " * 40))))
    assert size > counted(TOKENIZER, ["hello there " * 40]) > 80
    assert counter.fits(chat, None, None, size) and not counter.fits(chat, None, None, size - 1)
    assert not counter.fits([{"role": "user", "content": "x" * 1_000_000}], None, None, 100)  # without counting


def test_a_limit_needs_a_tokenizer_and_a_length():
    rules = ModelRules(pools=("p",), context_length=99)
    assert context_limit(rules) is None
    assert context_limit(rules.model_copy(update={"tokenizer": TOKENIZER})) == 99
    assert context_limit(ModelRules(pools=("p",), tokenizer=TOKENIZER)) is None
