"""The model ``engine`` over gRPC, without tokenizer and detokenizer: ids in, ids out, one request per stream."""

from __future__ import annotations

import struct
import uuid
from collections.abc import AsyncGenerator

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from benchmarks.prompts import Prompts
from benchmarks.target import DeltaStream, DeltaTarget
from benchmarks.workload import PlannedRequest
from clients.wire import failures, infer_request
from clients.wire.connection import CHANNEL_OPTIONS
from contract.generation import FinishReason, TokenDelta, Usage


class EngineTarget(DeltaTarget):
    """The engine of one server. Prompts are encoded in ``open``, outside the engine."""

    def __init__(self, url: str, prompts: Prompts, timeout_s: float = 120.0) -> None:
        self._url, self._prompts, self._timeout_s = url, prompts, timeout_s
        self._channel: grpc.aio.Channel | None = None

    def open(self, request: PlannedRequest) -> DeltaStream:
        ids = self._prompts.ids(request.prompt)
        return self._read(infer(ids, request.max_tokens, request.stream), len(ids))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _read(self, payload: bytes, input_tokens: int) -> AsyncGenerator[TokenDelta, None]:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._url, CHANNEL_OPTIONS)
        call = self._channel.unary_stream(infer_request.GENERATE)(payload, timeout=self._timeout_s)
        output_tokens = 0
        try:
            async for data in call:
                message = service_pb2.ModelStreamInferResponse.FromString(data)
                if message.error_message:
                    raise failures.from_error_message(message.error_message)
                response = message.infer_response
                ids: tuple[int, ...] = ()
                for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
                    if output.name == "output_ids":
                        ids = struct.unpack(f"<{len(raw) // 4}i", raw)
                output_tokens += len(ids)
                if response.parameters["triton_final_response"].bool_param:
                    yield TokenDelta("", ids, (), FinishReason.LENGTH, usage=Usage(input_tokens, output_tokens))
                elif ids:
                    yield TokenDelta("", ids)
        except grpc.aio.AioRpcError as exc:
            raise failures.from_rpc(exc.code(), exc.details() or "", self._url) from exc
        finally:
            call.cancel()


def infer(ids: list[int], max_tokens: int, stream: bool) -> bytes:
    """Serialize a greedy request for exactly ``max_tokens`` tokens."""
    message = service_pb2.ModelInferRequest(model_name="engine", id=uuid.uuid4().hex)
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    tensors = [
        ("input_ids", "INT32", struct.pack(f"<{len(ids)}i", *ids), len(ids)),
        ("input_lengths", "INT32", struct.pack("<i", len(ids)), 1),
        ("request_output_len", "INT32", struct.pack("<i", max_tokens), 1),
        ("end_id", "INT32", struct.pack("<i", -1), 1),
        ("runtime_top_k", "INT32", struct.pack("<i", 1), 1),
        ("streaming", "BOOL", struct.pack("<?", stream), 1),
    ]
    for name, datatype, raw, count in tensors:
        message.inputs.add(name=name, datatype=datatype, shape=[1, count])
        message.raw_input_contents.append(raw)
    return message.SerializeToString()
