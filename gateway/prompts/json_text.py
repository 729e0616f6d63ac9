"""JSON in prompts with few tokens: without blanks, records as a table, schemas without what says nothing to a model."""

from __future__ import annotations

from typing import Any

import orjson

_SILENT = frozenset(("title", "$schema", "$id", "$comment", "examples"))  # keywords of a schema that allow nothing else
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependentRequired"))
_VALUES = frozenset(("const", "default", "enum", "required"))


def compact(value: Any) -> str:
    """Return a value as JSON without blanks."""
    return orjson.dumps(value).decode()


def table(records: list[dict[str, Any]]) -> str:
    """Return objects with the same keys as lines between tabs: the keys once, then the values of each object."""
    if not records or any(not isinstance(one, dict) or [*one] != [*records[0]] for one in records):
        raise ValueError("a table needs objects with the same keys in the same order")
    rows = [list(records[0]), *(one.values() for one in records)]
    return "\n".join("\t".join(map(_cell, row)) for row in rows)


def plain_schema(schema: Any) -> Any:
    """Return a JSON schema without titles, examples and comments; it allows the same values."""
    if isinstance(schema, list):
        return [plain_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: plain_schema(inner) for name, inner in value.items()}
        elif key not in _SILENT:
            found[key] = value if key in _VALUES else plain_schema(value)
    return found


def plain_tools(tools: str) -> str:
    """Return tools, as JSON, with plain schemas."""
    found = orjson.loads(tools)
    for tool in found:
        if "parameters" in tool["function"]:
            tool["function"]["parameters"] = plain_schema(tool["function"]["parameters"])
    return compact(found)


def _cell(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else compact(value)
