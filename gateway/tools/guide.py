"""The structural tag that holds an output to its request's tools: a call names one and matches its schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

from contract.errors import InvalidArgument
from contract.generation import MAX_GUIDE_BYTES, Guide
from gateway.tools.chat_format import END_THINK, HERMES, LLAMA3, MISTRAL, NONE, OPEN, THINK, ChatFormat

AUTO, REQUIRED = "auto", "required"
_SEPARATORS = {HERMES: "\n", LLAMA3: "; ", MISTRAL: ", "}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_SCHEMAS = {"json_schema": "json_schema", "regex": "pattern", "ebnf_grammar": "grammar"}

_CALL = re.compile(r'\{"name": "([^"]*)", "')  # in the beginning of a tool's tag

_Format = dict[str, Any]


def tool_guide(
    tools: Sequence[dict[str, Any]], choice: str, parallel: bool, form: ChatFormat, answer: Guide | None = None
) -> Guide:
    """Return the guide of a request with tools. Raises: InvalidArgument (no schema of an object, or too large).

    choice: "auto", "required", or the name of the tool that must be called, once.
    parallel: whether several calls may follow each other.
    answer: what an answer without a call must match; only with "auto", and then there is one call at most.
    """
    family = form.family
    assert family is not None
    calls = [
        _tag(f'{{"name": "{name}", "{family.arguments}": ', {"type": "json_schema", "json_schema": schema}, "}")
        for name, schema in _schemas(tools).items()
        if choice in (AUTO, REQUIRED, name)
    ]
    parallel = parallel and choice in (AUTO, REQUIRED)
    begin, separator = family.begin, _SEPARATORS[form.tools]
    triggers = [begin]
    if form.tools == HERMES:
        sections = [_wrapped(f"{begin}\n", call, f"\n{family.end}") for call in calls]
    elif form.tools == MISTRAL:
        several = _several(calls, separator) if parallel else _one_of(calls)
        sections = [_tag(f"{begin}[", several, "]")]
        parallel = False  # one list has all calls
    else:
        sections = calls
        triggers = ['{"name": "', begin]
    if choice != AUTO:
        found = _several(sections, separator) if parallel else _one_of(sections)
        return _guide(_after_reasoning(found, form))
    if answer is not None:
        return _guide(_after_reasoning(_one_of([*sections, _content(answer)]), form))
    if form.tools == LLAMA3:
        sections = [*sections, *(_wrapped(begin, call, "") for call in calls)]
    return _guide({"type": "triggered_tags", "triggers": triggers, "tags": sections, "stop_after_first": not parallel})


def answer_guide(answer: Guide, form: ChatFormat) -> Guide:
    """Return the guide of an answer that may begin with reasoning."""
    return answer if form.reasoning == NONE else _guide(_after_reasoning(_content(answer), form))


def tool_at(guide: Guide, place: str) -> str:
    """Return the name of the tool at a JSON pointer into the guide of a request; "" for its answer."""
    found, name = orjson.loads(guide.text), ""
    for key in place.split("/")[1:]:
        found = found[int(key)] if isinstance(found, list) else found[key]
        if isinstance(found, dict) and (call := _CALL.search(found.get("begin", ""))):
            name = call[1]
    return name


def _schemas(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the schema of each tool's arguments by its name."""
    found = {}
    for index, function in enumerate(tool["function"] for tool in tools):
        schema = function.get("parameters") or _NO_PARAMETERS
        if schema.get("type", "object") != "object":
            problem = f"must be a schema of type object, got {schema['type']!r:.50}"
            raise InvalidArgument(f"tools.{index}.function.parameters", problem)
        found[function["name"]] = {"type": "object", **schema}
    return found


def _after_reasoning(found: _Format, form: ChatFormat) -> _Format:
    """Return a format that allows a reasoning section before the output."""
    if form.reasoning == NONE:
        return found
    text, blank = {"type": "any_text"}, {"type": "regex", "pattern": "\\n{0,2}"}
    begin = "" if form.reasoning == OPEN else THINK
    reasoned = {"type": "sequence", "elements": [_tag(begin, text, END_THINK), blank, found]}
    return reasoned if form.reasoning == OPEN else _one_of([reasoned, found])


def _tag(begin: str, content: _Format, end: str) -> _Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _wrapped(begin: str, call: _Format, end: str) -> _Format:
    return {**call, "begin": begin + call["begin"], "end": call["end"] + end}


def _several(tags: Sequence[_Format], separator: str) -> _Format:
    return {"type": "tags_with_separator", "tags": list(tags), "separator": separator, "at_least_one": True}


def _one_of(formats: Sequence[_Format]) -> _Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def _content(answer: Guide) -> _Format:
    if answer.kind == "json":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if answer.kind == "choice":
        return _one_of([{"type": "const_string", "value": text} for text in orjson.loads(answer.text)])
    if answer.kind == "structural_tag":
        return _format_of(answer.text)
    value = orjson.loads(answer.text) if answer.kind == "json_schema" else answer.text
    return {"type": answer.kind.removeprefix("ebnf_"), _SCHEMAS[answer.kind]: value}


def _format_of(structural_tag: str) -> _Format:
    try:
        found = orjson.loads(structural_tag)["format"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        found = None
    if not isinstance(found, dict):
        problem = 'must be {"type": "structural_tag", "format": {...}}'
        raise InvalidArgument("structured_outputs.structural_tag", problem)
    return found


def _guide(found: _Format) -> Guide:
    data = orjson.dumps({"type": "structural_tag", "format": found})
    if len(data) > MAX_GUIDE_BYTES:
        raise InvalidArgument("tools", f"must have at most {MAX_GUIDE_BYTES} bytes as a grammar, got {len(data)}")
    return Guide("structural_tag", data.decode())
