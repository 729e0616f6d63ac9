"""A target that reads ModelStreamInfer as undecoded bytes, for loads of thousands of streams."""

from __future__ import annotations

import itertools

import grpc
import grpc.aio

from benchmarks.gateway import script
from benchmarks.record import Record
from benchmarks.target import Target
from benchmarks.workload import PlannedRequest
from clients.wire import failures, infer_request
from clients.wire.request import build
from contract.errors import EngineFailed

TIMEOUT_S = 600.0
_ERROR_TAG = 0x0A  # ModelStreamInferResponse.error_message
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


class GrpcTarget(Target):
    """A KServe gRPC server of scripted tokens; the streams share ``connections`` connections."""

    def __init__(self, url: str, connections: int = 4) -> None:
        self._url = url
        self._channels = [grpc.aio.insecure_channel(url, _OPTIONS) for _ in range(connections)]
        calls = [channel.unary_stream(infer_request.GENERATE) for channel in self._channels]
        self._calls = itertools.cycle(calls)

    async def send(self, request: PlannedRequest, record: Record) -> None:
        payload = infer_request.generation(build(request.prompt, max_tokens=request.max_tokens), "ensemble")
        failed = b""
        try:
            async for data in next(self._calls)(payload, timeout=TIMEOUT_S):
                if data[0] == _ERROR_TAG:
                    failed = data
                script.record_tokens(data, record)
        except grpc.aio.AioRpcError as exc:
            raise failures.from_call(exc, self._url) from exc
        if failed:
            raise EngineFailed(f"error in the stream: {failed[:200].decode(errors='replace')}")
        if (tokens := record.tokens) != request.max_tokens:
            raise EngineFailed(f"the stream ended after {tokens} of {request.max_tokens} tokens")
        record.finish_reason = "length"

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
