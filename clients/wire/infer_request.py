"""Encode KServe v2's ModelInferRequest.

The tests hold it to tritonclient's own protobufs. Without them, importing the client costs no protobuf, no numpy
and no tritonclient.
"""

from __future__ import annotations

import itertools
import json
import struct
from functools import lru_cache

from clients.wire.protobuf import chunk, text, varint
from contract import tensors
from contract.errors import InvalidArgument
from contract.generation import GenerationRequest, SamplingParams

GENERATE = "/inference.GRPCInferenceService/ModelStreamInfer"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STRUCT_CODES = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f", "FP64": "d"}

_INPUT_TYPES = {tensor.name: tensor.datatype for tensor in tensors.ENSEMBLE_INPUTS}
_NO_SAMPLING = SamplingParams()
_WHOLE = frozenset({"BOOL", "INT32"})  # equal ones have equal bytes; 0.0 and -0.0 do not


def generation(request: GenerationRequest, model: str, timeout_s: float | None = None, timings: bool = False) -> bytes:
    """ModelInferRequest for the ensemble. What equals the contract's default is not sent, but for the temperature:
    an ensemble without a temperature is greedy (docs/decisions/0006), which is not what a temperature of 1 means.

    The token counts are always requested; ``timings`` requests the engine's instants too. ``timeout_s`` is the
    time until the deadline, sent as the parameter ``timeout`` in microseconds.
    """
    sampling = request.sampling
    inputs: list[tuple[str, list]] = [("max_tokens", [request.max_tokens]), ("stream", [request.stream])]
    if request.text_input is not None:
        inputs.append(("text_input", [request.text_input]))
    if request.messages is not None:
        inputs.append(("messages", [json.dumps(list(request.messages), ensure_ascii=False)]))
    for name, tensor, default in _OPTIONAL:
        value = getattr(request, name)
        if value != default:
            inputs.append((tensor, list(value) if isinstance(value, tuple) else [value]))
    if request.echo:
        inputs.append(("exclude_input_in_output", [False]))
    if request.guide is not None:
        inputs.append(("guided_decoding_guide_type", [request.guide.kind]))
        if request.guide.text:
            inputs.append(("guided_decoding_guide", [request.guide.text]))
    inputs.append(("temperature", [sampling.temperature]))
    if sampling != _NO_SAMPLING:
        for name, tensor in _SAMPLING_TENSORS:
            value = getattr(sampling, name)
            if value != getattr(_NO_SAMPLING, name):
                inputs.append((tensor, [value]))
    inputs += [("return_num_input_tokens", [True]), ("return_num_output_tokens", [True])]
    if timings:
        inputs.append(("return_perf_metrics", [True]))
    parameters: dict[str, bool | int | str] = {"triton_enable_empty_final_response": True}
    if timeout_s is not None:
        parameters["timeout"] = max(1, int(timeout_s * 1e6))
    typed = [(name, _INPUT_TYPES[name], values) for name, values in inputs]
    return infer_request(model, request.request_id, typed, parameters)


# Fields that are sent unless they have their default: name, tensor, default.
_OPTIONAL = tuple(
    (name, {"adapter": "lora_name", "stop": "stop_words"}.get(name, name), getattr(GenerationRequest, name))
    for name in ("tools", "chat_template_kwargs", "input_ids", "truncate_prompt_tokens", "adapter")
    + ("continue_ids", "stop", "stop_token_ids", "bad_words", "skip_special_tokens")
)
_RENAMED = {
    "log_probs": "return_log_probs",
    "top_log_probs": "num_top_log_probs",
    "prompt_log_probs": "return_prompt_log_probs",
}
_SAMPLING_TENSORS = tuple(
    (name, _RENAMED.get(name, name)) for name in SamplingParams.__dataclass_fields__ if name != "temperature"
)


def stop(request_id: str, model: str = "engine") -> bytes:
    """ModelInferRequest that ends the running request of that id in the engine (TensorRT-LLM's convention)."""
    zeros = [(name, "INT32", [0]) for name in ("input_ids", "input_lengths", "request_output_len")]
    inputs: list[tuple[str, str, list]] = [*zeros, ("stop", "BOOL", [True])]
    return infer_request(model, request_id, inputs, {"triton_enable_empty_final_response": True})


def infer_request(
    model: str,
    request_id: str,
    inputs: list[tuple[str, str, list]],
    parameters: dict[str, bool | int | str],
    rows: int = 1,
) -> bytes:
    """ModelInferRequest of tensors ``(name, datatype, values)``, each of shape [rows, len(values) / rows].

    Raises InvalidArgument for text that is none.
    """
    head = [text(1, model), text(3, request_id)]
    for key, value in parameters.items():
        head.append(_named_parameter(key, value))
    raw = []
    for name, datatype, values in inputs:
        head.append(_described(name, datatype, rows, len(values) // rows))
        if datatype == "BYTES":
            names = [name] if rows == 1 else [f"{name}[{row}]" for row in range(rows)]
            raw.append(chunk(7, b"".join(map(_text_element, itertools.cycle(names), values))))
        elif len(values) == 1 and datatype in _WHOLE:
            raw.append(_number(datatype, values[0]))
        else:
            raw.append(chunk(7, _raw(datatype, values)))
    return b"".join(head + raw)


@lru_cache(maxsize=256)
def _described(name: str, datatype: str, rows: int, columns: int) -> bytes:
    """An InferInputTensor of that shape, the same from one request to the next."""
    return chunk(5, text(1, name) + text(2, datatype) + chunk(3, varint(rows) + varint(columns)))


@lru_cache(maxsize=1024)
def _number(datatype: str, value: int) -> bytes:
    """The raw content of one number: most inputs of most requests are the same few."""
    return chunk(7, _raw(datatype, [value]))


def with_parameter(payload: bytes, name: str, value: bool | int | float | str) -> bytes:
    """A serialised ModelInferRequest with one more parameter; an earlier one of the same name counts no longer."""
    return payload + _named_parameter(name, value)


def _named_parameter(name: str, value: bool | int | float | str) -> bytes:
    return chunk(4, text(1, name) + chunk(2, _parameter(value)))


def _parameter(value: bool | int | float | str) -> bytes:
    if isinstance(value, bool):
        return b"\x08" + bytes([value])
    if isinstance(value, int):
        return b"\x10" + varint(value)
    if isinstance(value, float):
        return b"\x21" + struct.pack("<d", value)
    return chunk(3, value.encode())


def utf8(field: str, value: str) -> bytes:
    """Raises InvalidArgument for ``field``: the value is no text."""
    try:
        return value.encode()
    except UnicodeEncodeError as exc:
        problem = f"must be encodable as UTF-8, got a lone surrogate at index {exc.start}"
        raise InvalidArgument(field, problem) from exc


def _text_element(field: str, value: str) -> bytes:
    data = utf8(field, value)
    return struct.pack("<I", len(data)) + data


def _raw(datatype: str, values: list) -> bytes:
    if datatype == "FP32":
        values = [_fp32(value) for value in values]
    return struct.pack(f"<{len(values)}{STRUCT_CODES[datatype]}", *values)


def _fp32(value: float) -> float:
    """Return the nearest FP32 value; the next one where that is an integer and the value is none.

    A top_p of 1e-46 would become 0, which means that it is not set, and a min_p of 0.9999999999 become 1.
    """
    data = struct.pack("<f", value)
    nearest: float = struct.unpack("<f", data)[0]
    if nearest == value or not nearest.is_integer():
        return nearest
    larger = abs(value) > abs(nearest)
    bits = int.from_bytes(data, "little") + (1 if larger else -1)
    return struct.unpack("<f", bits.to_bytes(4, "little"))[0]
