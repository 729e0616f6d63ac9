"""Triton's Python API as the backends use it: the only importer of ``triton_python_backend_utils``.

Shapes here carry Triton's batch dimension, which is always 1: a scalar is ``[1, 1]``, a vector ``[1, n]``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import triton_python_backend_utils as pb_utils

from contract import errors
from contract.errors import InvalidArgument, TridentError

# The stub fills pb_utils with the server's types only after it has imported the model, so nothing here may touch
# them at import. The flag's value is TRITONSERVER_RESPONSE_COMPLETE_FINAL of Triton's C API.
FINAL = 1

# Triton has no RESOURCE_EXHAUSTED and no DEADLINE_EXCEEDED; the nearest code goes on the wire and the text
# carries our own name (contract.errors.to_text), which clients translate back.
_TRITON_CODE = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "CANCELLED": "CANCELLED",
    "RESOURCE_EXHAUSTED": "UNAVAILABLE",
    "UNAVAILABLE": "UNAVAILABLE",
    "DEADLINE_EXCEEDED": "UNAVAILABLE",
}


class Inputs:
    """The input tensors of one request, by name, as Python values. Absent ones give the default."""

    def __init__(self, request) -> None:
        self._request = request

    def array(self, name: str) -> np.ndarray | None:
        """The tensor as it came, batch dimension included, or None."""
        tensor = pb_utils.get_input_tensor_by_name(self._request, name)
        return None if tensor is None else tensor.as_numpy()

    def scalar(self, name: str, default=None):
        """The tensor's only value as int, float, bool or bytes; InvalidArgument if it holds none or several."""
        array = self.array(name)
        if array is None:
            return default
        if array.size != 1:
            raise InvalidArgument(name, f"holds {array.size} values; allowed is exactly one")
        return array.reshape(()).item()

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self.scalar(name)
        return default if value is None else decode_text(name, value)

    def texts(self, name: str) -> list[str]:
        array = self.array(name)
        return [] if array is None else [decode_text(name, value) for value in array.reshape(-1)]

    def integers(self, name: str) -> list[int]:
        array = self.array(name)
        return [] if array is None else array.reshape(-1).tolist()

    floats = integers


def decode_text(name: str, value: bytes | str) -> str:
    """UTF-8 without NUL, or InvalidArgument that says where it is not."""
    if isinstance(value, str):
        value = value.encode()
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidArgument(name, f"is not valid UTF-8 at byte {exc.start}; send UTF-8 text") from exc
    if "\0" in text:
        raise InvalidArgument(name, f"holds a NUL character at position {text.index(chr(0))}; remove it")
    return text


def parameters(request) -> dict:
    """The request's custom parameters and forwarded headers."""
    text = request.parameters()
    return json.loads(text) if text else {}


def texts(*values: str) -> np.ndarray:
    """BYTES[1, n] from strings."""
    return np.array([[value.encode() for value in values]], dtype=np.object_)


def response(outputs: dict[str, np.ndarray]):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def error_response(error: TridentError):
    code = getattr(pb_utils.TritonError, _TRITON_CODE.get(error.grpc_status, "INTERNAL"))
    return pb_utils.InferenceResponse([], pb_utils.TritonError(errors.to_text(error), code))


def stop_request(model: str, request_id: str) -> None:
    """Sends TensorRT-LLM's stop for a live request to ``model`` and waits for its answer; call it in a thread."""
    inputs = {
        "input_ids": row([0]),
        "input_lengths": row([1]),
        "request_output_len": row([1]),
        "stop": row([True], np.bool_),
    }
    request = pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        requested_output_names=["output_ids", "sequence_length"],
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
    )
    for _ in request.exec(decoupled=True):
        pass


def metric_family(name: str, description: str, kind: str):
    """A family on the server's metrics page; ``kind`` is counter, gauge or histogram. The same family may be
    made by several models: Triton merges them by name."""
    kinds = {
        "counter": pb_utils.MetricFamily.COUNTER,
        "gauge": pb_utils.MetricFamily.GAUGE,
        "histogram": pb_utils.MetricFamily.HISTOGRAM,
    }
    return pb_utils.MetricFamily(name=name, description=description, kind=kinds[kind])


def log_error(message: str) -> None:
    pb_utils.Logger.log_error(message)


def log_info(message: str) -> None:
    pb_utils.Logger.log_info(message)


def row(values: Sequence[int], dtype=np.int32) -> np.ndarray:
    """[1, n] of ``dtype``."""
    return np.asarray(values, dtype=dtype)[None]
