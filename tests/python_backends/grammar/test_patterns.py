"""Regular expressions as JSON schema means them, against Python's."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from python_backends.grammar.patterns import BadPattern, search, whole

PATTERNS = [
    *["^[A-Z]{3}-[0-9]{4}$", "a|b", "^a|b$", "^(foo|bar)+$", "[^a-c]x?", r"\d+\.\w*", "^$", "a{2,3}", "(?:a|(b))*-"],
    *["[-a]b", r"^[\w.-]+@[a-z]+\.[a-z]{2,}$", "x{0}", "a*?b", r"[\]a]", r"\x41|\u0062", "(?<name>a)b", "(?P<name>a)b"],
]
TEXTS = st.text("AaBbcx0129.-@_]fo", max_size=9)


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=TEXTS)
def test_search_and_whole_match_what_python_matches(pattern, text):
    python = pattern.replace("(?<", "(?P<")
    assert (text in search(pattern)) == bool(re.search(python, text))
    if "|" not in pattern or "^" not in pattern:
        assert (text in whole(pattern)) == bool(re.fullmatch(python, text))


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(a", r"a \( without its \)"),
        ("a)", r"an unmatched \)"),
        ("[a", r"a \[ without its \]"),
        ("a{2,1}", "with n below m"),
        ("a{x}", "a { that begins no"),
        ("*a", r"a \* that repeats nothing"),
        ("a$b", r"a \$ that is not at an end"),
        ("(?=a)", "look-around"),
        ("(?!a)", "look-around"),
        (r"(a)\1", r"\\1, which no grammar can express"),
        (r"\bfoo", r"\\b, which no grammar"),
        (r"\p{L}", r"\\p, which no grammar"),
        ("a++", "after another quantifier"),
        ("a{2}{3}", "after another quantifier"),
        ("a+?+", "after another quantifier"),
        ("[b-a]", "whose end is below"),
        ("a{999999}", "repetitions"),
        ("(" * 200 + ")" * 200, "groups inside each other"),
        (r"\u12", "without its hexadecimal digits"),
        ("\\", "at the end"),
    ],
)
def test_what_is_no_regular_expression_is_refused_with_its_place(pattern, problem):
    with pytest.raises(BadPattern, match=problem):
        search(pattern)


@given(st.text("ab()[]{}^$|*+?.\\-1,", max_size=12))
def test_any_text_is_read_or_refused(pattern):
    try:
        search(pattern)
    except BadPattern:
        pass
