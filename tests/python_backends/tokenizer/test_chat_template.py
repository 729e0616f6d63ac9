import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import checkpoints
from contract.errors import InvalidArgument, NotFound
from python_backends.tokenizer.chat_template import ChatTemplate, parse_messages

HELLO = json.dumps([{"role": "user", "content": "Hello"}])


@pytest.fixture
def template(tmp_path):
    """``template(source)``: the chat template of a model whose tokenizer_config.json holds it, and more."""

    def make(source, **config):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source} | config))
        return ChatTemplate(tmp_path)

    return make


def chat(*messages):
    return json.dumps([{"role": role, "content": content} for role, content in messages])


def test_a_chat_becomes_the_prompt_that_the_template_writes(tmp_path):
    checkpoints.write_tokenizer(tmp_path)
    text = ChatTemplate(tmp_path).render(chat(("system", "Be brief."), ("user", "Hé 你好?")))
    assert (
        text == "<|begin|>system\nBe brief.<|end|><|begin|>user\nHé 你好?<|end|><|begin|>assistant"
    )  # one newline at a template's end is dropped, as Jinja and so Hugging Face do


def test_special_tokens_are_there_by_name_written_as_text_or_as_a_table(template):
    rendered = template(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token }}",
        bos_token="<s>",
        eos_token={"content": "</s>"},
    ).render(HELLO)
    assert rendered == "<s>Hello</s>"


def test_blocks_leave_no_blank_lines_as_with_hugging_face(template):
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n"
    assert template(source).render(chat(("user", "a"), ("user", "b"))) == "a\nb\n"


def test_loops_can_be_left_and_generation_is_only_marked(template):
    source = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert template(source).render(chat(("user", "a"), ("assistant", "b"), ("user", "c"))) == "ab"


def test_tools_and_documents_are_none_when_there_are_none(template):
    assert template("{% if tools is not none or documents is not none %}tools{% endif %}.").render(HELLO) == "."


def test_tojson_writes_characters_as_they_are_and_takes_the_usual_options(template):
    source = '{{ {"b": "é", "a": 1} | tojson(sort_keys=true) }} {{ [1] | tojson(indent=1) }}'
    assert template(source).render(HELLO) == '{"a": 1, "b": "é"} [\n 1\n]'


def test_the_default_of_several_named_templates_is_taken(template):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert template(several).render(HELLO) == "plain"


def test_a_template_file_goes_before_the_configuration(template, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("file: {{ messages[0].content }}", encoding="utf-8")
    assert template("configuration").render(HELLO) == "file: Hello"


def test_a_model_without_a_template_says_what_to_send_instead(tmp_path):
    with pytest.raises(NotFound, match="no chat template; send text_input instead"):
        ChatTemplate(tmp_path).render(HELLO)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("Hello", "got no JSON"),
        ("", "got no JSON"),
        ("[" * 100_000, "got no JSON"),
        ("{}", "must be a JSON list"),
        ("[]", "must be a JSON list"),
        ('["Hello"]', 'entry 0 must have a "role"'),
        ('[{"content": "Hello"}]', 'entry 0 must have a "role"'),
        ('[{"role": 1, "content": "Hello"}]', 'entry 0 must have a "role"'),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', 'entry 1 must have text in "content"'),
        ('[{"role": "user", "content": ["a"]}]', 'entry 0 must have text in "content"'),
        ('[{"role": "user", "content": null}]', 'entry 0 must have text in "content"'),
    ],
)
def test_what_is_no_chat_is_refused_with_an_example_of_one(messages, problem):
    with pytest.raises(InvalidArgument, match=problem) as caught:
        parse_messages(messages)
    assert caught.value.field == "messages" and '[{"role": "user", "content": "Hello"}]' in str(caught.value)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_json_is_a_chat_or_is_refused_by_name(value):
    try:
        messages = parse_messages(json.dumps(value))
    except InvalidArgument as refusal:
        assert refusal.field == "messages"
    else:
        assert messages == value


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
    ],
)
def test_a_chat_that_the_template_refuses_is_the_callers_error(template, source, reason):
    with pytest.raises(InvalidArgument, match=f"messages: must suit the model's chat template, got .*{reason}"):
        template(source).render(HELLO)


@pytest.mark.parametrize(
    ("content", "problem"),
    [("a\\u0000b", r"must hold no NUL character \(\\u0000\)"), ("a\\ud83db", r"lone surrogate \(\\ud83d\)")],
)
def test_what_json_can_spell_and_text_may_not_hold_is_refused(template, content, problem):
    with pytest.raises(InvalidArgument, match=problem):
        template("{{ messages[0].content }}").render(f'[{{"role": "user", "content": "{content}"}}]')


def test_a_character_in_two_escapes_is_a_character(template):
    assert template("{{ messages[0].content }}").render('[{"role": "user", "content": "\\ud83d\\ude00"}]') == "😀"
