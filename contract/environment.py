"""Settings that are read from environment variables: each is declared once, with type, bounds and description.

    python -m contract.environment docs/environment.md     rewrites the tables of that file from the declarations

Triton's stubs import ``contract`` too; this module is for processes that can afford pydantic, and no other module of
``contract`` imports it.
"""

from __future__ import annotations

import pkgutil
import re
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from contract.errors import InvalidArgument

S = TypeVar("S", bound="EnvironmentSettings")
ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"(<!-- settings: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError as exc:  # ~NAME of no user
        raise ValueError(f"must be a path, got {str(path)!r}: {exc}") from None


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


@dataclass(frozen=True)
class Allowed:
    """Metadata of an annotated field: what its values must be, where type and bounds do not say it."""

    text: str


class EnvironmentSettings(BaseModel):
    """A valid, frozen configuration. A subclass sets ``model_config = environment_config(PREFIX)`` and its fields.

    Construction reads no environment; :meth:`from_environment` does.
    Raises InvalidArgument: a value is not allowed; ``field`` is the environment variable.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _invalid_argument(type(self), error) from error

    @classmethod
    def from_environment(cls: type[S], environ: Mapping[str, str], **overrides: Any) -> S:
        """Read the settings. environ: empty variables count as unset. overrides: by field; None for none."""
        given = {name: value for name in cls.model_fields if (value := environ.get(cls.variable(name)))}
        return cls(**given | {name: value for name, value in overrides.items() if value is not None})

    @classmethod
    def variable(cls, name: str) -> str:
        """Return the environment variable of the field ``name``: ``grpc_port`` → ``TRIDENT_GRPC_PORT``."""
        return str(cls.model_fields[name].alias)


def environment_config(prefix: str) -> ConfigDict:
    """Return the configuration of a settings class; a trailing underscore of a field is not part of its variable."""

    def variable(name: str) -> str:
        return f"{prefix}{name.rstrip('_').upper()}"

    return ConfigDict(alias_generator=variable, populate_by_name=True, extra="forbid", frozen=True)


def allowed(field: FieldInfo) -> str:
    """Describe the values that ``field`` takes: ``an integer from 1 to 65535``."""
    for item in field.metadata:
        if isinstance(item, Allowed):
            return item.text
    kind, bounds = _plain_type(field.annotation), ""
    low, high = _bound(field, "ge"), _bound(field, "le")
    if low is not None and high is not None:
        bounds = f" from {_number(low)} to {_number(high)}"
    elif low is not None:
        bounds = f" of at least {_number(low)}"
    if get_origin(kind) is Literal:
        return " or ".join(filter(None, [", ".join(get_args(kind)[:-1]), get_args(kind)[-1]]))
    return KINDS.get(kind, "text") + bounds


def table(settings: type[EnvironmentSettings] | Mapping[str, tuple[int, int, str]]) -> str:
    """Return a Markdown table of variables: default, allowed values and description."""
    rows = "| variable | default | allowed | description |\n|---|---|---|---|\n"
    if isinstance(settings, Mapping):  # of contract/backend_settings.py
        for name, (default, least, text) in settings.items():
            rows += f"| `{name}` | `{default}` | a whole number from {least} | {text} |\n"
        return rows
    for name, field in settings.model_fields.items():
        cells = f"`{settings.variable(name)}`", _default(field), allowed(field), field.description or ""
        rows += f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
    return rows


def render(text: str) -> str:
    """Return ``text`` with the table of each ``<!-- settings: MODULE:NAME -->`` section made anew."""
    return SECTION.sub(lambda found: found[1] + table(pkgutil.resolve_name(found[2])) + found[3], text)


def _invalid_argument(settings: type[EnvironmentSettings], error: ValidationError) -> InvalidArgument:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    field = next((field for own, field in settings.model_fields.items() if name in (own, field.alias)), None)
    if field is None:
        return InvalidArgument(name, "is not a setting")
    variable = field.alias or name
    if first["type"] == "value_error":  # a validator's own words
        return InvalidArgument(variable, str(first["ctx"]["error"]))
    got = repr(first["input"]) if field.repr else "another value"
    return InvalidArgument(variable, f"must be {allowed(field)}, got {got}")


def _plain_type(annotation: Any) -> Any:
    """The type without ``None`` and ``Annotated``."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _bound(field: FieldInfo, name: str) -> float | None:
    return next((getattr(item, name) for item in field.metadata if getattr(item, name, None) is not None), None)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None or field.default in (None, ""):
        return ""
    if isinstance(field.default, Path) and field.default.is_relative_to(ROOT):
        return f"`{field.default.relative_to(ROOT)}`"
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{_number(field.default) if isinstance(field.default, float) else field.default}`"


def main(path: Path) -> None:
    """Rewrite the tables of the document at ``path``."""
    path.write_text(render(path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    # Not this module itself: run as a script it is not the one whose classes the declarations use.
    pkgutil.resolve_name("contract.environment:main")(Path(sys.argv[1]))
