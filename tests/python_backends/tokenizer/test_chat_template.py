import json

import pytest

from contract.errors import InvalidArgument, NotFound
from python_backends.tokenizer.chat_template import ChatTemplate
from tests.fakes import checkpoints

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
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ ''.__class__.__mro__ }}", "is unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{% for name, value in messages[0].content|dictsort %}{{ name }}{% endfor %}", "has no attribute 'items'"),
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


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
ANSWERED = [*ASKED, {"role": "tool", "tool_call_id": "c", "content": "7"}]
KNOWING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def test_a_template_that_knows_tools_gets_them_and_calls_as_objects(template):
    knowing = template(KNOWING)
    assert knowing.knows_tools
    text = knowing.render(json.dumps(ANSWERED), json.dumps([TOOL]))
    assert text == json.dumps(TOOL) + 'user:Hi;assistant:f{"x": "é"};tool:7;'


def test_a_template_that_knows_none_gets_them_in_the_system_message(template):
    plain = template(PLAIN)
    assert not plain.knows_tools
    text = plain.render(json.dumps([{"role": "system", "content": "Be brief."}, *ANSWERED]), json.dumps([TOOL]))
    assert text.startswith("system:Be brief.\n\n# Tools\n") and f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    called = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert text.endswith(f"user:Hi;assistant:{called};user:<tool_response>\n7\n</tool_response>;")
    assert plain.render(HELLO, json.dumps([TOOL])).startswith("system:# Tools\n")
    assert plain.render(json.dumps(ANSWERED)).startswith("user:Hi;assistant:<tool_call>")  # no tools any more


def test_a_template_for_tools_of_its_own_is_taken_where_there_are_tools(template):
    several = [{"name": "tool_use", "template": KNOWING}, {"name": "default", "template": PLAIN}]
    assert template(several).render(HELLO, json.dumps([TOOL])) == json.dumps(TOOL) + "user:Hello;"
    assert template(several).render(HELLO) == "user:Hello;"


def test_the_templates_own_variables_can_be_set_and_others_only_left_off(template):
    thinking = template("{% if enable_thinking is defined and not enable_thinking %}off{% endif %}.")
    assert thinking.render(HELLO, variables_json='{"enable_thinking": false}') == "off."
    assert thinking.render(HELLO) == "."
    assert template(PLAIN).render(HELLO, variables_json='{"enable_thinking": false}') == "user:Hello;"
    for name in ("enable_thinking", "messages", "bos_token"):
        with pytest.raises(InvalidArgument, match=f"chat_template_kwargs: .* got '{name}'"):
            template(PLAIN).render(HELLO, variables_json=json.dumps({name: True}))
