"""Private words stay out of code and docs; the field's terms are used instead (docs/glossary.md)."""

from __future__ import annotations

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("contract", "python_backends", "server", "clients", "gateway", "build", "benchmarks", "examples")
PAGES = sorted((ROOT / "docs").glob("*.md"))
# The removed word, and what is written in its place.
REMOVED = {
    "door": "endpoint, protocol",
    "doors": "endpoints, protocols",
    "keeper": "reaper",
    "mourn": "report an exit",
    "doom": "fail a start",
    "leash": "PR_SET_PDEATHSIG",
    "mailbox": "metadata channel",
    "asked": "request, requested",
    "wanted": "request, requested",
    "asking": "request context",
    "whoever": "the caller, the client",
    "nobody": "no client, no request",
    "somebody": "a client, another request",
    "said": "body, message, text",
    "house": "project",
    "rooms": "packages",
}


@cache
def words(text: str) -> frozenset[str]:
    """Return the words of an identifier or of a sentence, in lower case."""
    return frozenset(
        word.lower() for part in re.findall(r"[A-Za-z]+", text) for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", part)
    )


def test_words_of_identifiers_and_sentences_are_told_apart():
    assert words("open_door HttpDoor the doors") == {"open", "door", "http", "the", "doors"}
    assert "said" not in words("aforesaid_thing")


# Common verbs in a sentence, but as a name they say nothing of what is named.
ONLY_NOT_AS_NAMES = {"asked", "asking", "said", "wanted"}


@pytest.mark.parametrize("package", PACKAGES)
def test_names_comments_and_texts_use_the_fields_terms(package: str):
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        source = path.read_text("utf-8")
        if not words(source) & REMOVED.keys():
            continue
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            removed = REMOVED.keys() if token.type == tokenize.NAME else REMOVED.keys() - ONLY_NOT_AS_NAMES
            if token.type in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING):
                for word in words(token.string) & removed:
                    found.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {word!r}; write {REMOVED[word]}")
    assert not found, "\n" + "\n".join(found)


# Words for the architecture that earlier versions used, also as parts of the names of tests.
_METAPHORS = {"door", "doors", "keeper", "mourn", "doom", "leash", "mailbox", "house", "rooms"}


def test_tests_use_the_fields_terms():
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name not in ("test_vocabulary.py", "test_conversations.py"):  # the latter's input has a class Door
            source = path.read_text("utf-8")
            for number, line in enumerate(source.splitlines() if words(source) & _METAPHORS else [], 1):
                found += [f"{path.relative_to(ROOT)}:{number}: {word}" for word in words(line) & _METAPHORS]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))]
)
def test_pages_use_the_fields_terms(page: str):
    path = ROOT / page if (ROOT / page).exists() else ROOT / "docs" / page
    used = words(path.read_text("utf-8")) & (REMOVED.keys() - ONLY_NOT_AS_NAMES)
    assert not used, f"{path.name}: {sorted(used)}"
