"""Read a TOML file into a pydantic model. What is wrong is named: the file, the field and what is allowed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from contract.errors import InvalidArgument

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Model = TypeVar("_Model", bound=BaseModel)
Amount = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Part = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class Table(BaseModel):
    """A table of which every field is known, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def read(path: str | Path) -> dict[str, Any]:
    """Return the table of a file. Raises InvalidArgument."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as exc:
        raise InvalidArgument(str(path), f"must be a file that can be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:  # also of a number too long or of tables nested too deeply
        raise InvalidArgument(str(path), f"must be TOML: {exc}") from exc


def checked(model: type[_Model], table: Mapping[str, Any], path: str, *, shown: bool = True) -> _Model:
    """Return the model of a table. A validator of the model may begin its words with ``FIELD: ``.

    shown: whether errors quote the value; not where it may be a secret.
    Raises InvalidArgument for the first field that is wrong.
    """
    try:
        return model.model_validate(table)
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
    place = [str(part) for part in error["loc"] if part != "[key]"]
    _, should, rest = error["msg"].replace(" after validation", "").partition(" should ")
    problem = f"must {rest}" if should else error["msg"][:1].lower() + error["msg"][1:]
    got = f", got {error['input']!r}" if shown else ""
    if error["type"] == "value_error":  # a validator's own words
        problem, got = str(error["ctx"]["error"]), ""
        name, _, words = problem.partition(": ")
        if words and " " not in name:
            place, problem = [*place, name], words
    elif error["type"] in ("model_type", "dict_type", "mapping_type"):
        problem = "must be a table"
    elif error["type"] in ("tuple_type", "list_type"):
        problem = "must be a list"
    elif error["type"] == "extra_forbidden":
        problem, got = f"is not known: must be one of {', '.join(allowed(model, place[:-1]))}", ""
    elif error["type"] == "missing":
        problem, got = "must be set", ""
    raise InvalidArgument(f"{path}: {'.'.join(place)}", problem + got)


def allowed(model: type[BaseModel], place: Sequence[str]) -> list[str]:
    """Return the names allowed in the table at ``place``."""
    for part in place:  # a key of a mapping, or the place in a list, changes nothing
        if part in model.model_fields:
            model = next(_models(model.model_fields[part].annotation), model)
    return [field.alias or name for name, field in model.model_fields.items()]


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
