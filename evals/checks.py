"""How answers are scored, from 0 to 1: valid JSON of a schema, calls of tools, rules that a text follows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jsonschema_rs

from contract.errors import InvalidArgument

_REGRET = r"((i'?m )?sorry,? (but )?|unfortunately,? )*"
_AS_AN_AI = r"as an ai\b"
# The words after one "as an ai" hold no other: if they could, each further one would double the tries.
_REFUSAL = re.compile(
    rf"{_REGRET}(({_AS_AN_AI}((?!{_AS_AN_AI}).){{0,60}}?)+{_REGRET})?"
    r"i( can ?not| can't|( am|'m) (unable|not able)| won't| do not have the ability)",
    re.IGNORECASE,
)
# By name: the type of its value, and whether a text follows it.
RULES: Mapping[str, tuple[type, Callable[[str, Any], bool]]] = {
    "words_at_most": (int, lambda text, value: 0 < len(text.split()) <= value),
    "words_at_least": (int, lambda text, value: len(text.split()) >= value),
    "contains": (str, lambda text, value: value.lower() in text.lower()),
    "excludes": (str, lambda text, value: bool(text) and value.lower() not in text.lower()),
    "starts_with": (str, lambda text, value: text.lower().startswith(value.lower())),
    "ends_with": (str, lambda text, value: text.lower().rstrip(' ."').endswith(value.lower().rstrip(' ."'))),
    "lowercase": (bool, lambda text, value: text.islower() == value),
    "uppercase": (bool, lambda text, value: text.isupper() == value),
    "json": (bool, lambda text, value: (_json(text) is not None) == value),
    "bullets": (int, lambda text, value: len(re.findall(r"(?m)^\s*[-*] \S", text)) == value),
    "matches": (str, lambda text, value: re.search(value, text) is not None),
}


def checked(place: str, rule: Any) -> None:
    """Raises InvalidArgument for a rule that cannot be checked."""
    if not isinstance(rule, Mapping):
        raise InvalidArgument(place, f"must be objects with rule and value, got {rule!r}")
    name = rule.get("rule")
    if not isinstance(name, str) or name not in RULES:
        raise InvalidArgument(place, f"must be one of {', '.join(RULES)}, got {name!r}")
    kind, value = RULES[name][0], rule.get("value")
    if type(value) is not kind:
        raise InvalidArgument(f"{place}.{name}", f"must have a value of type {kind.__name__}, got {value!r}")
    if name == "matches":
        try:
            re.compile(rule["value"])
        except (re.error, OverflowError, RecursionError) as exc:
            raise InvalidArgument(f"{place}.{name}", f"must be a regular expression, got {value!r}: {exc}") from exc


def validator(schema: Any) -> jsonschema_rs.Draft202012Validator:
    """Return the validator of a schema, which loads nothing from elsewhere. Raises ValueError for what is no schema."""
    return jsonschema_rs.Draft202012Validator(schema, retriever=_nothing)


def instructions(case: Mapping[str, Any], text: str, calls: Sequence[tuple[str, str]] = ()) -> float:
    """Return the share of the case's rules that the text follows."""
    rules = case["rules"]
    return sum(RULES[rule["rule"]][1](text.strip(), rule["value"]) for rule in rules) / len(rules)


def schema(case: Mapping[str, Any], text: str, calls: Sequence[tuple[str, str]] = ()) -> float:
    """Return 1 for JSON that is valid by the case's schema and has the values of ``expected``, else 0."""
    value = _json(text)
    try:
        if value is None or not validator(case["schema"]).is_valid(value):
            return 0.0
    except ValueError:  # a text with half a surrogate pair
        return 0.0
    return float(_equal(value, case["expected"]) if "expected" in case else True)


def tools(case: Mapping[str, Any], text: str, calls: Sequence[tuple[str, str]] = ()) -> float:
    """Return 1 for exactly the expected call, or none if none is, else 0. calls: name and arguments as JSON."""
    expected = case["expected"]
    if expected is None or len(calls) != 1:
        return float(expected is None and not calls and bool(text.strip()))
    name, arguments = calls[0]
    return float(name == expected["name"] and _equal(_json(arguments), expected["arguments"], exact=True))


def refused(text: str, finish_reason: str = "stop") -> bool:
    """Return whether the model declined: a content filter ended the answer, or it begins as refusals in English do."""
    return finish_reason == "content_filter" or _REFUSAL.match(text.strip().replace("\u2019", "'")) is not None


def _equal(value: Any, expected: Any, exact: bool = False) -> bool:
    """Whether both are equal, texts without case and surrounding blanks and full stops. exact: no further fields."""
    if isinstance(expected, Mapping):
        if not isinstance(value, Mapping) or (exact and value.keys() != expected.keys()):
            return False
        return all(_equal(value.get(key), part, exact) for key, part in expected.items())
    if isinstance(expected, list):
        same = isinstance(value, list) and len(value) == len(expected)
        return same and all(_equal(*pair, exact) for pair in zip(value, expected, strict=True))
    if isinstance(expected, str):
        return isinstance(value, str) and value.strip(" .").lower() == expected.strip(" .").lower()
    return type(value) is type(expected) and value == expected


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _nothing(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is not loaded")
