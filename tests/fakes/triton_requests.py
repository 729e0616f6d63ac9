"""Requests to a running server as a stranger writes them: tritonclient's own calls, nothing of ours in between."""

from __future__ import annotations

import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc.aio as triton

from contract import tensors

_NUMPY = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64}
_DATATYPES = {tensor.name: tensor.datatype for tensor in tensors.ENGINE_INPUTS + tensors.ENSEMBLE_INPUTS}


@dataclass
class Answer:
    """Everything one request brought back. texts, ids: one entry per response that had any."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    outputs: dict[str, np.ndarray] = field(default_factory=dict)
    responses: int = 0
    finals: int = 0
    error: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)


def tensor(
    name: str, value: object, datatype: str | None = None, shape: tuple[int, ...] | None = None
) -> triton.InferInput:
    """An input of shape [1, n] (or ``shape``) from a value or a list of values."""
    datatype = datatype or _DATATYPES[name]
    values = value if isinstance(value, list) else [value]
    if datatype == "BYTES":
        values = [item.encode() if isinstance(item, str) else item for item in values]
        array = np.array(values, dtype=np.object_)
    else:
        array = np.array(values, dtype=_NUMPY[datatype])
    array = array.reshape(shape or (1, len(values)))
    result = triton.InferInput(name, list(array.shape), datatype)
    result.set_data_from_numpy(array)
    return result


async def responses(
    client: triton.InferenceServerClient,
    inputs: Mapping[str, object] | list[triton.InferInput],
    *,
    model: str = "ensemble",
    request_id: str = "",
    parameters: dict | None = None,
    headers: dict | None = None,
    timeout_us: int | None = None,
) -> AsyncIterator[tuple[object, str]]:
    """(response or None, error text) as they come, ended by the final response."""
    if isinstance(inputs, Mapping):
        inputs = [tensor(name, value) for name, value in inputs.items()]

    async def requests():
        yield {
            "model_name": model,
            "inputs": inputs,
            "request_id": request_id,
            "enable_empty_final_response": True,
            "parameters": parameters,
            "timeout": timeout_us,
        }

    stream = client.stream_infer(requests(), headers=headers)
    try:
        async for result, error in stream:
            if error is not None:
                yield None, str(error)
                return
            yield result, ""
            if result.get_response().parameters["triton_final_response"].bool_param:
                return
    finally:
        stream.cancel()


async def ask(client: triton.InferenceServerClient, inputs: Mapping[str, object] | list, **options) -> Answer:
    """The whole answer to one request."""
    answer = Answer()
    async for result, error in responses(client, inputs, **options):
        if error:
            answer.error = error
            break
        take(answer, result)
    return answer


def take(answer: Answer, result) -> None:
    response = result.get_response()
    answer.responses += 1
    answer.finals += response.parameters["triton_final_response"].bool_param
    for output in response.outputs:
        value = result.as_numpy(output.name)
        answer.outputs[output.name] = value
        if output.name == "text_output":
            answer.texts.append(value.reshape(-1)[0].decode())
        elif output.name == "output_ids":
            answer.ids += value.reshape(-1).tolist()
        elif output.name == "output_log_probs":
            answer.log_probs += value.reshape(-1).tolist()
        elif output.name == "finish_reason":
            answer.finish_reasons.append(value.reshape(-1)[0].decode())


def metrics(url: str) -> dict[str, float]:
    """The metrics page: ``name{labels}`` to value."""
    if "://" not in url:
        url = f"http://{url}/metrics"
    with urllib.request.urlopen(url, timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line and line[0] != "#"}


def metric(page: Mapping[str, float], name: str, **labels: str) -> float:
    """The sum of the family's series that carry these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [v for key, v in page.items() if key.partition("{")[0] == name and all(label in key for label in wanted)]
    if not found:
        raise KeyError(f"{name} {labels} is not on the metrics page")
    return sum(found)
