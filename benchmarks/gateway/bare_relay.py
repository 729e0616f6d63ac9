"""A relay of the gateway's own libraries and nothing else, for comparison: what a token costs at least.

    python -m benchmarks.gateway.bare_relay HOST:PORT    # the replica; prints `http HOST:PORT grpc HOST:PORT`

grpc.aio passes the bytes of ModelStreamInfer on unread. HTTP is a bare ASGI application under uvicorn: the text of each
response, read with the official protobuf classes, in an OpenAI chunk written by orjson.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import orjson
import uvicorn
import uvloop
from tritonclient.grpc import service_pb2

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def infer_request(body: dict[str, Any]) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="ensemble")
    messages = orjson.dumps(body["messages"])
    for name, datatype, raw in (
        ("messages", "BYTES", struct.pack("<I", len(messages)) + messages),
        ("max_tokens", "INT32", struct.pack("<i", body["max_tokens"])),
        ("stream", "BOOL", b"\x01"),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        request.raw_input_contents.append(raw)
    return request.SerializeToString()


def event(data: bytes, model: str) -> bytes:
    answer = service_pb2.ModelStreamInferResponse.FromString(data).infer_response
    raws = {tensor.name: raw for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)}
    reason = raws["finish_reason"][4:].decode() or None
    choice = {"index": 0, "delta": {"content": raws["text_output"][4:].decode()}, "finish_reason": reason}
    chunk = {"id": answer.id, "object": "chat.completion.chunk", "created": 0, "model": model, "choices": [choice]}
    return b"data: %b\n\n" % orjson.dumps(chunk)


async def serve(replica: str) -> None:
    channel = grpc.aio.insecure_channel(replica)
    call = channel.unary_stream(_METHOD)

    async def relay(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for request in requests:
            async for data in call(request):
                await context.write(data)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = orjson.loads((await receive())["body"])
        await send(_START)
        async for data in call(infer_request(body)):
            await send({"type": "http.response.body", "body": event(data, body["model"]), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    server = grpc.aio.server()
    handlers = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(relay)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(f"http 127.0.0.1:{listening.getsockname()[1]} grpc 127.0.0.1:{grpc_port}", flush=True)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    await asyncio.gather(uvicorn.Server(config).serve([listening]))
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
