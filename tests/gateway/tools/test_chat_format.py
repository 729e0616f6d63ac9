"""The family shows in the chat template; settings win."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from gateway.config.policy import ModelRules
from gateway.config.settings import Settings
from gateway.tools import chat_format
from gateway.tools.chat_format import ChatFormat, of_template

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
QWEN = """{% if tools %}<tools></tools>{{ '<tool_call>' }}{% endif %}{% if '</think>' in content %}{% endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% if enable_thinking is false %}
{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
# Llama 3.2's templates write calls without a marker.
LLAMA = """{% if tools is not none %}{{ 'Given the following functions' }}{% endif %}{% for m in messages %}
{%- if m.tool_calls %}{{- '{"name": "' + m.tool_calls[0].function.name + '", ' }}{{- '"parameters": ' }}{% endif %}
{%- endfor %}"""
SWITCHED = """{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}
{{- '<think>\n\n</think>\n\n' }}{% else %}{{- '<think>\n' }}{% endif %}{% endif %}"""


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        ("", "hermes", "none"),
        (PLAIN, "hermes", "none"),
        (QWEN, "hermes", "tagged"),
        (QWEN.replace("<tool_call>", "<tool_call><function="), "none", "tagged"),
        ("{% if tools %}{{ '<|python_tag|>' }}{% endif %}", "llama3", "none"),
        (LLAMA, "llama3", "none"),
        ("{% if tools %}{{ '[TOOL_CALLS]' }}{% endif %}", "mistral", "none"),
        ("{% if tools %}{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}{% endif %}", "none", "none"),
        ("{% if tools %}{{ '<tool_call>' + name + '<arg_key>' }}{% endif %}", "none", "none"),
        ("{% if tools %}{{ '<|tool_calls_begin|>' }}{% endif %}", "none", "none"),
        ("{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}", "hermes", "open"),
        (SWITCHED, "hermes", "open"),
        (SWITCHED.replace("not enable", "enable"), "hermes", "open"),
        (SWITCHED.replace("is defined and not", "is not defined or not"), "hermes", "tagged"),
        (
            "{% if add_generation_prompt %}{{ '<think>' + raise_exception('a tool first') }}{% endif %}",
            "hermes",
            "tagged",
        ),
    ],
)
def test_a_template_shows_its_family(source: str, tools: str, reasoning: str) -> None:
    assert of_template(source) == ChatFormat(tools, reasoning)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    found = Tokenizer(models.WordLevel({"a": 0}, "a"))
    found.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    found.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_the_template_stands_beside_the_tokenizer(tokenizer: Path) -> None:
    def found() -> ChatFormat:
        chat_format._configured.cache_clear()
        return chat_format.configured(Settings(), ModelRules.model_construct(tokenizer=tokenizer))

    assert chat_format.configured(Settings(), ModelRules.model_construct()) == ChatFormat()
    assert found() == ChatFormat()  # the demo's folder may hold no template at all
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "{{ tools }}[TOOL_CALLS]"}]
    config = tokenizer.with_name("tokenizer_config.json")
    config.write_text(json.dumps({"chat_template": named}))
    assert found() == ChatFormat("mistral", "none", special=True)
    tokenizer.with_name("chat_template.jinja").write_text(QWEN)
    assert found() == ChatFormat("hermes", "tagged")


def test_the_models_rules_win_and_then_the_settings(tokenizer: Path) -> None:
    tokenizer.with_name("chat_template.jinja").write_text(QWEN)
    settings = Settings(tool_format="llama3", reasoning_format="open")
    model = ModelRules.model_construct(tokenizer=tokenizer)
    assert chat_format.configured(settings, model) == ChatFormat("llama3", "open")
    own = ModelRules.model_construct(tokenizer=tokenizer, tool_format="none", reasoning_format="tagged")
    assert chat_format.configured(settings, own) == ChatFormat("none", "tagged")
    assert chat_format.configured(settings, own).family is None
