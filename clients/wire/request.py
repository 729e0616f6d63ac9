"""A caller's arguments as a valid GenerationRequest."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from clients.wire.connection import new_request_id, sendable
from contract.errors import InvalidArgument
from contract.generation import INT32_MAX, GenerationRequest, SamplingParams

MAX_REQUEST_ID = 256

_SAMPLING = tuple(SamplingParams.__dataclass_fields__)
_SWITCHES = ("ignore_eos", "log_probs")  # of sampling: the fields that are True or False


def build(
    prompt: str | None = None,
    *,
    messages: Iterable[Mapping[str, Any]] | None = None,
    max_tokens: int = 128,
    stop: str | Iterable[str] = (),
    stop_token_ids: Iterable[int] = (),
    timeout_s: float | None = None,
    stream: bool = True,
    echo: bool = False,
    skip_special_tokens: bool = True,
    json_schema: str | Mapping[str, Any] | None = None,
    request_id: str = "",
    **sampling: Any,
) -> GenerationRequest:
    """The request these arguments mean; the other arguments are SamplingParams' fields.

    Raises InvalidArgument that names the argument and what is allowed.
    """
    for name in sampling:
        if name not in _SAMPLING:
            near = difflib.get_close_matches(name, _SAMPLING, 1)
            raise InvalidArgument(
                name,
                f"no such argument{f'; did you mean {near[0]}' if near else ''}; allowed are {', '.join(_SAMPLING)}",
            )
    if not isinstance(prompt, str | None):
        raise InvalidArgument("text_input", f"got {prompt!r}; allowed is text")
    stops = (stop,) if isinstance(stop, str) else _tuple("stop", stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise InvalidArgument("stop", f"got {stops!r}; allowed are strings of at least one character")
    stop_ids = _tuple("stop_token_ids", stop_token_ids)
    if not all(_whole(token) and 0 <= token <= INT32_MAX for token in stop_ids):
        raise InvalidArgument("stop_token_ids", f"got {stop_ids!r}; allowed are integers from 0 to {INT32_MAX}")
    sendable_id(request_id)
    switches = {"stream": stream, "echo": echo, "skip_special_tokens": skip_special_tokens}
    for name, value in (switches | {name: sampling.get(name, False) for name in _SWITCHES}).items():
        if not isinstance(value, bool):
            raise InvalidArgument(name, f"got {value!r}; allowed is True or False")
    return GenerationRequest(
        text_input=prompt,
        messages=None if messages is None else _chat(messages),
        max_tokens=max_tokens,
        sampling=SamplingParams(**sampling),
        stop=stops,
        stop_token_ids=stop_ids,
        stream=stream,
        echo=echo,
        skip_special_tokens=skip_special_tokens,
        timeout_s=timeout_s,
        request_id=request_id or new_request_id(),
        json_schema=_schema(json_schema),
    ).validate()


def can_travel(request_id: str) -> bool:
    """Whether it fits where ids of requests go: logs, headers, gRPC's metadata."""
    return sendable(request_id) and len(request_id) <= MAX_REQUEST_ID


def sendable_id(request_id: str) -> str:
    """The id of a request, as it was given. Raises InvalidArgument for one that cannot travel."""
    if not can_travel(request_id):
        problem = f"got {request_id!r}; allowed are at most {MAX_REQUEST_ID} printable ASCII characters"
        raise InvalidArgument("request_id", problem)
    return request_id


def identified(asked: GenerationRequest) -> GenerationRequest:
    """The request with an id; the server keys what it knows of a request by it."""
    return asked if asked.request_id else dataclasses.replace(asked, request_id=new_request_id())


def _tuple(name: str, values: Iterable[Any]) -> tuple:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise InvalidArgument(name, f"got {values!r}; allowed is a list")
    return tuple(values)


def _whole(number: Any) -> bool:
    """Of NumPy's kinds, too."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _chat(messages: Iterable[Mapping[str, Any]]) -> tuple[dict, ...]:
    chat = _tuple("messages", messages)
    if not chat or not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in chat):
        raise InvalidArgument("messages", "allowed is a non-empty list of {'role': …, 'content': …}, oldest first")
    return tuple(dict(message) for message in chat)


def _schema(json_schema: str | Mapping[str, Any] | None) -> str | None:
    if json_schema is None or isinstance(json_schema, str):
        return json_schema
    try:
        return json.dumps(json_schema)
    except (TypeError, ValueError) as exc:
        raise InvalidArgument("json_schema", f"is no JSON: {exc}; allowed is a schema, or its text") from exc
