"""The file that the release gate writes (``python -m evals gate``), and that a release may ask for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contract.errors import InvalidArgument

FORMAT = 1
MOST_BYTES = 4_000_000
PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"


def sealed(table: Mapping[str, Any]) -> str:
    """Return the file's text: the table with its format and its digest."""
    table = {"format": FORMAT, **table}
    return json.dumps({**table, "sha256": _digest(table)}, indent=1) + "\n"


def read(path: Path) -> dict[str, Any]:
    """Return the table that ``sealed`` took. Raises InvalidArgument: the file is none, or was changed since."""
    try:
        with path.open("rb") as file:
            table = json.loads(file.read(MOST_BYTES))
        digest = table.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as exc:
        raise InvalidArgument(str(path), f"must be a file that `python -m evals gate --out` wrote: {exc}") from exc
    if table.get("format") != FORMAT or digest != _digest(table):
        raise InvalidArgument(
            str(path), f"must be unchanged and of format {FORMAT}: its digest does not fit its content"
        )
    return table


def _digest(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
