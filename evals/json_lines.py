"""Read JSON Lines: an object in each line, named by file and line in errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contract.errors import InvalidArgument


def read(path: Path) -> str:
    """Return the text of a file. Raises InvalidArgument."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidArgument(str(path), f"must be a readable file in UTF-8: {exc}") from exc


def objects(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each line, ``FILE:NUMBER``, and its object. text: of the file.

    Raises: InvalidArgument for a line that is something else.
    """
    lines = text.removesuffix("\n").split("\n") if text else []  # splitlines would divide texts with U+2028
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise InvalidArgument(place, f"must be a JSON object: {exc}") from exc
        if not isinstance(found, dict):
            raise InvalidArgument(place, f"must be a JSON object, got {type(found).__name__}")
        yield place, found
