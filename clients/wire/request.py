"""Build a valid GenerationRequest from a caller's arguments."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from clients.wire.arguments import GenerateArguments
from clients.wire.connection import new_request_id, sendable
from clients.wire.infer_request import utf8
from contract.errors import InvalidArgument
from contract.generation import INT32_MAX, GenerationRequest, Guide, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_REQUEST_ID = 256

_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)
_ARGUMENTS = tuple(GenerateArguments.__annotations__)
_CONTENT = {"content", "tool_calls"}  # a message has at least one of them
# Arguments that are sent as JSON: the classes they may have, and those in words. True and False are schemas.
_JSON: dict[str, tuple[Any, str]] = {
    "json_schema": (Mapping | bool, "a schema"),
    "tools": (Iterable, "a list of tools"),
    "chat_template_kwargs": (Mapping, "a dict"),
}
_SWITCHES = frozenset({"stream", "echo", "skip_special_tokens", "ignore_eos", "log_probs", "prompt_log_probs"})
# Arguments by the names that a valid request's checks have for them.
_NAMES = {"text_input": "prompt", "guided_decoding_guide_type": "guide.kind", "guided_decoding_guide": "guide.text"}


def build(prompt: str | None = None, **given: Unpack[GenerateArguments]) -> GenerationRequest:
    """Build a valid request from the arguments of ``generate``. Raises InvalidArgument that names the wrong one."""
    arguments = {name: _plain(value) for name, value in given.items()}
    for name in arguments:
        if name not in _ARGUMENTS:
            near = difflib.get_close_matches(name, _ARGUMENTS, 1)
            hint = f"; did you mean {near[0]}" if near else ""
            raise InvalidArgument(name, f"no such argument{hint}; allowed are {', '.join(_ARGUMENTS)}")
    if prompt is not None:
        _text("prompt", prompt)
    for name in _SWITCHES & arguments.keys():
        if not isinstance(arguments[name], bool):
            raise InvalidArgument(name, f"must be True or False, got {arguments[name]!r}")
    fields: dict[str, Any] = {name: value for name, value in arguments.items() if name not in _SAMPLING}
    stop = fields.get("stop", ())
    fields["stop"] = _texts("stop", (stop,) if isinstance(stop, str) else stop, "a string or a list of strings")
    fields["bad_words"] = _texts("bad_words", fields.get("bad_words", ()))
    fields["stop_token_ids"] = _ids("stop_token_ids", fields.get("stop_token_ids", ()))
    fields["continue_ids"] = _ids("continue_ids", fields.get("continue_ids", ()))
    if fields.get("input_ids") is not None:
        fields["input_ids"] = _ids("input_ids", fields["input_ids"])
    fields["request_id"] = sendable_id(fields.get("request_id", "")) or new_request_id()
    if fields.get("messages") is not None:
        fields["messages"] = _chat(fields["messages"])
    _text("adapter", fields.get("adapter", ""))
    for name in _JSON:
        fields[name] = _json(name, fields.get(name))
    names = _NAMES if fields["json_schema"] is None else {**_NAMES, "guided_decoding_guide": "json_schema"}
    fields["guide"] = _guide(fields.pop("json_schema"), fields.get("guide"))
    sampling = SamplingParams(**{name: value for name, value in arguments.items() if name in _SAMPLING})
    try:
        return GenerationRequest(text_input=prompt, sampling=sampling, **fields).validate()
    except InvalidArgument as exc:
        raise InvalidArgument(names.get(exc.field, exc.field), exc.problem) from exc


def can_travel(request_id: str) -> bool:
    """Return whether an id can be sent in headers and gRPC metadata, and logged."""
    return sendable(request_id) and len(request_id) <= MAX_REQUEST_ID


def sendable_id(request_id: str) -> str:
    """Return the id. Raises InvalidArgument for one that cannot be sent."""
    if not can_travel(request_id):
        problem = f"must be at most {MAX_REQUEST_ID} printable ASCII characters, got {request_id!r}"
        raise InvalidArgument("request_id", problem)
    return request_id


def with_id(request: GenerationRequest) -> GenerationRequest:
    """Return the request with an id; the server identifies its state by it."""
    return request if request.request_id else dataclasses.replace(request, request_id=new_request_id())


def _plain(value: Any) -> Any:
    """Return a number of another library, such as NumPy, as Python's; any other value as it is."""
    if isinstance(value, int | float | str) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(name, f"must be text, got {value!r:.100}")
    utf8(name, value)
    return value


def _tuple(name: str, values: Iterable[Any], allowed: str = "a list") -> tuple:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise InvalidArgument(name, f"must be {allowed}, got {values!r}")
    return tuple(values)


def _texts(name: str, values: Iterable[Any], allowed: str = "a list") -> tuple[str, ...]:
    texts = _tuple(name, values, allowed)
    if not all(isinstance(text, str) and text for text in texts):
        raise InvalidArgument(name, f"must hold strings of at least one character, got {texts!r}")
    return tuple(_text(name, text) for text in texts)


def _ids(name: str, values: Iterable[Any]) -> tuple[int, ...]:
    ids = _tuple(name, values)
    for token in ids:
        # NumPy's integers are Integral too.
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= int(token) <= INT32_MAX:
            raise InvalidArgument(name, f"must hold integers from 0 to {INT32_MAX}, got {token!r}")
    return tuple(map(int, ids))


def _chat(messages: Iterable[Mapping[str, Any]]) -> tuple[dict, ...]:
    chat = _tuple("messages", messages)
    if not chat or not all(isinstance(one, Mapping) and "role" in one and _CONTENT & one.keys() for one in chat):
        raise InvalidArgument("messages", "allowed is a non-empty list of {'role': …, 'content': …}, oldest first")
    chat = tuple(dict(message) for message in chat)
    _text("messages", _dumped("messages", chat, "a list that JSON can hold", ensure_ascii=False))
    return chat


def _guide(json_schema: str | None, guide: Guide | None) -> Guide | None:
    if not isinstance(guide, Guide | None):
        raise InvalidArgument("guide", f"must be a Guide, got {guide!r}")
    if guide is not None:
        _text("guide.text", guide.text)
    if json_schema is None:
        return guide
    if guide is not None:
        raise InvalidArgument("guide", "must be left out with json_schema")
    return Guide("json_schema", json_schema)


def _json(name: str, value: Any) -> str | None:
    """Return an argument as JSON text; text is taken as it is."""
    if value is None:
        return None
    if isinstance(value, str):
        return _text(name, value)
    kinds, what = _JSON[name]
    allowed = f"{what} that JSON can hold, or its text"
    if not isinstance(value, kinds):
        raise InvalidArgument(name, f"must be {allowed}, got {value!r}")
    return _dumped(name, value if isinstance(value, Mapping | bool) else list(value), allowed)


def _dumped(name: str, value: Any, allowed: str, ensure_ascii: bool = True) -> str:
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except (TypeError, ValueError) as exc:
        raise InvalidArgument(name, f"must be {allowed}, got {value!r:.200}: {exc}") from exc
