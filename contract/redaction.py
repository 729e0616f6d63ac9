"""Remove personal data and secrets from text by patterns, each in linear time."""

from __future__ import annotations

import re
from collections.abc import Mapping


def _has_card(text: str) -> bool:
    """Return whether the digits, or those at their beginning or end, have the check digit of a payment card."""
    digits = re.sub(r"\D", "", text)
    for part in {digits, digits[:15], digits[:16], digits[-15:], digits[-16:]}:
        doubled = [int(digit) * (1 + place % 2) for place, digit in enumerate(reversed(part))]
        if sum(number // 10 + number % 10 for number in doubled) % 10 == 0:
            return True
    return False


_H = "[0-9A-Fa-f]{1,4}"
_T = "[A-Za-z0-9_-]"
# In this order: what an earlier one has replaced is not seen by a later one.
PATTERNS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "PRIVATE_KEY": r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)",
        "SECRET": r"\b(?:(?:sk|tri|ghp|gho|github_pat|glpat|xox[abp]|pk|rk)[-_][A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16}\b"
        # Behind a hyphen the length is bounded: "eyJ-eyJ-…" is read again from each beginning.
        rf"|(?:(?<!-)eyJ{_T}{{4,}}|eyJ{_T}{{4,200}})\.{_T}{{4,}}\.{_T}+|[Bb]earer [A-Za-z0-9._~+/-]{{16,}}=*)",
        "CREDENTIALS": r"(?<=://)[^\s/:@]{1,128}:[^\s/@]{1,128}(?=@)",
        "EMAIL": r"[\w.%+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}",
        "IBAN": r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b",
        "CARD": r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d.]\d|\d)",
        "PHONE": r"(?<![\w+])\+\d[\d ().-]{6,18}\d\b|(?<![\w.])(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}\b",
        "SSN": r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])",
        "IP": r"\b(?<!\.)(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\w.]*\w)"
        rf"|\b(?:{_H}:){{3,7}}:?{_H}(?![\w:])"
        # With a ::, a digit, and more than a slice of a program has, such as x[1::2].
        rf"|(?<![\w:])(?=[A-Fa-f:]{{0,39}}\d)(?:(?:[0-9A-Fa-f]{{3,4}}|{_H}:{_H})(?::{_H}){{0,5}}::"
        rf"(?:{_H}(?::{_H}){{0,5}})?|::(?:1|{_H}(?::{_H}){{1,6}}))(?:\.\d{{1,3}}){{0,3}}(?![\w:])",
    }.items()
}


def redact(text: str, patterns: Mapping[str, re.Pattern[str]] = PATTERNS) -> str:
    """Return the text with what each pattern finds replaced by the pattern's name in brackets, such as ``[EMAIL]``."""
    for name, pattern in patterns.items():

        def replaced(match: re.Match[str], name: str = name) -> str:
            return match.group() if name == "CARD" and not _has_card(match.group()) else f"[{name}]"

        text = pattern.sub(replaced, text)
    return text


def found(text: str, patterns: Mapping[str, re.Pattern[str]] = PATTERNS) -> list[str]:
    """Return the names of the patterns that still find something in the text."""
    return [name for name in patterns if redact(text, {name: patterns[name]}) != text]
