"""A caller of ModelStreamInfer that reads messages as the bytes they are."""

from __future__ import annotations

import itertools

import grpc
import grpc.aio

from benchmarks.gateway.asked import Asked
from benchmarks.gateway.script import Pace
from clients.wire import infer_request
from clients.wire.request import build

_ERROR_TAG = 0x0A  # ModelStreamInferResponse.error_message
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


class GrpcDoor:
    """``ask`` for a stream; the streams share ``connections`` connections."""

    def __init__(self, url: str, connections: int = 4) -> None:
        self._channels = [grpc.aio.insecure_channel(url, _OPTIONS) for _ in range(connections)]
        calls = [channel.unary_stream(infer_request.GENERATE) for channel in self._channels]
        self._calls = itertools.cycle(calls)

    async def ask(self, pace: Pace, tokens: int) -> Asked:
        asked = Asked()
        wanted = build(pace.prompt(), max_tokens=tokens)
        payload = infer_request.generation(wanted, "ensemble")
        failed = ""
        try:
            async for data in next(self._calls)(payload, timeout=600, wait_for_ready=False):
                if data[0] == _ERROR_TAG:
                    failed = data[:200].decode(errors="replace")
                asked.read(data)
        except grpc.aio.AioRpcError as exc:
            hinted = any(key == "grpc-status-details-bin" for key, _ in exc.trailing_metadata() or ())
            refused = exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            asked.over("refused" if refused else f"{exc.code().name}: {exc.details()[:80]}", hinted)
            return asked
        whole = asked.tokens == tokens
        asked.over(f"in band: {failed}" if failed else "ok" if whole else f"{asked.tokens} tokens of {tokens}")
        return asked

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
