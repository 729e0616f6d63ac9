"""Every kind of guide as one that the engine's library compiles as it is meant."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from contract.errors import InvalidArgument
from contract.generation import Guide
from python_backends.grammar import patterns
from python_backends.grammar.ebnf import Grammar, TooManyRules, choice
from python_backends.grammar.languages import TooLarge
from python_backends.grammar.schema import grammar_of
from python_backends.grammar.vocabulary import SPECIAL_MARK

_FIELD = "guided_decoding_guide"
_MOST_CHOICES = 1000


def translate(guide: Guide, special: Sequence[str] = ()) -> Guide:
    """Return a guide of the kind ebnf_grammar, or structural_tag.

    special: the texts of the vocabulary's special tokens, which are marked in it.
    Raises InvalidArgument: it cannot be expressed exactly; names the place.
    """
    if guide.kind == "structural_tag":
        return Guide(guide.kind, _structural_tag(guide.text, special))
    if guide.kind == "ebnf_grammar":
        return guide
    if guide.kind == "json_schema":
        return Guide("ebnf_grammar", grammar_of(guide.text))
    if guide.kind == "regex":
        return Guide("ebnf_grammar", _regex(guide.text))
    return Guide("ebnf_grammar", grammar_of('{"type": "object"}') if guide.kind == "json" else _choices(guide.text))


def _regex(pattern: str) -> str:
    grammar = Grammar()
    try:
        text = grammar.write(grammar.language(patterns.whole(pattern), json=False))
    except patterns.BadPattern as exc:
        raise InvalidArgument(_FIELD, f"must be a regular expression; it {exc}") from exc
    except (TooLarge, TooManyRules, RecursionError) as exc:
        raise InvalidArgument(_FIELD, "must be a smaller regular expression; it needs too many states") from exc
    if not text:
        raise InvalidArgument(_FIELD, "must be a regular expression that matches something; it matches no text")
    return text


def _choices(text: str) -> str:
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(_FIELD, f"must be a JSON list of strings: {exc}") from exc
    if not isinstance(texts, list) or not texts or not all(isinstance(entry, str) and entry for entry in texts):
        raise InvalidArgument(_FIELD, "must be a JSON list of at least one string, none of them empty")
    if len(texts) > _MOST_CHOICES:
        raise InvalidArgument(_FIELD, f"must have at most {_MOST_CHOICES} choices, got {len(texts)}")
    return Grammar().write(choice(*texts))


def _structural_tag(text: str, special: Sequence[str]) -> str:
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(_FIELD, f"must be JSON with the type structural_tag: {exc}") from exc
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or not isinstance(tag.get("format"), dict):
        raise InvalidArgument(_FIELD, 'must be {"type": "structural_tag", "format": {...}}')
    marked = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
    try:
        return json.dumps(tag | {"format": _format(tag["format"], "#/format", marked)})
    except RecursionError as exc:
        raise InvalidArgument(_FIELD, "must be a structural tag of fewer levels") from exc


def _format(part: Any, at: str, marked: re.Pattern[str]) -> Any:
    """Return a part with its schemas and patterns as grammars, and special tokens in its texts marked."""
    if isinstance(part, str):
        return marked.sub(lambda found: SPECIAL_MARK + found[0], part)
    if isinstance(part, list):
        return [_format(item, f"{at}/{place}", marked) for place, item in enumerate(part)]
    if not isinstance(part, dict):
        return part
    try:
        match part:  # a part without its field is left to the library, which names it
            case {"type": "json_schema", "json_schema": schema}:
                return {"type": "grammar", "grammar": grammar_of(json.dumps(schema))}
            case {"type": "regex", "pattern": str(pattern)}:
                return {"type": "grammar", "grammar": _regex(pattern)}
    except InvalidArgument as exc:
        raise InvalidArgument(exc.field, f"{exc.problem} (in {at})") from exc
    if part.get("type") == "grammar":
        return part
    return {name: _format(value, f"{at}/{name}", marked) for name, value in part.items()}
