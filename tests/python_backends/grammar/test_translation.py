"""Every kind of guide as the engine's library compiles it."""

import json

import pytest

from contract.errors import InvalidArgument
from contract.generation import Guide
from python_backends.grammar.translation import translate
from python_backends.grammar.vocabulary import SPECIAL_MARK
from tests.fakes.grammar_matcher import Matcher


def matcher(*guide):
    made = translate(Guide(*guide))
    assert made.kind == "ebnf_grammar"
    return Matcher(made.text)


def test_a_grammar_stays_as_it_is():
    guide = Guide("ebnf_grammar", 'root ::= "a"')
    assert translate(guide) == guide


def test_schemas_patterns_and_choices_become_grammars():
    assert matcher("json_schema", '{"type": "integer"}').matches("12")
    assert matcher("json").matches('{"a":1}')
    assert matcher("regex", "[a-c]{2}").matches("ab") and not matcher("regex", "[a-c]{2}").matches("abc")
    assert matcher("choice", '["yes", "no \\"é"]').matches('no "é')


NAME = {"type": "string", "pattern": "^[a-z0-9-]+$", "minLength": 3, "maxLength": 255}
NUMBERS = {"type": "array", "prefixItems": [{"type": "integer"}] * 200}


@pytest.mark.parametrize(
    ("kind", "guide", "good", "bad"),
    [
        ("json_schema", NAME, ['"abc"', f'"{"a" * 255}"'], ['"ab"', f'"{"a" * 256}"']),
        ("json_schema", NAME | {"pattern": "^[a-z][a-z0-9]*$"}, ['"abc"', f'"{"a" * 60}"'], ['"ab"', '"1ab"']),
        ("json_schema", NAME | {"pattern": "^[a-z]{2,5}$"}, ['"abc"', '"abcde"'], ['"ab"', '"abcdef"']),
        ("json_schema", NUMBERS, ["[7]", "[7,7,7]"], ['["a"]', '[7,"a"]']),
        ("regex", "ab" * 200, ["ab" * 200], ["ab" * 199]),
        ("regex", "(a*)*b", ["b", "aab"], ["a", "aabb"]),
        ("regex", "(a+)?b", ["b", "aab"], ["a"]),
        ("regex", r"(\d{4})*", ["", "1234", "12345678"], ["123", "12345"]),
        ("regex", "((a?){2,3}b){2}", ["bb", "aaabb", "aaabaaab"], ["b", "aaaabb"]),
        ("regex", "((a{2}){3,4})?", ["", "a" * 6, "a" * 8], ["a" * 5, "a" * 7, "a" * 9]),
    ],
)
def test_long_texts_and_lists_become_grammars(kind, guide, good, bad):
    made = matcher(kind, guide if kind == "regex" else json.dumps(guide))
    assert all(map(made.matches, good)) and not any(map(made.matches, bad))


def test_lengths_that_a_pattern_does_not_allow_are_refused():
    with pytest.raises(InvalidArgument, match="allows no value"):
        translate(Guide("json_schema", json.dumps(NAME | {"pattern": "^[a-z]{1,2}$"})))


@pytest.mark.parametrize("character", ["\ud800", "\udbff\udfff"])
def test_characters_that_no_text_holds_are_refused(character):
    for kind, text in (("choice", f'["{character}", "b"]'), ("json_schema", f'{{"enum": ["{character}"]}}')):
        with pytest.raises(InvalidArgument, match="must hold no surrogates and no characters from U"):
            translate(Guide(kind, text))
    with pytest.raises(InvalidArgument, match="matches no text"):
        translate(Guide("regex", json.loads(f'"{character}"')))
    assert matcher("choice", '["\\ud83d\\ude00"]').matches("😀")


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("regex", "(", "must be a regular expression; it has a"),
        ("regex", "[^\\s\\S]", "matches no text"),
        ("choice", "[]", "must be a JSON list of at least one string"),
        ("choice", "x", "must be a JSON list of strings"),
        ("choice", json.dumps(["a"] * 1001), "at most 1000 choices"),
        ("structural_tag", "[]", 'must be {"type": "structural_tag"'),
        ("structural_tag", "x", "must be JSON"),
        ("json_schema", '{"nope": 1}', "#/nope is not supported"),
    ],
)
def test_what_cannot_be_expressed_is_refused(kind, text, problem):
    with pytest.raises(InvalidArgument) as caught:
        translate(Guide(kind, text))
    assert problem in caught.value.problem
    assert caught.value.field == "guided_decoding_guide"


def test_a_structural_tags_schemas_become_grammars_and_its_special_tokens_are_marked():
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tag = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    guide = Guide("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    made = json.loads(translate(guide, ["<call>"]).text)["format"]
    assert made["begin"] == SPECIAL_MARK + "<call>" and made["end"] == "</call>"
    assert made["content"]["type"] == "grammar" and Matcher(made["content"]["grammar"]).matches("7")


@pytest.mark.parametrize("part", [{"type": "regex"}, {"type": "regex", "pattern": 5}, {"type": "json_schema"}])
def test_a_part_of_a_structural_tag_without_its_field_is_left_to_the_library_to_refuse(part):
    tag = {"type": "structural_tag", "format": part}
    assert json.loads(translate(Guide("structural_tag", json.dumps(tag))).text) == tag


def test_a_bad_schema_in_a_structural_tag_is_named_with_its_place():
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": {"minimum": []}}, "end": ">"}
    with pytest.raises(InvalidArgument, match=r"#/minimum must be a number.*in #/format/content"):
        translate(Guide("structural_tag", json.dumps({"type": "structural_tag", "format": tag})))
