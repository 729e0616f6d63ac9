"""One version of a prompt template: a TOML file with messages, typed variables, defaults of parameters and budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import jinja2
import jinja2.meta
from pydantic import BeforeValidator, Field, model_validator

from contract.errors import InvalidArgument, PromptTooLong
from gateway.config.rules import LIST, Rules
from gateway.prompts.json_text import compact, table
from python_backends.tokenizer.chat_template import sandbox

MAX_RENDERED = 1024 * 1024  # characters of a message
_LEVELS = 254  # that orjson writes
# What a text raises that Jinja or Python cannot compile, or that does not suit the values of its variables.
_UNSUITABLE: tuple[type[Exception], ...] = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)
_UNSUITABLE += (AttributeError, RuntimeError, MemoryError, SyntaxError)
Names = Annotated[tuple[str, ...], LIST]
_Bound = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, lt=2**31)]
Part = Literal["system", "examples", "context", "user"]
PARTS: tuple[Part, ...] = ("system", "examples", "context", "user")
_PART_OF: dict[str, Part] = {"system": "system", "user": "user", "assistant": "examples"}
_TYPES: dict[str, tuple[str, Any]] = {
    "string": ("a text", str),
    "integer": ("an integer", int),
    "number": ("a number", (int, float)),
    "boolean": ("true or false", bool),
    "enum": ("", str),
    "list": ("a list", list),
    "json": ("a JSON value", object),
}
_JINJA = sandbox(jinja2.StrictUndefined)
_JINJA.filters |= {"tojson": compact, "table": table}


class Variable(Rules):
    """What a request may put into a template."""

    type: Literal["string", "integer", "number", "boolean", "enum", "list", "json"] = "string"
    values: Names = ()  # of an enum
    items: Literal["string", "integer", "number"] = "string"  # the type of a list's entries
    minimum: _Bound | None = None  # of numbers, also of those in a list
    maximum: _Bound | None = None
    max_length: _Count = 100_000  # characters of a text, of each text of a list, and of a JSON value
    max_items: _Count = 1000  # of a list
    default: Any = None  # in a request without it; None: it must be sent
    example: Any = None  # in ``prompt diff`` and ``prompt check``

    @model_validator(mode="after")
    def _consistent(self) -> Variable:
        if (self.type == "enum") != bool(self.values):
            raise ValueError("values: must be the allowed texts of an enum, and left out of other types")
        for name in ("default", "example"):
            if getattr(self, name) is not None:
                try:
                    self.checked(name, getattr(self, name))
                except InvalidArgument as exc:
                    raise ValueError(f"{exc.field}: {exc.problem}") from None
        return self

    def checked(self, field: str, value: Any, kind: str = "") -> Any:
        """Return the value. field: names it in the error. kind: of an entry of a list. Raises: InvalidArgument."""
        kind = kind or self.type
        named, types = _TYPES[kind]
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            value = int(value)  # as JSON Schema counts 3.0
        known = isinstance(value, types) and (isinstance(value, bool) == (kind == "boolean") or kind == "json")
        if not known or (kind == "enum" and value not in self.values):
            allowed = named or f"one of {', '.join(self.values)}"
            raise InvalidArgument(field, f"must be {allowed}, got {_shown(value)}")
        if kind == "list":
            value = [self.checked(f"{field}.{index}", entry, self.items) for index, entry in enumerate(value)]
        try:
            size = len(compact(value)) if kind == "json" else len(value) if kind in ("string", "list") else 0
        except TypeError:
            problem = f"must have at most {_LEVELS} levels, and integers of at most 64 bits"
            raise InvalidArgument(field, f"{problem}, got {_shown(value)}") from None
        most, unit = (self.max_items, "entries") if kind == "list" else (self.max_length, "characters")
        if size > most:
            raise InvalidArgument(field, f"must have at most {most} {unit}, got {size}")
        if kind in ("integer", "number"):
            for bound, sign, word in ((self.minimum, 1, "least"), (self.maximum, -1, "most")):
                if bound is not None and sign * value < sign * bound:
                    raise InvalidArgument(field, f"must be at {word} {bound:g}, got {value!r:.100}")
        return value

    @property
    def sample(self) -> Any:
        """Any allowed value: the example, else the default, else a short one of the type."""
        number = next((bound for bound in (self.minimum, self.maximum) if bound is not None), 1)
        rounded = math.floor if self.minimum is None else math.ceil
        values: dict[str, Any] = {"integer": rounded(number), "number": number, "boolean": True, "list": [], "json": {}}
        plain = self.values[0] if self.values else values.get(self.type, "…"[: self.max_length])
        return next((value for value in (self.example, self.default) if value is not None), plain)


class Text(Rules):
    """A piece of a message's content that counts to a part of its own."""

    part: Part
    text: str


class TemplateMessage(Rules):
    """A message, or with role ``request`` the place of the request's own messages, which is the end otherwise."""

    role: Literal["system", "user", "assistant", "request"]
    part: Part | None = None  # that it counts to; None: by its role, an assistant's to the examples
    content: str | Annotated[tuple[Text, ...], LIST, Field(min_length=1)] = ""

    @property
    def texts(self) -> list[tuple[Part, str]]:
        """Its pieces of Jinja text, each with its part."""
        if isinstance(self.content, str):
            return [(self.part or _PART_OF[self.role], self.content)] if self.role != "request" else []
        return [(piece.part, piece.text) for piece in self.content]


class Parameters(Rules):
    """Values of a request's fields that it leaves out."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    max_tokens: _Count | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=100)] | None = None


class Budget(Rules):
    """tokens: of a part at most. over: what happens to a request with more."""

    tokens: _Count
    over: Literal["warn", "refuse"] = "warn"


_Budget = Annotated[Budget, BeforeValidator(lambda value: {"tokens": value} if isinstance(value, int) else value)]


class Template(Rules):
    """A file's content. tenants: names of organisations, teams or keys that may use it; empty: all."""

    description: str = ""
    tenants: Names = ()
    variables: Mapping[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")], Variable] = {}
    messages: Annotated[tuple[TemplateMessage, ...], LIST, Field(min_length=1)]
    parameters: Parameters = Parameters()
    budgets: Mapping[Part, _Budget] = {}

    @model_validator(mode="after")
    def _renders(self) -> Template:
        for index, message in enumerate(self.messages):
            for _, source in message.texts:
                try:
                    names = jinja2.meta.find_undeclared_variables(_JINJA.parse(source))
                except (jinja2.TemplateError, RecursionError) as exc:
                    raise ValueError(f"messages.{index}.content: must be a Jinja text, got {exc}") from None
                if unknown := sorted(names - self.variables.keys() - _JINJA.globals.keys()):
                    problem = f"must use only variables of [variables], got {unknown[0]!r}"
                    raise ValueError(f"messages.{index}.content: {problem}")
        if sum(message.role == "request" for message in self.messages) > 1:
            raise ValueError("messages: must have role request at most once")
        try:
            self.render(self.samples)
        except InvalidArgument as exc:
            raise ValueError(f"messages: cannot be rendered with the variables' examples: {exc}") from None
        return self

    def render(self, variables: Mapping[str, Any], path: str = "prompt.variables") -> Rendered:
        """Return the messages. path: names the variables in errors. Raises: InvalidArgument."""
        for name in variables:
            if name not in self.variables:
                allowed = ", ".join(self.variables) or "none"
                raise InvalidArgument(f"{path}.{name:.64}", f"is not known: allowed are {allowed}")
        values = {}
        for name, variable in self.variables.items():
            value = variables.get(name)
            if value is None and not (name in variables and variable.type == "json"):
                value = variable.default
                if value is None:
                    raise InvalidArgument(f"{path}.{name}", "is missing")
            values[name] = variable.checked(f"{path}.{name}", value)
        before: list[dict[str, Any]] = []
        after: list[dict[str, Any]] = []
        parts: list[tuple[Part, str]] = []
        target = before
        for message in self.messages:
            if message.role == "request":
                target = after
                continue
            texts = [(part, _rendered(source, values, path)) for part, source in message.texts]
            target.append({"role": message.role, "content": "".join(text for _, text in texts)})
            parts += texts
        return Rendered(self, tuple(before), tuple(after), tuple(parts))

    @property
    def samples(self) -> dict[str, Any]:
        """An allowed value of every variable."""
        return {name: variable.sample for name, variable in self.variables.items()}


@dataclass(frozen=True)
class Rendered:
    """A template's messages before and after the request's own, and their texts by part. version: NAME@VERSION."""

    template: Template
    before: tuple[dict[str, Any], ...]
    after: tuple[dict[str, Any], ...]
    parts: tuple[tuple[Part, str], ...]
    version: str = ""

    def around(self, messages: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Return the messages with the request's own in their place."""
        return (*self.before, *messages, *self.after)

    def own(self, messages: Sequence[Any]) -> range:
        """Return the indices of the request's own messages among those of ``around``."""
        return range(len(self.before), len(messages) - len(self.after))

    def tokens(self, count: Callable[[Sequence[str]], int], own: Sequence[str] = ()) -> dict[str, int]:
        """Return the tokens of each part. own: the texts of the request's messages, which count to the user's part."""
        texts: dict[str, list[str]] = {part: [] for part in PARTS}
        for part, text in self.parts:
            texts[part].append(text)
        texts["user"] += own
        return {part: count(found) for part, found in texts.items()}


def over_budget(budgets: Mapping[Part, Budget], tokens: Mapping[str, int]) -> str:
    """Return what is over its budget, as "system 57 of 50 tokens"; "" for nothing. Raises: PromptTooLong."""
    over = []
    for part, budget in budgets.items():
        if tokens[part] > budget.tokens:
            if budget.over == "refuse":
                problem = f"must have at most {budget.tokens} tokens in the part {part}, got {tokens[part]}"
                raise PromptTooLong("prompt", problem)
            over.append(f"{part} {tokens[part]} of {budget.tokens} tokens")
    return ", ".join(over)


@lru_cache(maxsize=4096)
def _compiled(source: str) -> jinja2.Template:
    return _JINJA.from_string(source)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.100}"
    except RecursionError:
        return "one of too many levels"


def _rendered(source: str, values: Mapping[str, Any], path: str) -> str:
    try:
        text = _compiled(source).render(values)
    except _UNSUITABLE as exc:
        raise InvalidArgument(path, f"must suit the template, got {str(exc) or type(exc).__name__}") from exc
    if len(text) > MAX_RENDERED:
        raise InvalidArgument(path, f"must make messages of at most {MAX_RENDERED} characters, got {len(text)}")
    return text
