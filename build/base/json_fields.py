"""Checked reading of JSON files that others wrote: a missing or mistyped field is one sentence that names it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contract.errors import InvalidArgument

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class BadField(ValueError):
    """A file of a model cannot be read, or a field of it holds what it may not; the message names both."""


class CheckpointError(InvalidArgument):
    """A checkpoint folder or GGUF file is incomplete, damaged, or of a kind this build does not support."""

    def __init__(self, problem: str) -> None:
        super().__init__("model", problem)


def shown(value: object) -> str:
    """``value`` as it stands in messages: its repr, shortened, on one line."""
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # Python prints no integer of more than 4300 digits
        return f"a value of type {type(value).__name__} too large to print"


def line_of(error: Exception) -> str:
    """A library's message on one line, shortened."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises BadField; FileNotFoundError is left to the caller."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise BadField(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, RecursionError) as exc:
        raise BadField(f"{path} is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise BadField(f"{path} is not a JSON object, but a {type(value).__name__}")
    return value


@dataclass(frozen=True)
class Fields:
    """One JSON object, which ``where`` names in messages; null counts as absent. Every reader raises BadField."""

    values: Mapping[str, object]
    where: str

    def get(self, key: str) -> object:
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = 2**31 - 1) -> int:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.bad(key, "a positive integer" if low == 1 else f"an integer from {low}")
        if value > high:
            raise self.bad(key, f"an integer up to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0, high: float = 1e300) -> float:
        """Greater than ``above`` and at most ``high``, so always finite."""
        value = default if self.get(key) is None else self.get(key)
        allowed = "a positive number" if above == 0 else f"a number above {above:g}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value:
            raise self.bad(key, allowed)
        if value > high:
            raise self.bad(key, allowed if high == 1e300 else f"{allowed}, at most {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.bad(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = [] if self.get(key) is None else self.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.bad(key, "a list of strings")
        return tuple(value)

    def table(self, key: str) -> Fields:
        """The object under ``key``, empty where it is absent."""
        value = {} if self.get(key) is None else self.get(key)
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return Fields(value, f"{self.where}: {key}")

    def bad(self, key: str, allowed: str) -> BadField:
        return BadField(f"{self.where}: {key} must be {allowed}, got {shown(self.get(key))}")
