"""Personal data and secrets leave the text; what only looks like them stays."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.redaction import PATTERNS, found, redact

PRIVATE = {
    "EMAIL": ["ann.lee+x@mail.example.org", "jörg@bücher.example.de"],
    "CARD": ["4111 1111 1111 1111", "4111-1111-1111-1111", "378282246310005", "4111 1111 1111 1111 123"],
    "IBAN": ["DE89 3704 0044 0532 0130 00", "GB29NWBK60161331926819"],
    "PHONE": ["+49 (30) 1234-5678", "+14155552671", "(415) 555-2671", "415-555-2671"],
    "SSN": ["078-05-1120"],
    "IP": [
        *("192.168.0.17", "2001:db8:0:0:0:ff00:42:8329", "fe80:0:0:1::8329", "2001:db8::1", "2001:db8::", "::1"),
        *("fe80::1ff:fe23:4567:890a", "64:ff9b::1", "::ffff:192.0.2.1", "::ffff:c000:280", "1:2:3:4:5:6:7::"),
    ],
    "SECRET": ["sk-" + "a1B2" * 8, "tri-" + "x" * 43, "AKIAIOSFODNN7EXAMPLE", "eyJhbGciOi.eyJzdWIiOi.c2lnbmF0dXJl"]
    + ["eyJ" + "x5c-" * 1000 + ".eyJzdWIiOi.c2lnbmF0dXJl"],
    "CREDENTIALS": ["user:hunter2"],
    "PRIVATE_KEY": ["-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----"],
}


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in PRIVATE.items() for value in values])
def test_what_is_private_is_replaced_by_its_kind(kind, value):
    text = f"see https://{value}@host/ there" if kind == "CREDENTIALS" else f"mine is {value}, thanks"
    assert value not in redact(text) and f"[{kind}]" in redact(text)
    assert kind in found(text) and not found(redact(text))


@pytest.mark.parametrize(
    "text",
    ["version 1.2.3.4.5", "4111 1111 1111 1112", "at 12:30:45", "3.14159265358979", "def f(a: int) -> int: ...", "a@b"]
    + ["std::vector<int>", "abc::def", "x[::2] + x[1::2]", "x[:, 1::2]", "a :: b", "f64::MAX", "Cafe::Bar1"],
)
def test_what_only_looks_private_stays(text):
    assert redact(text) == text and not found(text)


@given(st.text(alphabet="ab1@.:-+ 4[]E", max_size=60))
def test_redacting_twice_changes_nothing_more(text):
    assert redact(redact(text)) == redact(text)


def test_own_patterns_and_the_time_of_hostile_text():
    assert redact("see ABC-12", {**PATTERNS, "TICKET": re.compile(r"ABC-\d+")}) == "see [TICKET]"
    began = time.process_time()
    for text in (
        "a" * 20_000,
        "1 " * 10_000,
        "a." * 10_000,
        "-----BEGIN " * 1800,
        "1:" * 10_000,
        "1::" * 10_000,
        "ab:" * 10_000,
        "DE12 " * 4000,
        "eyJ-" * 60_000,
        "eyJ-" * 100 + "." + "a" * 100_000,
    ):
        redact(text)
    assert time.process_time() - began < 5
