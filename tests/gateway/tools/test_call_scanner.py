"""A call is read while it arrives: its name, and its arguments as they were written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.tools.call_scanner import CallScanner

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def read(text: str, splits: list[int]) -> tuple[CallScanner, str, int]:
    """The scanner at the end, the arguments it gave, and how much it read."""
    scanner, arguments, read = CallScanner(), "", 0
    cuts = [0, *sorted(min(split, len(text)) for split in splits), len(text)]
    for begin, end in zip(cuts, cuts[1:], strict=False):
        if not (scanner.done or scanner.failed):
            read += scanner.feed(text[begin:end])
            arguments += scanner.take_arguments()
    return scanner, arguments, read


@given(
    st.text(min_size=1, max_size=8),
    st.dictionaries(st.text(max_size=4), JSON, max_size=4),
    st.dictionaries(st.text(max_size=4), JSON, max_size=3),
    st.sampled_from(["arguments", "parameters"]),
    st.booleans(),
    st.sampled_from([None, 2]),
    st.lists(st.integers(0, 300), max_size=8),
)
def test_every_object_is_read_whatever_stands_in_it(name, arguments, others, key, last, indent, splits) -> None:
    others = {other: value for other, value in others.items() if other not in ("name", "arguments", "parameters")}
    call = {**others, key: arguments, "name": name} if last else {"name": name, key: arguments, **others}
    text = json.dumps(call, indent=indent, ensure_ascii=last)
    scanner, given_arguments, size = read(text + "}rest", splits)
    assert scanner.done and scanner.name == name and size == len(text)
    assert json.loads(given_arguments) == arguments
    assert given_arguments in text  # not written anew


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": 12}', "12"),
        ('{"name": "f", "arguments": "plain"}', "plain"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": {}, "parameters": {"x": 1}}', "{}"),
    ],
)
def test_arguments_that_are_no_object_are_their_value(text: str, arguments: str) -> None:
    assert read(text, [])[:2][1] == arguments


@pytest.mark.parametrize(
    "text", ["x", "[1]", '{"x": 1}', '{"name": 1}', '{"name" 1}', "{x}", '{"name": ""}', "{,}x", "{}"]
)
def test_what_is_no_call_fails(text: str) -> None:
    scanner, arguments, _ = read(text, [])
    assert scanner.failed and not scanner.done and arguments in ("", "{}")
