"""A replica at the least CPU in Python: the ensemble's responses over real gRPC, serialized in advance.

    python -m benchmarks.gateway.scripted_replica        # prints its port, serves until its input closes

A response is a copy of a real one but for the request's id and the instant it was sent (``script``).
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections.abc import AsyncIterator
from functools import cache

import grpc
import grpc.aio
import uvloop
from tritonclient.grpc import service_pb2

from benchmarks.child_process import serve_until_input_closes
from benchmarks.gateway import script
from clients.wire.protobuf import text, varint
from contract import tensors

_STRUCT = {"INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "BOOL": "?"}
_SERVICE = "inference.GRPCInferenceService"
_READY_RESPONSE = b"\x08\x01"
_HOLE = b"@" * script.STAMP_SIZE


@cache
def tail(token: int, tokens: int) -> tuple[bytes, bytes]:
    """Serialize a response without its id, in two parts: before and after the instant it is sent."""
    answer = service_pb2.ModelInferResponse()
    last = token == tokens - 1
    answer.parameters["triton_final_response"].bool_param = last
    instants = dict.fromkeys(("arrival", "first_scheduled", "first_token", "last_token"), [0])
    values: dict[str, str | list] = {
        **{"text_output": _HOLE.decode(), "output_ids": [token], "cum_log_probs": [0.0], "output_log_probs": []},
        **{"finish_reason": "length" if last else "", "stop_reason": "", "error_message": ""},
        **{"num_input_tokens": [8], "num_output_tokens": [token + 1], "num_cached_tokens": [0]},
        **{f"{name}_time_ns": value for name, value in instants.items()},
    }
    for tensor in tensors.ENSEMBLE_OUTPUTS:
        value = values.get(tensor.name, [])
        count = 1 if isinstance(value, str) else len(value)
        shape = [1, 1, count] if len(tensor.dims) == 2 else [1, count]
        answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        answer.raw_output_contents.append(_raw(tensor.datatype, value))
    before, _, after = answer.SerializeToString().partition(_HOLE)
    return before, after


def _raw(datatype: str, value: str | list) -> bytes:
    if datatype == "BYTES":
        data = value.encode() if isinstance(value, str) else b""
        return struct.pack("<I", len(data)) + data
    return struct.pack(f"<{len(value)}{_STRUCT[datatype]}", *value)


async def generate(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
    """Answer ModelStreamInfer: the requests of a stream one after the other."""
    rng = random.Random()
    async for data in requests:
        request = service_pb2.ModelInferRequest.FromString(data)
        head = text(1, request.model_name) + text(2, "1") + text(3, request.id)
        tokens = _max_tokens(request)
        write = context.write
        for n, due_s in enumerate(script.pace_of(data).instants(tokens, time.monotonic(), rng)):
            wait_s = due_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            before, after = tail(n, tokens)
            inner = b"%b%b%b%b" % (head, before, script.stamp(), after)
            await write(b"\x12%b%b" % (varint(len(inner)), inner))


def _max_tokens(request: service_pb2.ModelInferRequest) -> int:
    for index, tensor in enumerate(request.inputs):
        if tensor.name == "max_tokens":
            return struct.unpack("<i", request.raw_input_contents[index])[0]
    return 16


async def _ready(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return _READY_RESPONSE


async def serve() -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 1000)])
    ready = grpc.unary_unary_rpc_method_handler(_ready)
    methods = dict.fromkeys(("ServerLive", "ServerReady", "ModelReady"), ready)
    methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(generate)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    bound = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await serve_until_input_closes(bound)
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(serve())
