"""The fields of a request body that say what the output must match: OpenAI's response_format, and vLLM's extensions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, WithJsonSchema

from contract.errors import InvalidArgument
from contract.generation import Guide

_STRICT = ConfigDict(extra="forbid", hide_input_in_errors=True)
_SCHEMA = WithJsonSchema({"type": "object"})
_PLACE = re.compile(r"#((?:/[^\s/]*)+)")

_Schema = Annotated[dict[str, Any], _SCHEMA]
_Choice = Annotated[StrictStr, Field(min_length=1)]
_Choices = Annotated[list[_Choice], Field(min_length=1, max_length=1000, fail_fast=True)]
_NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "schema": {"type": "object"}, "strict": {"type": "boolean"}},
    "required": ["name", "schema"],
    "additionalProperties": False,
}
_FORMATS: list[tuple[str, dict[str, Any]]] = [
    ("text", {}),
    ("json_object", {}),
    ("json_schema", {"json_schema": _NAMED}),
]
_FORMAT = WithJsonSchema(
    {
        "anyOf": [
            {"type": "null"},
            *(
                {
                    "type": "object",
                    "properties": {"type": {"const": kind}, **more},
                    "required": ["type", *more],
                    "additionalProperties": False,
                }
                for kind, more in _FORMATS
            ),
        ],
        "default": None,
    }
)
# Of these fields and response_format one may be set, which a published schema says badly: it leaves them out.
_ALONE = WithJsonSchema({"type": "null"})


class JsonSchemaFormat(BaseModel):
    """A named schema. ``strict`` changes nothing: an output always matches the schema."""

    model_config = _STRICT
    name: StrictStr
    description: StrictStr | None = None
    schema_: Annotated[_Schema | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    """The format of the output: free text, any JSON object, or JSON of a schema."""

    model_config = _STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BaseModel):
    """vLLM's form; exactly one field is set."""

    model_config = _STRICT
    json_: Annotated[_Schema | StrictStr | None, Field(alias="json")] = None
    json_object: StrictBool | None = None
    regex: StrictStr | None = None
    choice: _Choices | None = None
    grammar: StrictStr | None = None
    structural_tag: StrictStr | None = None


class GuidedBody(BaseModel):
    """The fields, at most one of which is set."""

    response_format: Annotated[ResponseFormat | None, _FORMAT] = None
    guided_json: Annotated[_Schema | StrictStr | None, _ALONE] = None
    guided_regex: Annotated[StrictStr | None, _ALONE] = None
    guided_choice: Annotated[_Choices | None, _ALONE] = None
    guided_grammar: Annotated[StrictStr | None, _ALONE] = None
    structured_outputs: Annotated[StructuredOutputs | None, _ALONE] = None

    def guide(self) -> Guide | None:
        """Return what the output must match. Raises: InvalidArgument."""
        guides = self._guides()
        if len(guides) > 1:
            first, second, *_ = guides
            raise InvalidArgument(second, f"must be left out with {first}: one of them holds the output")
        for field, guide in guides.items():
            try:
                return guide.validate()
            except InvalidArgument as exc:
                raise InvalidArgument(field, exc.problem) from exc
        return None

    def guide_error(self, error: InvalidArgument) -> InvalidArgument:
        """Return an engine's error about the guide with the field of the body and the place in the schema."""
        field = next(iter(self._guides()), "response_format")
        place = _PLACE.search(error.problem)
        return InvalidArgument(field + (place[1].replace("/", ".") if place else ""), error.problem)

    def _guides(self) -> dict[str, Guide]:
        found: dict[str, Guide] = {}
        form, more = self.response_format, self.structured_outputs
        if form is not None and (form.json_schema is not None) != (form.type == "json_schema"):
            wrong = "must be sent with" if form.type == "json_schema" else "must be left out without"
            raise InvalidArgument("response_format.json_schema", f"{wrong} the type json_schema")
        if form is not None and form.type == "json_object":
            found["response_format"] = Guide("json")
        elif form is not None and form.json_schema is not None:
            schema = form.json_schema.schema_
            field = "response_format.json_schema.schema"
            found[field] = _schema_guide(field, {} if schema is None else schema)
        if more is not None:
            given = {
                "json": None if more.json_ is None else _schema_guide("structured_outputs.json", more.json_),
                "json_object": Guide("json") if more.json_object else None,
                "regex": None if more.regex is None else Guide("regex", more.regex),
                "choice": None if more.choice is None else _choice_guide(more.choice),
                "grammar": None if more.grammar is None else Guide("ebnf_grammar", more.grammar),
                "structural_tag": None if more.structural_tag is None else Guide("structural_tag", more.structural_tag),
            }
            found |= {f"structured_outputs.{name}": guide for name, guide in given.items() if guide is not None}
        if self.guided_json is not None:
            found["guided_json"] = _schema_guide("guided_json", self.guided_json)
        if self.guided_regex is not None:
            found["guided_regex"] = Guide("regex", self.guided_regex)
        if self.guided_choice is not None:
            found["guided_choice"] = _choice_guide(self.guided_choice)
        if self.guided_grammar is not None:
            found["guided_grammar"] = Guide("ebnf_grammar", self.guided_grammar)
        return found


def _schema_guide(field: str, schema: dict[str, Any] | str) -> Guide:
    try:
        return Guide("json_schema", schema if isinstance(schema, str) else orjson.dumps(schema).decode())
    except orjson.JSONEncodeError as exc:
        raise InvalidArgument(field, "must be a schema of fewer levels") from exc


def _choice_guide(choices: list[str]) -> Guide:
    return Guide("choice", orjson.dumps(choices).decode())
