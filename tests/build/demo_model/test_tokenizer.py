"""The demo model's tokenizer: training, round trips, special tokens and the chat template."""

import json
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from build.demo_model.conversations import Conversation
from build.demo_model.tokenizer import SPECIAL_TOKENS, generation_config, save_tokenizer, train_tokenizer

CHECKPOINT = Path(__file__).resolve().parents[3] / "build/demo_model/checkpoint"

TEXTS = {
    "python": "class A:\n    def f(self, *, x: int = 0) -> None:\n        if x:\n            return\n\n\n",
    "deep indentation": "\n".join(" " * 4 * depth + "pass" for depth in range(12)),
    "tabs and trailing spaces": "if x:\n\treturn  \n\n  \n \t y\r\nz\r",
    "latin, greek, cyrillic": "façade naïve Ελληνικά Русский",
    "chinese, japanese, korean": "漢字かな交じり文。한국어 조사",
    "arabic, hebrew, hindi, thai": "العربية עברית नमस्ते दुनिया สวัสดี",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽",
    "combining and invisible": "e\u0301 a\u200bb \u00a0 \ufeff \u2028 \U0010ffff",
    "control": "\0\x01\x7f\x1b[0m",
    "only spaces": "     ",
    "empty": "",
}


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer that ships."""
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer_config():
    return json.loads((CHECKPOINT / "tokenizer_config.json").read_text())


def refuse(message):
    raise ValueError(message)


def render(tokenizer_config, messages, add_generation_prompt):
    """As HuggingFace renders chat templates."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(tokenizer_config["chat_template"])
    return template.render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=tokenizer_config["bos_token"],
        raise_exception=refuse,
    )


@pytest.mark.parametrize("name", TEXTS)
def test_any_script_survives_a_round_trip(tokenizer, name):
    ids = tokenizer.encode(TEXTS[name], add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXTS[name]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_a_round_trip(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("depth", range(1, 6))
def test_a_line_break_with_its_indentation_is_one_token(tokenizer, depth):
    line = "\n" + "    " * depth
    assert len(tokenizer.encode(line + "x", add_special_tokens=False).ids) == 2


def test_python_costs_less_than_a_token_per_three_bytes(tokenizer):
    source = Path(json.__file__).read_text()
    assert len(tokenizer.encode(source).ids) < len(source.encode()) / 3


def test_special_tokens_have_the_first_ids_and_end_of_text_begins_an_encoding(tokenizer):
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.encode("x").ids[0] == tokenizer.token_to_id("<|endoftext|>")
    assert tokenizer.encode("x", add_special_tokens=False).ids == tokenizer.encode("x").ids[1:]
    assert tokenizer.decode(tokenizer.encode("<|user|>x<|end|>").ids, skip_special_tokens=True) == "x"


def test_generation_ends_at_the_end_of_the_text_or_of_the_turn(tokenizer):
    stored = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert stored == generation_config()
    assert [tokenizer.id_to_token(i) for i in stored["eos_token_id"]] == ["<|endoftext|>", "<|end|>"]
    assert tokenizer.id_to_token(stored["pad_token_id"]) == "<|pad|>"


def test_the_chat_template_writes_what_the_model_was_trained_on(tokenizer_config):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    trained = "<|endoftext|>" + Conversation("S", "Hi", "Ho").rendered()
    assert render(tokenizer_config, messages, True) == trained.removesuffix("Ho<|end|>")
    messages.append({"role": "assistant", "content": "Ho"})
    assert render(tokenizer_config, messages, False) == trained


def test_a_rendered_chat_is_cut_into_its_special_tokens(tokenizer, tokenizer_config):
    text = render(tokenizer_config, [{"role": "user", "content": "What is a list?"}], True)
    tokens = tokenizer.encode(text, add_special_tokens=False).tokens
    assert [token for token in tokens if token in SPECIAL_TOKENS] == [
        "<|endoftext|>",
        "<|user|>",
        "<|end|>",
        "<|assistant|>",
    ]


def test_the_chat_template_refuses_a_role_it_does_not_know_by_name(tokenizer_config):
    with pytest.raises(ValueError, match="role tool: allowed are system, user, assistant"):
        render(tokenizer_config, [{"role": "tool", "content": "x"}], True)


def test_training_is_repeatable_and_what_it_saves_loads_again(tmp_path):
    texts = [source.read_text() for source in sorted(Path(json.__file__).parent.glob("*.py"))]
    once, twice = train_tokenizer(texts, 600), train_tokenizer(texts, 600)
    assert once.to_str() == twice.to_str()
    assert once.get_vocab_size() == 600
    save_tokenizer(once, tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).to_str() == once.to_str()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] and config["bos_token"] == "<|endoftext|>"
