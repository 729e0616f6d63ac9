"""Write docs/modules.md: every module of the source with the first line of its docstring.

.venv/bin/python docs/module_map.py
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modules.md"
# In the order in which a reader meets them; imports run from later ones to contract (tests/test_layout.py).
PACKAGES = ("contract", "python_backends", "server", "clients", "gateway", "cluster", "build", "benchmarks")
PACKAGES += ("chaos", "simulator", "evals")
_HEADER = """# Modules
Every module and what it does, package by package, from the docstrings. Written by
`.venv/bin/python docs/module_map.py`; a test holds it to the source.
"""


def page() -> str:
    """Return the text of docs/modules.md for the source as it is."""
    parts = [_HEADER]
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            parts.append(_section(folder))
    return "\n".join(parts)


def _section(folder: Path) -> str:
    name = folder.relative_to(ROOT)
    rows = [
        f"| [{path.name}](../{path.relative_to(ROOT)}) | {summary(path)} |"
        for path in sorted(folder.glob("*.py"))
        if path.name != "__init__.py"
    ]
    about = summary(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
    return "\n".join(
        [f"## {name}/", *([about] if about else []), "", "| module | what it does |", "|---|---|", *rows, ""]
    )


@cache
def summary(path: Path) -> str:
    """Return the first paragraph of a module's docstring up to its first full stop, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    first = " ".join(docstring.split("\n\n")[0].split())
    sentence = first.split(". ")[0].rstrip(".:")
    return sentence.replace("|", "\\|").replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
