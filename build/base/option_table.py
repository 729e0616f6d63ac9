"""The command-line options of the TensorRT-LLM 1.2.1 programs, read from ``build/trtllm/*_options.json``.

The tables say which flags exist, what type their value has and which values are allowed; ``build/trtllm/README.md``
says where they come from. The recipe's ``[build]``, ``[quantize]`` and ``[convert]`` tables are checked against them.
"""

import difflib
import json
import math
from dataclasses import dataclass
from functools import lru_cache

from build.base.json_fields import shown
from build.base.layout import OPTION_TABLES

MOST = 2**31 - 1  # the programs pass their numbers on to 32-bit integers


def closest(word: str, allowed: list[str] | tuple[str, ...], count: int) -> list[str]:
    """Up to ``count`` entries of ``allowed`` that look most like ``word``, the best first."""
    return difflib.get_close_matches(word, allowed, n=count, cutoff=0.0)


def nearest(word: str, allowed: list[str] | tuple[str, ...]) -> str:
    """The entry of ``allowed`` that looks most like ``word`` (there is always one)."""
    return closest(word, allowed, 1)[0]


@dataclass(frozen=True)
class Option:
    """One option of a program. ``type`` is str, int, float, enum or flag (a switch that takes no value)."""

    name: str
    flag: str
    type: str
    choices: tuple[str, ...] = ()
    many: bool = False

    def problem(self, value: object) -> str | None:
        """Why the program would reject ``value``, or None if it would not."""
        if self.type == "flag":
            if isinstance(value, bool):
                return None
            return f"must be true or false, because {self.flag} is a switch, got {shown(value)}"
        if isinstance(value, bool):
            hint = f"one of {', '.join(self.choices)}" if self.choices else f"a value of type {self.type}"
            return f"must be {hint}, because {self.flag} takes a value, got {shown(value)}"
        if self.many:
            values = value if isinstance(value, (list, tuple)) else ()
            if not values:
                return f"must be a list with at least one entry, got {shown(value)}"
            return next((p for v in values if (p := self._one(v))), None)
        return self._one(value)

    def _one(self, value: object) -> str | None:
        allowed_types = {"int": (int,), "float": (int, float), "str": (str, int), "enum": (str,)}[self.type]
        if isinstance(value, bool) or not isinstance(value, allowed_types):
            return f"must be a value of type {self.type}, got {shown(value)}"
        if self.type == "int" and isinstance(value, int) and not 0 <= value <= MOST:
            return f"must be an integer from 0 to {MOST}, got {shown(value)}"
        if self.type == "float" and isinstance(value, int | float) and not math.isfinite(value):
            return f"must be a finite number, got {shown(value)}"
        is_line = isinstance(value, str) and bool(value.strip()) and value.isprintable()
        if self.type == "str" and not self.choices and not is_line:
            return f"must be a non-empty string on one line, got {shown(value)}"
        text = str(value).lower() if self.type == "enum" else str(value)
        if self.choices and text not in self.choices:
            near = nearest(text, self.choices)
            return f"must be one of {', '.join(self.choices)}, got {shown(value)}; nearest is {near!r}"
        return None


@dataclass(frozen=True)
class OptionTable:
    """Every option of one program, by the name it has without dashes; an alias leads to the same Option."""

    program: str
    path_in_image: str
    options: dict[str, Option]

    def problem(self, name: str, value: object) -> str | None:
        """Why ``--name value`` would be rejected, or None."""
        option = self.options.get(name)
        if option is None:
            return f"{self.program} has no option --{name}; nearest is {nearest(name, tuple(self.options))!r}"
        return option.problem(value)

    def arguments(self, values: dict[str, object]) -> list[str]:
        """``values`` as command-line arguments, in their order; a false switch is left out."""
        argv: list[str] = []
        for name, value in values.items():
            option = self.options[name]
            if option.type == "flag":
                argv += [option.flag] if value else []
            else:
                listed = value if option.many and isinstance(value, list | tuple) else [value]
                argv += [option.flag, *map(str, listed)]
        return argv


@lru_cache
def read(program: str) -> OptionTable:
    """The table of ``<program>_options.json``."""
    table = json.loads((OPTION_TABLES / f"{program}_options.json").read_text(encoding="utf-8"))
    options: dict[str, Option] = {}
    for row in table["options"]:
        choices = tuple(str(c) for c in row.get("choices", row.get("values", ())) if c is not None)
        if row.get("choices_complete") is False:  # a list known to be partial must not refuse what it lacks
            choices = ()
        kind = "flag" if row.get("action") == "store_true" else row["type"]
        for flag in row["flags"]:
            name = flag.lstrip("-")
            options[name] = Option(name, flag, kind, choices, many=row.get("nargs") == "+")
    return OptionTable(table["program"].rsplit("/", 1)[-1], table["container_path"], options)
