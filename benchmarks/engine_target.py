"""The model ``engine`` over gRPC, without tokenizer and detokenizer: ids in, ids out, one request per stream."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator

import grpc.aio

from benchmarks.prompts import Prompts
from benchmarks.target import TIMEOUT_S, DeltaStream, DeltaTarget
from benchmarks.workload import PlannedRequest
from clients.wire import failures, infer_request
from clients.wire.connection import CHANNEL_OPTIONS
from clients.wire.infer_response import ResponseDecoder
from clients.wire.response_reader import read_message
from contract.generation import FinishReason, TokenDelta, Usage


class EngineTarget(DeltaTarget):
    """The engine of one server. Prompts are encoded in ``open``, outside the engine."""

    def __init__(self, url: str, prompts: Prompts) -> None:
        self._url, self._prompts = url, prompts
        self._channel: grpc.aio.Channel | None = None

    def open(self, request: PlannedRequest) -> DeltaStream:
        ids = self._prompts.ids(request.prompt)
        return self._read(infer(ids, request.max_tokens, request.stream), len(ids))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    @staticmethod
    def _ids(delta: TokenDelta) -> tuple[int, ...]:
        return delta.token_ids

    async def _read(self, payload: bytes, input_tokens: int) -> AsyncGenerator[TokenDelta, None]:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._url, CHANNEL_OPTIONS)
        call = self._channel.unary_stream(infer_request.GENERATE)(payload, timeout=TIMEOUT_S)
        decode, output_tokens = ResponseDecoder().decode, 0
        try:
            async for data in call:
                delta, final = read_message(decode, data)
                ids = self._ids(delta) if delta else ()
                output_tokens += len(ids)
                if final:
                    yield TokenDelta("", ids, (), FinishReason.LENGTH, usage=Usage(input_tokens, output_tokens))
                elif ids:
                    yield TokenDelta("", ids)
        except grpc.aio.AioRpcError as exc:
            raise failures.from_call(exc, self._url) from exc
        finally:
            call.cancel()


def infer(ids: list[int], max_tokens: int, stream: bool) -> bytes:
    """Serialize a greedy request for exactly ``max_tokens`` tokens."""
    inputs: list[tuple[str, str, list]] = [
        ("input_ids", "INT32", ids),
        ("input_lengths", "INT32", [len(ids)]),
        ("request_output_len", "INT32", [max_tokens]),
        ("end_id", "INT32", [-1]),
        ("runtime_top_k", "INT32", [1]),
        ("streaming", "BOOL", [stream]),
    ]
    parameters: dict[str, bool | int | str] = {"triton_enable_empty_final_response": True}
    return infer_request.infer_request("engine", uuid.uuid4().hex, inputs, parameters)
