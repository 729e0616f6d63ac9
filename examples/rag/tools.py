"""Tools that know facts exactly: what a variable sets, and what a term means."""

import re
from pathlib import Path

from examples.rag.index import Passage, plain

_ROW = re.compile(r"^\| `?([^`|]+?)`? \| (.+) \|$", re.MULTILINE)


class Tables:
    """Rows of the pages of variables and terms, by their first column."""

    def __init__(self, folder: Path) -> None:
        pages = ("environment.md", "glossary.md")
        self._variables, self._terms = (dict(_ROW.findall((folder / page).read_text("utf-8"))) for page in pages)

    async def look_up(self, question: str) -> list[Passage]:
        """Return the rows of the variables that a question names, and of the terms that it contains."""
        names = [name for name in re.findall(r"\bTRIDENT_[A-Z0-9_]+\b", question) if name in self._variables]
        words = f" {' '.join(re.findall(r'[a-z-]+', question.lower()))} "
        terms = [term for term in self._terms if f" {term} " in words or f" {term}s " in words]
        found = [Passage("environment.md", name, plain(self._variables[name])) for name in names]
        return found + [Passage("glossary.md", term, plain(self._terms[term])) for term in terms]
