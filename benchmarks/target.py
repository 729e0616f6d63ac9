"""What load can be sent to: an ensemble, or the model ``engine`` alone, over gRPC. ``openai_target`` and the byte-level
targets in ``gateway/`` are the others."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

import grpc.aio

from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.workload import PlannedRequest
from clients import NO_RETRY, AsyncClient
from clients.wire import failures, infer_request
from clients.wire.connection import CHANNEL_OPTIONS
from clients.wire.infer_response import ResponseDecoder
from clients.wire.request import build
from clients.wire.response_reader import read_message
from contract.generation import FinishReason, TokenDelta, Usage

if TYPE_CHECKING:
    from typing_extensions import Self

TIMEOUT_S = 120.0  # of a request


class Target(ABC):
    """A server under load. Requests are never retried: a failure is a result."""

    @abstractmethod
    async def send(self, request: PlannedRequest, record: Record) -> None:
        """Send one request and fill ``record`` with what comes back. Raises TridentError."""

    async def close(self) -> None:  # noqa: B027 - not every target holds a connection
        """Close the connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class DeltaStream(Protocol):
    """An answer as it arrives. aclose: cancels the request if it still runs."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def aclose(self) -> None: ...


class DeltaTarget(Target):
    """A target whose answers are streams of TokenDeltas."""

    @abstractmethod
    def open(self, request: PlannedRequest) -> DeltaStream:
        """Return the answer; closing the iterator cancels the request. Raises TridentError."""

    async def send(self, request: PlannedRequest, record: Record) -> None:
        """As ``Target.send``; cancel after ``request.cancel_after_tokens``."""
        tokens, stream = 0, self.open(request)
        async for delta in stream:
            if count := len(delta.token_ids):
                record.messages.append((time.monotonic(), count))
                tokens += count
            if delta.finish_reason is not None:
                record.ended_s = time.monotonic()
                record.finish_reason = delta.finish_reason.value
                record.timings = delta.timings
                if delta.usage is not None:
                    record.input_tokens = delta.usage.input_tokens
                    record.usage_tokens = delta.usage.output_tokens
            elif request.cancel_after_tokens is not None and tokens >= request.cancel_after_tokens:
                record.cancelled = True
                await stream.aclose()
                return


class EnsembleTarget(DeltaTarget):
    """An ensemble over KServe gRPC, by one client of the library. model: "" for the client's choice."""

    def __init__(self, url: str, timings: bool = True, model: str = "") -> None:
        self._url, self._timings, self._model = url, timings, model
        self._client: AsyncClient | None = None  # made in the event loop that uses it

    def open(self, request: PlannedRequest) -> DeltaStream:
        self._client = self._client or AsyncClient(self._url, retry=NO_RETRY, model=self._model)
        options: dict[str, Any] = {name: getattr(request, name) for name in ("max_tokens", "ignore_eos", "stream")}
        built = build(request.prompt, temperature=0.0, timeout_s=TIMEOUT_S, **options)
        return self._client.open(built, timings=self._timings)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()


class EngineTarget(DeltaTarget):
    """The model ``engine``: ids in, ids out, one request per stream. Prompts are encoded in ``open``, outside of it."""

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
    numbers = {"input_ids": ids, "input_lengths": [len(ids)], "request_output_len": [max_tokens]}
    numbers |= {"end_id": [-1], "runtime_top_k": [1]}
    inputs: list[tuple[str, str, list]] = [(name, "INT32", values) for name, values in numbers.items()]
    inputs.append(("streaming", "BOOL", [stream]))
    parameters: dict[str, bool | int | str] = {"triton_enable_empty_final_response": True}
    return infer_request.infer_request("engine", uuid.uuid4().hex, inputs, parameters)
