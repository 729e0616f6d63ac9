"""Triton's Python API as the backends use it: the only importer of ``triton_python_backend_utils``.

Shapes have Triton's batch dimension, which is always 1: a scalar is ``[1, 1]``, a vector ``[1, n]``.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import DTypeLike

from contract import errors
from contract.errors import EngineFailed, InvalidArgument, TridentError
from python_backends.adapters import BF16

# The stub fills pb_utils with the server's types only after it has imported the model, so nothing here may touch
# them at import. The flag's value is TRITONSERVER_RESPONSE_COMPLETE_FINAL of Triton's C API.
FINAL = 1
_USED, _UNUSED = b"used_dltensor", b"dltensor"  # kept, as capsules point at their names
_OBJECT, _NAME, _POINTER = ctypes.py_object, ctypes.c_char_p, ctypes.c_void_p
_pointer = ctypes.PYFUNCTYPE(_POINTER, _OBJECT, _NAME)(("PyCapsule_GetPointer", ctypes.pythonapi))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, _OBJECT, _NAME)(("PyCapsule_SetName", ctypes.pythonapi))
_new = ctypes.PYFUNCTYPE(_OBJECT, _POINTER, _NAME, _POINTER)(("PyCapsule_New", ctypes.pythonapi))

# Triton has no RESOURCE_EXHAUSTED and no DEADLINE_EXCEEDED: the nearest code is sent, and the message names our error
# (contract.errors.to_text), which the clients read.
_TRITON_CODE = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "NOT_FOUND": "NOT_FOUND",
    "CANCELLED": "CANCELLED",
    "RESOURCE_EXHAUSTED": "UNAVAILABLE",
    "UNAVAILABLE": "UNAVAILABLE",
    "DEADLINE_EXCEEDED": "UNAVAILABLE",
}


class ResponseSender(Protocol):
    """pb_utils.InferenceResponseSender."""

    def send(self, response: Any = None, flags: int = 0) -> None: ...


class Request(Protocol):
    """pb_utils.InferenceRequest."""

    def inputs(self) -> list[Any]: ...
    def request_id(self) -> str: ...
    def requested_output_names(self) -> list[str]: ...
    def parameters(self) -> str: ...
    def timeout(self) -> int: ...
    def is_cancelled(self) -> bool: ...
    def get_response_sender(self) -> ResponseSender: ...


class Inputs:
    """The input tensors of one request, by name, as Python values. An absent tensor gives the default."""

    def __init__(self, request: Request) -> None:
        # Triton's own look-up by name walks all tensors of the request every time.
        self._tensors = {tensor.name(): tensor for tensor in request.inputs()}

    def array(self, name: str) -> np.ndarray | None:
        """Return the tensor with its batch dimension, or None."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.as_numpy()

    def required(self, name: str) -> np.ndarray:
        """Return the tensor with its batch dimension. Raises InvalidArgument: it is absent."""
        array = self.array(name)
        if array is None:
            raise InvalidArgument(name, "must be sent, got no such tensor")
        return array

    def scalar(self, name: str, default: Any = None) -> Any:
        """Return the tensor's value as int, float, bool or bytes. Raises InvalidArgument: it holds no value or
        several."""
        array = self.array(name)
        if array is None:
            return default
        if array.size != 1:
            raise InvalidArgument(name, f"must hold exactly one value, got {array.size}")
        return array.reshape(()).item()

    def text(self, name: str) -> str | None:
        """Return a BYTES tensor's value as text; see decode_text for the errors."""
        value = self.scalar(name)
        return None if value is None else decode_text(name, value)

    def texts(self, name: str) -> list[str]:
        """Return a BYTES tensor's values as text; see decode_text for the errors, which name the row of several."""
        values = self.values(name)
        return [decode_text(f"{name}[{row}]" if len(values) > 1 else name, value) for row, value in enumerate(values)]

    def values(self, name: str) -> list[Any]:
        """Return a tensor's integers or floats in order, [] if it is absent."""
        array = self.array(name)
        return [] if array is None else array.reshape(-1).tolist()


def decode_text(name: str, value: bytes | str) -> str:
    """Decode UTF-8. Raises InvalidArgument: the bytes are not UTF-8, or hold a NUL character."""
    if isinstance(value, str):
        value = value.encode()
    try:
        text = value.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise InvalidArgument(name, f"must be UTF-8, got an invalid sequence at byte {exc.start}") from exc
    if "\0" in text:
        raise InvalidArgument(name, f"must hold no NUL character, got one at position {text.index(chr(0))}")
    return text


def parameters(request: Request) -> dict[str, Any]:
    """Return the request's custom parameters and forwarded headers."""
    text = request.parameters()
    return json.loads(text) if text else {}


def texts(*values: str) -> np.ndarray:
    """Return BYTES[1, n]."""
    return np.array([[value.encode() for value in values]], dtype=np.object_)


def response(outputs: dict[str, np.ndarray]) -> Any:
    """Return an InferenceResponse with these tensors."""
    return pb_utils.InferenceResponse([_tensor(name, array) for name, array in outputs.items()])


def _tensor(name: str, array: np.ndarray) -> Any:
    """Return a tensor; of BF16 for an array of two raw bytes, since numpy has no such type."""
    if array.dtype != BF16:
        return pb_utils.Tensor(name, array)
    capsule = array.view(np.int16).__dlpack__()
    managed = _pointer(capsule, _UNUSED)
    # DLTensor: data, 8 bytes; device, 8; ndim, 4; then the code of the type, of which only the name is changed.
    ctypes.c_uint8.from_address(managed + 20).value = 4  # kDLBfloat
    _set_name(capsule, _USED)  # Triton would mark it by a name that numpy does not know, so it gets one of its own
    return pb_utils.Tensor.from_dlpack(name, _new(managed, _UNUSED, None))


def error_response(error: TridentError) -> Any:
    """Return an InferenceResponse with a Triton error whose message is ``errors.to_text``."""
    code = getattr(pb_utils.TritonError, _TRITON_CODE.get(error.grpc_status, "INTERNAL"))
    # It may quote what a client wrote in JSON as \ud800, half a character that Triton's type does not take.
    text = errors.to_text(error).encode(errors="backslashreplace").decode()
    return pb_utils.InferenceResponse([], pb_utils.TritonError(text, code))


def stop_request(model: str, request_id: str) -> None:
    """Send TensorRT-LLM's stop request to ``model`` and wait for the response; do not call it in Triton's thread."""
    inputs = {name: row([1]) for name in ("input_ids", "input_lengths", "request_output_len")}
    inputs["stop"] = row([True], np.bool_)
    request = pb_utils.InferenceRequest(
        model_name=model,
        request_id=request_id,
        requested_output_names=["output_ids", "sequence_length"],
        inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
    )
    for _ in request.exec(decoupled=True):
        pass


def infer(model: str, inputs: dict[str, np.ndarray], output: str) -> None:
    """Make a request to ``model`` of this server and wait for its response; do not call it in Triton's thread. Raises
    EngineFailed: it has an error."""
    tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
    answer = pb_utils.InferenceRequest(model_name=model, requested_output_names=[output], inputs=tensors).exec()
    if answer.has_error():
        raise EngineFailed(f"{model}: {answer.error().message()}")


def metric_family(name: str, description: str, kind: str) -> Any:
    """Return a Triton metric family of the kind counter, gauge or histogram; Triton merges families of one name that
    several models make."""
    kind = getattr(pb_utils.MetricFamily, kind.upper())
    return pb_utils.MetricFamily(name=name, description=description, kind=kind)


def log_error(message: str) -> None:
    pb_utils.Logger.log_error(message)


def row(values: Sequence[float], dtype: DTypeLike = np.int32) -> np.ndarray:
    """Return an array [1, n] of ``dtype``."""
    return np.asarray(values, dtype=dtype)[None]
