"""The fields of a request body that say what the output must match: OpenAI's response_format, and vLLM's extensions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field, StrictBool, StrictStr, WithJsonSchema

from contract.errors import InvalidArgument
from contract.generation import Guide
from gateway.api.strict_model import StrictModel, check_levels

# In an engine's errors: the place in a schema, and behind the problem the place of the schema in a structural tag.
_PLACE = re.compile(r"#((?:/[^\s/]*)+)")
PLACE_IN_TAG = re.compile(r" \(in #((?:/[^\s/]*)+)\)$")

_Schema = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]
_Choices = Annotated[
    list[Annotated[StrictStr, Field(min_length=1)]], Field(min_length=1, max_length=1000, fail_fast=True)
]


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_TYPES = {"name": {"type": "string"}, "schema": {"type": "object"}, "strict": {"type": "boolean"}}
_FORMATS = (
    {"type": "null"},
    _object(["type"], type={"enum": ["text", "json_object"]}),
    _object(["type", "json_schema"], type={"const": "json_schema"}, json_schema=_object(["name", "schema"], **_TYPES)),
)
_FORMAT = WithJsonSchema({"anyOf": [*_FORMATS], "default": None})
# At most one of these fields and response_format may be set. The published schema cannot express that briefly, so it
# publishes response_format alone.
_ALONE = WithJsonSchema({"type": "null"})


class JsonSchemaFormat(StrictModel):
    """A named schema. ``strict`` changes nothing: an output always matches the schema."""

    name: StrictStr
    description: StrictStr | None = None
    schema_: Annotated[_Schema | None, Field(alias="schema")] = None
    strict: StrictBool | None = None


class ResponseFormat(StrictModel):
    """The format of the output: free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(StrictModel):
    """vLLM's form; exactly one field is set."""

    json_: Annotated[_Schema | StrictStr | None, Field(alias="json")] = None
    json_object: StrictBool | None = None
    regex: StrictStr | None = None
    choice: _Choices | None = None
    grammar: StrictStr | None = None
    structural_tag: StrictStr | None = None


class GuidedBody(StrictModel):
    """The fields of a body that say what the output must match; at most one is set."""

    response_format: Annotated[ResponseFormat | None, _FORMAT] = None
    guided_json: Annotated[_Schema | StrictStr | None, _ALONE] = None
    guided_regex: Annotated[StrictStr | None, _ALONE] = None
    guided_choice: Annotated[_Choices | None, _ALONE] = None
    guided_grammar: Annotated[StrictStr | None, _ALONE] = None
    structured_outputs: Annotated[StructuredOutputs | None, _ALONE] = None

    def guide(self) -> Guide | None:
        """Return the guide of the output; None for free text. Raises: InvalidArgument."""
        guides = self._guides()
        if len(guides) > 1:
            first, second, *_ = guides
            raise InvalidArgument(second, f"must be left out with {first}: one of them holds the output")
        for field, guide in guides.items():
            if guide.kind != "json" and not guide.text:
                raise InvalidArgument(field, "must have at least one character, got an empty string")
            try:
                return guide.validate()
            except InvalidArgument as exc:
                raise InvalidArgument(field, exc.problem) from exc
        return None

    def guide_error(self, error: InvalidArgument) -> InvalidArgument:
        """Return an engine's error about the guide with the field of the body and the place in the schema."""
        field, problem = next(iter(self._guides()), "response_format"), error.problem
        if field == "structured_outputs.structural_tag":
            return InvalidArgument(field + _dotted(PLACE_IN_TAG.search(problem)), problem)
        # A structural tag around another guide is the gateway's own.
        return schema_error(field, PLACE_IN_TAG.sub("", problem))

    def _guides(self) -> dict[str, Guide]:
        """Return the guides that the body asks for, by field. Raises: InvalidArgument."""
        chosen, outputs = self.response_format or ResponseFormat(type="text"), self.structured_outputs
        outputs = outputs or StructuredOutputs()
        if (chosen.json_schema is not None) != (chosen.type == "json_schema"):
            wrong = "must be sent with" if chosen.type == "json_schema" else "must be left out without"
            raise InvalidArgument("response_format.json_schema", f"{wrong} the type json_schema")
        schema = (chosen.json_schema.schema_ or {}) if chosen.json_schema is not None else None
        given: dict[str, tuple[str, Any]] = {
            "response_format": ("json", "" if chosen.type == "json_object" else None),
            "response_format.json_schema.schema": ("json_schema", schema),
            "structured_outputs.json": ("json_schema", outputs.json_),
            "structured_outputs.json_object": ("json", "" if outputs.json_object else None),
            "structured_outputs.regex": ("regex", outputs.regex),
            "structured_outputs.choice": ("choice", outputs.choice),
            "structured_outputs.grammar": ("ebnf_grammar", outputs.grammar),
            "structured_outputs.structural_tag": ("structural_tag", outputs.structural_tag),
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("ebnf_grammar", self.guided_grammar),
        }
        return {field: _guide(field, kind, value) for field, (kind, value) in given.items() if value is not None}


def schema_error(field: str, problem: str) -> InvalidArgument:
    """Return the error about a field that holds a schema, with the place in it that the problem names."""
    return InvalidArgument(field + _dotted(_PLACE.search(problem)), problem)


def _dotted(place: re.Match[str] | None) -> str:
    return place[1].replace("/", ".") if place else ""


def _guide(field: str, kind: str, value: Any) -> Guide:
    """Return the guide that a field describes. value: a text, or what becomes JSON."""
    parsed = value
    if isinstance(value, str) and kind in ("json_schema", "structural_tag"):
        try:
            parsed = orjson.loads(value)
        except orjson.JSONDecodeError as exc:
            what = "a JSON schema" if kind == "json_schema" else "a structural tag"
            raise InvalidArgument(field, f"must be {what} or its text, got text that is not JSON: {exc}") from exc
    try:
        check_levels(parsed)
    except ValueError as exc:
        raise InvalidArgument(field, str(exc)) from exc
    return Guide(kind, value if isinstance(value, str) else orjson.dumps(value).decode())
