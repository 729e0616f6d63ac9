"""Read what admission and routing need of a request that Envoy forwards: OpenAI's JSON, Triton's JSON, Triton's gRPC.

The endpoint checks the rest: fields that are not named here go through as they are.
"""

from __future__ import annotations

import posixpath
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson
from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import ModelInferRequest

from contract.errors import InvalidArgument
from contract.generation import INT32_MAX, GenerationRequest
from gateway.api import kserve, schemas
from gateway.config.settings import Settings

GRPC, TRITON, OPENAI = "grpc", "triton", "openai"  # a replica may serve each form at a port of its own
FRAME = struct.Struct(">BI")  # in front of a gRPC message: whether it is compressed, its bytes
_GENERATION = re.compile(
    r"/v1/(chat/completions|completions|responses)|/inference\.GRPCInferenceService/ModelStreamInfer"
    r"|/v2/models/(?P<model>.+?)(/versions/[^/]+)?/generate(_stream)?"
)
_OPERATION = re.compile(r"/v1/(chat|responses|embeddings|rerank|score)(/|$)")
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_PROMPTS = ("messages", "prompt", "text_input", "input_ids", "input")


@dataclass(frozen=True)
class PickRequest:
    """requests: one for each choice. shortened: returns the body with another max_tokens, or raises InvalidArgument."""

    model: str
    requests: tuple[GenerationRequest, ...]
    shortened: Callable[[int], bytes]


def form_of(headers: Mapping[str, str]) -> str:
    """Return the form of a request: GRPC, TRITON or OPENAI."""
    if headers.get("content-type", "").startswith("application/grpc"):
        return GRPC
    return TRITON if _path(headers).startswith("/v2") else OPENAI


def operation_of(headers: Mapping[str, str]) -> str:
    """Return the operation of a request, as metrics, classes and limits name it."""
    found = _OPERATION.match(_path(headers))
    return found[1] if found else "text_completion"


def generation(headers: Mapping[str, str]) -> re.Match[str] | None:
    """Return the match of a path whose body is read and admitted; None: an endpoint is picked by load alone."""
    return _GENERATION.fullmatch(_path(headers))


def read(headers: Mapping[str, str], body: bytes, settings: Settings, timeout_s: float) -> PickRequest | None:
    """Return what the body says; None while a stream's first message is not whole. Raises: InvalidArgument."""
    form, path = form_of(headers), generation(headers)
    if form == GRPC:
        return _read_grpc(body, timeout_s)
    fields = schemas.fields_of(body)
    model = (path and path["model"]) or fields.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidArgument("model", f"must be the name of a model, got {model!r:.100}")
    if form == TRITON:
        kserve.check_adapter_number(fields.get("lora_task_id"))
        model = kserve.named(model, fields.get("lora_name") or "")
    sent = [name for name in _PROMPTS if not isinstance(fields.get(name), dict | None) and fields[name] != []]
    name = sent[0] if sent else "prompt"
    given: Any = kserve.chat(str(fields[name])) if (form, name) == (TRITON, "messages") else fields.get(name)
    if not sent and (isinstance(given, dict) or fields.get("previous_response_id")):  # stored at the endpoint
        name, given = "input" if operation_of(headers) == "responses" else "messages", ""
    several = isinstance(given, list) and len(given) > 0 and isinstance(given[0], str | list)
    prompts = [_prompt(name, each) for each in (given if several else [given])]  # choices share them: each counts once
    choices = _integer(fields, "n", 1) * len(prompts)
    if not 1 <= choices <= settings.max_choices:
        raise InvalidArgument("n", f"must make 1 to {settings.max_choices} choices, got {choices}")
    limits = [limit for limit in _LIMITS if fields.get(limit) is not None]
    default = settings.default_max_tokens if form == OPENAI else kserve.DEFAULT_MAX_TOKENS
    most = min((_integer(fields, limit, default) for limit in limits), default=16 if name == "prompt" else default)
    tools = _json("tools", fields["tools"]).decode() if name == "messages" and fields.get("tools") else None
    requests = [
        GenerationRequest(**prompts[place % len(prompts)], tools=tools, max_tokens=max(1, most), timeout_s=timeout_s)
        for place in range(choices)
    ]
    changed = limits or ["max_output_tokens" if name == "input" else "max_tokens"]

    def shortened(tokens: int) -> bytes:
        return _json("body", fields | dict.fromkeys(changed, tokens))

    return PickRequest(model, tuple(requests), shortened)


def _read_grpc(body: bytes, timeout_s: float) -> PickRequest | None:
    compressed, size = FRAME.unpack_from(body) if len(body) >= FRAME.size else (0, len(body))
    end = FRAME.size + size
    if len(body) < end:
        return None
    if compressed:
        raise InvalidArgument("grpc-encoding", "must be identity, got a compressed message")
    try:
        message = ModelInferRequest.FromString(body[FRAME.size : end])
    except DecodeError as exc:
        raise InvalidArgument("", "the message is not a ModelInferRequest") from exc

    def shortened(tokens: int) -> bytes:
        kserve.set_max_tokens(message, tokens)
        data = message.SerializeToString()
        return FRAME.pack(0, len(data)) + data + body[end:]

    sent = kserve.read(message, timeout_s)
    return PickRequest(kserve.named(message.model_name, sent.adapter), (sent,), shortened)


def _path(headers: Mapping[str, str]) -> str:
    """Return the path as an endpoint may read it: decoded, without dot segments and empty ones."""
    return posixpath.normpath("/" + unquote(headers.get(":path", "").partition("?")[0]).lstrip("/"))


def _json(field: str, value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as exc:
        raise InvalidArgument(field, "must have fewer levels of lists and objects: at most 254 can be written") from exc


def _prompt(name: str, value: Any) -> dict[str, Any]:
    """Return the prompt as a field of a GenerationRequest. Raises: InvalidArgument."""
    if isinstance(value, str):
        return {"text_input": value}
    if isinstance(value, list | tuple) and value:
        for kind, field in ((int, "input_ids"), (dict, "messages")):
            if all(type(part) is kind for part in value):
                return {field: tuple(value)}
    raise InvalidArgument(name, "must be a text, token ids or messages")


def _integer(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = default if fields.get(name) is None else fields[name]
    if type(value) is not int or not 0 <= value <= INT32_MAX:
        raise InvalidArgument(name, f"must be an integer from 0 to {INT32_MAX}, got {value!r:.50}")
    return value
