"""The model ``engine`` over gRPC, without tokenizer and detokenizer: ids in, ids out, one request per stream."""

from __future__ import annotations

import struct
import uuid
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from benchmarks.prompts import Prompts
from benchmarks.workload import PlannedRequest
from clients.wire import failures, infer_request
from clients.wire.connection import CHANNEL_OPTIONS
from contract.generation import FinishReason, TokenDelta, Usage


class EngineDoor:
    """A target of the load generator. Prompts are encoded here, before the clock of their request starts."""

    def __init__(self, url: str, prompts: Prompts, timeout_s: float = 120.0) -> None:
        self._url, self._prompts, self._timeout_s = url, prompts, timeout_s
        self._channel: grpc.aio.Channel | None = None

    def open(self, asked: PlannedRequest, *, ignore_eos: bool, stream: bool) -> AsyncIterator[TokenDelta]:
        ids = self._prompts.ids(asked.prompt)
        return self._read(request(ids, asked.max_tokens, stream), len(ids))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _read(self, payload: bytes, input_tokens: int) -> AsyncIterator[TokenDelta]:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._url, CHANNEL_OPTIONS)
        call = self._channel.unary_stream(infer_request.GENERATE)(payload, timeout=self._timeout_s)
        made = 0
        try:
            async for data in call:
                answer = service_pb2.ModelStreamInferResponse.FromString(data)
                if answer.error_message:
                    raise failures.from_error_message(answer.error_message)
                inner = answer.infer_response
                ids: tuple[int, ...] = ()
                for output, raw in zip(inner.outputs, inner.raw_output_contents, strict=True):
                    if output.name == "output_ids":
                        ids = struct.unpack(f"<{len(raw) // 4}i", raw)
                made += len(ids)
                final = inner.parameters["triton_final_response"].bool_param
                if final:
                    yield TokenDelta("", ids, (), FinishReason.LENGTH, usage=Usage(input_tokens, made))
                elif ids:
                    yield TokenDelta("", ids)
        except grpc.aio.AioRpcError as exc:
            raise failures.from_rpc(exc.code(), exc.details() or "", self._url) from exc
        finally:
            call.cancel()


def request(ids: list[int], max_tokens: int, stream: bool) -> bytes:
    """A greedy request for exactly ``max_tokens`` tokens, serialized."""
    inputs = [
        ("input_ids", "INT32", ids),
        ("input_lengths", "INT32", [len(ids)]),
        ("request_output_len", "INT32", [max_tokens]),
        ("end_id", "INT32", [-1]),
        ("runtime_top_k", "INT32", [1]),
        ("streaming", "BOOL", [stream]),
    ]
    parameters = {"triton_enable_empty_final_response": True}
    return infer_request.infer_request("engine", uuid.uuid4().hex, inputs, parameters)
