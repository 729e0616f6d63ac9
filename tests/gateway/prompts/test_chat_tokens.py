"""Tokens of a chat by its model's own template and tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from contract.errors import InvalidArgument
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


def test_what_lies_beside_a_tokenizer_must_be_readable(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
    rules = ModelRules(pools=("p",), context_length=99, tokenizer=tmp_path / "tokenizer.json")
    assert context_limit(rules) is None  # no chat template
    for name, text in (("tokenizer_config.json", "{"), ("chat_template.jinja", "{% if"), ("manifest.json", "{}")):
        chat_tokens.cache_clear()
        (tmp_path / name).write_text(text)
        with pytest.raises(InvalidArgument, match="tokenizer: must lie beside a chat template"):
            context_limit(rules)
        (tmp_path / name).unlink()
