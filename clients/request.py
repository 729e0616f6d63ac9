"""A caller's arguments as a valid GenerationRequest."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from clients.connection import new_request_id, sendable
from contract.errors import InvalidArgument
from contract.generation import GenerationRequest, SamplingParams

MAX_REQUEST_ID = 256

_SAMPLING = tuple(SamplingParams.__dataclass_fields__)


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
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise InvalidArgument("stop", f"got {stops!r}; allowed are strings of at least one character")
    if len(request_id) > MAX_REQUEST_ID or not sendable(request_id):
        problem = f"got {request_id!r}; allowed are at most {MAX_REQUEST_ID} printable ASCII characters"
        raise InvalidArgument("request_id", problem)
    chat = None if messages is None else tuple(dict(message) for message in messages)
    if chat is not None and not (chat and all({"role", "content"} <= message.keys() for message in chat)):
        raise InvalidArgument("messages", "allowed is a non-empty list of {'role': …, 'content': …}, oldest first")
    schema = json_schema if json_schema is None or isinstance(json_schema, str) else json.dumps(json_schema)
    return GenerationRequest(
        text_input=prompt,
        messages=chat,
        max_tokens=max_tokens,
        sampling=SamplingParams(**sampling),
        stop=stops,
        stop_token_ids=tuple(stop_token_ids),
        stream=stream,
        echo=echo,
        skip_special_tokens=skip_special_tokens,
        timeout_s=timeout_s,
        request_id=request_id or new_request_id(),
        json_schema=schema,
    ).validate()


def identified(asked: GenerationRequest) -> GenerationRequest:
    """The request with an id; the server keys what it knows of a request by it."""
    return asked if asked.request_id else dataclasses.replace(asked, request_id=new_request_id())
