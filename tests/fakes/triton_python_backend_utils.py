"""A stand-in for the module that Triton's Python stub gives to a model, as strict as the real one.

In the stub only the functions of this file's first part exist while the model is imported; the server's types
(``Tensor``, ``InferenceRequest``, …) are put into the module afterwards. ``appear`` does that here, so that code which
touches them at import fails in tests as it would in the server. Messages of errors are the stub's, in short.

What a test needs besides (``incoming``, ``appear``, ``metric_value``, ``served_models``) is in the last part.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np

_DTYPES = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BYTES": np.object_,
}


# ---- what the module holds while the model is imported ------------------------------------------------------------


def get_input_tensor_by_name(inference_request: _InferenceRequest, name: str) -> _Tensor | None:
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: _InferenceResponse, name: str) -> _Tensor | None:
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def numpy_to_triton_type(dtype: np.dtype) -> str:
    for name, numpy_type in _DTYPES.items():
        if dtype == numpy_type:
            return name
    raise TritonModelException(f"numpy dtype {dtype} has no Triton type here")


# ---- what the stub adds after it -----------------------------------------------------------------------------------


class TritonModelException(Exception):
    """What the stub raises; a model that lets it out of ``execute`` has failed the request."""


class _TritonError(Exception):
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if not isinstance(message, str) or code not in range(8):
            raise TypeError(f"TritonError takes a text and one of its codes, not {message!r} and {code!r}")
        try:
            message.encode()
        except UnicodeEncodeError as exc:
            raise TypeError(f"TritonError takes text that UTF-8 can encode, not {message!r}") from exc
        super().__init__(message)
        self._code = code

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self.args[0]


class _Tensor:
    def __init__(self, name: str, numpy_array: np.ndarray) -> None:
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(f"{name}: a tensor is made of a numpy array, not {type(numpy_array).__name__}")
        datatype = numpy_to_triton_type(numpy_array.dtype)
        if datatype == "BYTES" and not all(isinstance(value, (bytes, str)) for value in numpy_array.reshape(-1)):
            raise TritonModelException(f"{name}: a BYTES tensor holds bytes or text only")
        self._name, self._datatype = name, datatype
        self._array = numpy_array.copy()  # the stub copies into shared memory

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array

    def triton_dtype(self) -> str:
        return self._datatype

    def shape(self) -> list[int]:
        return list(self._array.shape)


class _InferenceResponse:
    def __init__(self, output_tensors: list[_Tensor] = (), error: _TritonError | None = None) -> None:
        for tensor in output_tensors:
            if not isinstance(tensor, _Tensor):
                raise TypeError(f"a response holds tensors, not {type(tensor).__name__}")
        names = [tensor.name() for tensor in output_tensors]
        if len(set(names)) != len(names):
            raise TritonModelException(f"a response holds each output once, not {names}")
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[_Tensor]:
        return [] if self._error else self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> _TritonError | None:
        return self._error


class _ResponseSender:
    """``responses``: what was sent, in order; None where only the flag was. ``closed``: the final flag was sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.responses: list[_InferenceResponse | None] = []
        self.final = threading.Event()

    @property
    def closed(self) -> bool:
        return self.final.is_set()

    def send(self, response: _InferenceResponse | None = None, flags: int = 0) -> None:
        if flags not in (0, 1):
            raise TritonModelException("Response flags must be 0 or TRITONSERVER_RESPONSE_COMPLETE_FINAL.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, _InferenceResponse):
            raise TypeError(f"send takes a response, not {type(response).__name__}")
        with self._lock:
            if self.closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            self.responses.append(response)
            if flags:
                self.final.set()


class _InferenceRequest:
    """``answer`` makes a response sender for a request that came from a client; see ``incoming``."""

    def __init__(
        self,
        request_id: str = "",
        requested_output_names: Iterable[str] = (),
        inputs: Iterable[_Tensor] = (),
        model_name: str = "",
        timeout: int = 0,
        parameters: str = "",
    ) -> None:
        self._request_id, self._model_name, self._timeout, self._parameters = (
            request_id,
            model_name,
            timeout,
            parameters,
        )
        self._inputs, self._outputs = list(inputs), list(requested_output_names)
        self._sender: _ResponseSender | None = None
        self.cancelled = False
        self.cancel_checks = 0

    def inputs(self) -> list[_Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def model_name(self) -> str:
        return self._model_name

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def timeout(self) -> int:
        """Microseconds; 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """JSON text, or the empty string."""
        return self._parameters

    def is_cancelled(self) -> bool:
        self.cancel_checks += 1
        return self.cancelled

    def get_response_sender(self) -> _ResponseSender:
        if self._sender is None:
            raise TritonModelException("a request made by the model has no response sender")
        return self._sender

    def exec(self, decoupled: bool = False) -> Iterable[_InferenceResponse] | _InferenceResponse:
        """Runs the request on one of ``served_models``; the only response of one that is not decoupled."""
        if self._model_name not in served_models:
            raise TritonModelException(
                f"Failed for execute the inference request. Model '{self._model_name}' is not ready."
            )
        responses = iter(served_models[self._model_name](self))
        return responses if decoupled else next(responses)


class _Metric:
    def __init__(self, family: _MetricFamily, labels: Mapping[str, str], buckets: list[float] | None) -> None:
        self.kind = family.kind
        if not all(isinstance(text, str) for pair in labels.items() for text in pair):
            raise TypeError(f"labels are texts, not {labels}")
        if (self.kind == _MetricFamily.HISTOGRAM) != bool(buckets):
            raise TritonModelException(f"{family.name}: buckets are for histograms, and every histogram has them")
        if buckets and sorted(set(buckets)) != buckets:
            raise TritonModelException(f"{family.name}: buckets must grow, not {buckets}")
        self.calls: list[float] = []

    def _only(self, action: str, value: float, *kinds: int) -> None:
        if self.kind not in kinds:
            raise TritonModelException(f"{action} is not supported by this kind of metric")
        self.calls.append(float(value))

    def increment(self, value: float) -> None:
        if self.kind == _MetricFamily.COUNTER and value < 0:
            raise TritonModelException("a counter cannot be decremented")
        self._only("increment", value, _MetricFamily.COUNTER, _MetricFamily.GAUGE)

    def set(self, value: float) -> None:
        self._only("set", value, _MetricFamily.GAUGE)

    def observe(self, value: float) -> None:
        self._only("observe", value, _MetricFamily.HISTOGRAM)

    def value(self) -> float:
        """A counter's sum, a gauge's last value, how many values a histogram has seen."""
        if self.kind == _MetricFamily.HISTOGRAM:
            return len(self.calls)
        if self.kind == _MetricFamily.COUNTER:
            return sum(self.calls)
        return self.calls[-1] if self.calls else 0.0


class _MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = range(3)

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name, self.description, self.kind = name, description, kind
        before = families.setdefault(name, self)
        if before.kind != kind:
            raise TritonModelException(f"Metric family '{name}' already exists with a different kind")
        self._metrics = before._metrics if before is not self else {}

    def Metric(self, labels: Mapping[str, str] = (), buckets: list[float] | None = None) -> _Metric:
        key = tuple(sorted(dict(labels).items()))
        return self._metrics.setdefault(key, _Metric(self, dict(labels), buckets))


class _Logger:
    @staticmethod
    def log_error(message: str) -> None:
        log.append(("error", message))

    @staticmethod
    def log_info(message: str) -> None:
        log.append(("info", message))


# ---- for tests -----------------------------------------------------------------------------------------------------

families: dict[str, _MetricFamily] = {}
log: list[tuple[str, str]] = []
served_models: dict[str, Callable[[_InferenceRequest], Iterable[_InferenceResponse]]] = {}

_TYPES = {
    "TritonError": _TritonError,
    "TritonModelException": TritonModelException,
    "Tensor": _Tensor,
    "InferenceRequest": _InferenceRequest,
    "InferenceResponse": _InferenceResponse,
    "InferenceResponseSender": _ResponseSender,
    "MetricFamily": _MetricFamily,
    "Metric": _Metric,
    "Logger": _Logger,
}


def appear() -> None:
    """What the stub does once the model is imported."""
    globals().update(_TYPES)


def forget() -> None:
    """A new server: no metrics, no log, no models."""
    families.clear()
    log.clear()
    served_models.clear()


def incoming(
    inputs: Mapping[str, tuple[str, object]],
    *,
    request_id: str = "",
    outputs: Iterable[str] = (),
    timeout_us: int = 0,
    parameters: Mapping[str, object] | None = None,
) -> _InferenceRequest:
    """A request as a client sends it. ``inputs``: name -> (KServe datatype, values with batch dimension)."""
    request = _InferenceRequest(
        request_id=request_id,
        requested_output_names=outputs,
        inputs=[_Tensor(name, _array(datatype, values)) for name, (datatype, values) in inputs.items()],
        timeout=timeout_us,
        parameters=json.dumps(parameters) if parameters else "",
    )
    request._sender = _ResponseSender()
    return request


def metric_value(name: str, **labels: str) -> float:
    """See _Metric.value; KeyError when no model made that metric."""
    return families[name]._metrics[tuple(sorted(labels.items()))].value()


def _array(datatype: str, values: object) -> np.ndarray:
    if datatype != "BYTES":
        return np.asarray(values, dtype=_DTYPES[datatype])
    encoded = np.asarray(values, dtype=np.object_)
    flat = [value.encode() if isinstance(value, str) else value for value in encoded.reshape(-1)]
    result = np.empty(len(flat), dtype=np.object_)
    result[:] = flat
    return result.reshape(encoded.shape)
