"""One version of a prompt: its variables, its messages and its budgets."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract import toml_table
from contract.errors import InvalidArgument, PromptTooLong
from gateway.prompts.template import PARTS, Rendered, Template, over_budget

FILE = """
[variables.product]
max_length = 10
[variables.tone]
type = "enum"
values = ["kind", "formal"]
default = "kind"
[variables.sources]
type = "list"
max_items = 2
default = ["a"]
[variables.count]
type = "integer"
minimum = 1
maximum = 5
default = 2
[variables.share]
type = "number"
default = 0.5
[variables.short]
type = "boolean"
default = false
[[messages]]
role = "system"
content = [
  { part = "system", text = "{{ tone }} about {{ product }}." },
  { part = "context", text = "{% for s in sources %}[{{ loop.index }}] {{ s }}\\n{% endfor %}" },
]
[[messages]]
role = "user"
part = "examples"
content = "hi"
[[messages]]
role = "assistant"
content = "hello {{ count }} {{ share }} {{ short }}"
[[messages]]
role = "request"
[[messages]]
role = "user"
content = "{{ [1, 'x'] | tojson }}"
[parameters]
temperature = 0.5
[budgets]
system = 3
context = { tokens = 2, over = "refuse" }
"""


@pytest.fixture
def template(tmp_path: Path) -> Template:
    return written(tmp_path, FILE)


def written(folder: Path, text: str) -> Template:
    (folder / "1.0.0.toml").write_text(text)
    path = folder / "1.0.0.toml"
    return toml_table.checked(Template, toml_table.read(path), str(path))


def test_messages_stand_around_those_of_the_request(template: Template):
    rendered = template.render({"product": "tea", "sources": ["x", "y"]})
    assert [message["content"] for message in rendered.before] == [
        "kind about tea.[1] x\n[2] y\n",
        "hi",
        "hello 2 0.5 False",
    ]
    assert rendered.after == ({"role": "user", "content": '[1,"x"]'},)


def test_tokens_are_counted_by_part_and_budgets_warn_or_refuse(template: Template):
    def count(texts):
        return sum(len(text.split()) for text in texts)

    tokens = template.render({"product": "tea"}).tokens(count, ["one two"])
    assert tokens == {"system": 3, "context": 2, "examples": 5, "user": 3}
    assert over_budget(template.budgets, tokens) == ""
    assert over_budget(template.budgets, {**tokens, "system": 4}) == "system 4 of 3 tokens"
    with pytest.raises(PromptTooLong, match="at most 2 tokens in the part context, got 3"):
        over_budget(template.budgets, {**tokens, "context": 3})


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("product", "x" * 11, "at most 10 characters, got 11"),
        ("product", 3, "must be a text, got 3"),
        ("tone", "rude", "must be one of kind, formal, got 'rude'"),
        ("tone", ["kind"], "must be one of kind, formal"),
        ("sources", ["a", "b", "c"], "must have at most 2 entries, got 3"),
        ("sources", "a", "must be a list, got 'a'"),
        ("sources", ["a", 1], "variables.sources.1: must be a text, got 1"),
        ("count", 6, "at most 5, got 6"),
        ("count", 0, "at least 1, got 0"),
        ("count", True, "must be an integer, got True"),
        ("count", "2", "must be an integer, got '2'"),
        ("count", 2.5, "must be an integer, got 2.5"),
        ("share", "x", "must be a number"),
        ("short", 1, "must be true or false, got 1"),
        ("other", 1, "variables.other: is not known: allowed are product, tone"),
    ],
)
def test_a_bad_variable_is_named(template: Template, name: str, value: object, problem: str):
    with pytest.raises(InvalidArgument) as raised:
        template.render({"product": "tea", name: value})
    assert problem in str(raised.value)
    assert raised.value.field.startswith("prompt.variables.")


def test_a_missing_variable_is_named(template: Template):
    with pytest.raises(InvalidArgument, match=r"prompt\.variables\.product: is missing"):
        template.render({})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "messages: must be set"),
        ("messages = []", "messages: "),
        ('[[messages]]\nrole = "user"\ncontent = "{{ x }}"', "messages.0.content: must use only variables"),
        ('[[messages]]\nrole = "user"\ncontent = "{{ x"', "messages.0.content: must be a Jinja text"),
        ('[[messages]]\nrole = "tool"\ncontent = "x"', "messages.0.role"),
        ('[[messages]]\nrole = "user"\ntext = "x"', "messages.0.text: is not known: must be one of role"),
        ('[variables.x]\ntype = "enum"\n[[messages]]\nrole="user"', "variables.x.values: must be the allowed texts"),
        (
            '[variables.x]\ntype = "integer"\ndefault = "a"\n[[messages]]\nrole="user"',
            "variables.x.default: must be",
        ),
        ('[[messages]]\nrole = "request"\n[[messages]]\nrole = "request"', "role request at most once"),
        ('[parameters]\nbest_of = 3\n[[messages]]\nrole="user"', "parameters.best_of: is not known"),
        ('[parameters]\ntemperature = 3\n[[messages]]\nrole="user"', "parameters.temperature"),
        ('[budgets]\nother = 3\n[[messages]]\nrole="user"', "budgets.other"),
        ('[budgets]\nsystem = 0\n[[messages]]\nrole="user"', "budgets.system"),
        ("messages = 1 1", "must be TOML"),
        (
            '[variables.x]\ntype = "integer"\nmaximum = inf\n[[messages]]\nrole="user"',
            "variables.x.maximum: must be a finite number",
        ),
    ],
)
def test_a_bad_file_is_told_by_its_place(tmp_path: Path, text: str, problem: str):
    with pytest.raises(InvalidArgument) as raised:
        written(tmp_path, text)
    assert problem in str(raised.value)
    assert "1.0.0.toml" in str(raised.value)


@pytest.mark.parametrize(("bound", "sample"), [("minimum = 0.5", 1), ("maximum = -0.5", -1)])
def test_an_integer_between_whole_numbers_has_a_sample_within_its_bound(tmp_path: Path, bound: str, sample: int):
    text = f'[variables.x]\ntype = "integer"\n{bound}\n[[messages]]\nrole = "user"\ncontent = "{{{{ x }}}}"'
    assert written(tmp_path, text).samples == {"x": sample}


@pytest.mark.parametrize("kind", ["json", "string", "list"])
@pytest.mark.parametrize("levels", [300, 1020])
def test_a_value_of_too_many_levels_is_refused_by_name(tmp_path: Path, kind: str, levels: int):
    text = f'[variables.x]\ntype = "{kind}"\nexample = []\n[[messages]]\nrole = "user"\ncontent = "{{{{ x }}}}"'
    nested = orjson.loads("[" * levels + "]" * levels)
    with pytest.raises(InvalidArgument) as raised:
        written(tmp_path, text.replace("[]", "''") if kind == "string" else text).render({"x": nested})
    assert raised.value.field in ("prompt.variables.x", "prompt.variables.x.0")
    assert kind != "json" or "at most 254 levels" in raised.value.problem


def test_json_of_a_file_that_cannot_be_written_is_told_by_its_place(tmp_path: Path):
    text = '[variables.x]\ntype = "json"\ndefault = {}\n[[messages]]\nrole = "user"'
    for default in ("[" * 254 + "]" * 254, str(2**63)):
        written(tmp_path, text.format(default))
    for default in ("[" * 255 + "]" * 255, str(2**64)):
        with pytest.raises(InvalidArgument, match="variables.x.default: must have at most 254 levels, and integers of"):
            written(tmp_path, text.format(default))


def test_json_values_are_written_with_few_tokens(tmp_path: Path):
    text = """
[variables.rows]
type = "json"
max_length = 20
example = [{ a = 1, b = "x" }]
[[messages]]
role = "user"
content = "{{ rows | tojson }} {{ rows | table }}"
"""
    template = written(tmp_path, text)
    [message] = template.render({"rows": [{"a": 2, "b": "y"}]}).before
    assert message["content"] == '[{"a":2,"b":"y"}] a\tb\n2\ty'
    for value, problem in (([{"a": 1}] * 9, "at most 20 characters, got 73"), ([1], "same keys")):
        with pytest.raises(InvalidArgument, match=problem):
            template.render({"rows": value})


def test_a_template_cannot_reach_python(tmp_path: Path):
    with pytest.raises(InvalidArgument):
        written(tmp_path, "[[messages]]\nrole = 'user'\ncontent = \"{{ ''.__class__.__mro__ }}\"")


@given(st.lists(st.tuples(st.sampled_from(PARTS), st.text(max_size=20)), max_size=8), st.lists(st.text(max_size=9)))
def test_no_token_is_lost_between_parts(parts, own):
    tokens = Rendered(None, (), (), tuple(parts)).tokens(lambda texts: sum(map(len, texts)), own)
    assert sum(tokens.values()) == sum(len(text) for _, text in parts) + sum(map(len, own))


@pytest.mark.parametrize(
    "text",
    [
        "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
        "{{ 'x' * 10**15 }}",
        "{{ [1] | dictsort }}",
        "{{ cycler() }}",
    ],
    ids=["levels", "blocks", "memory", "attribute", "call"],
)
def test_a_text_that_cannot_be_compiled_or_rendered_is_an_error_of_its_file(tmp_path: Path, text: str):
    with pytest.raises(InvalidArgument, match=r"1\.0\.0\.toml: messages"):
        written(tmp_path, f"[[messages]]\nrole = 'user'\ncontent = \"{text}\"")


def test_null_is_a_value_of_json_and_otherwise_the_default(tmp_path: Path):
    text = """
[variables.any]
type = "json"
[variables.tone]
default = "kind"
[variables.name]
[[messages]]
role = "user"
content = "{{ any | tojson }} {{ tone }} {{ name }}"
"""
    template = written(tmp_path, text)
    [message] = template.render({"any": None, "tone": None, "name": "a"}).before
    assert message["content"] == "null kind a"
    for variables, name in (({"name": "a"}, "any"), ({"any": 1, "name": None}, "name")):
        with pytest.raises(InvalidArgument, match=f"prompt.variables.{name}: is missing"):
            template.render(variables)
