"""A minimal FastAPI relay in front of the ensemble, for comparison: one endpoint, no admission.

    python fastapi_relay.py HOST:PORT PORT        # the replica's gRPC address; where to listen

It imports nothing of this project and runs in an environment of its own, with the official protobuf classes, grpc.aio,
pydantic and uvicorn with uvloop and httptools.
"""

from __future__ import annotations

import json
import struct
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from tritonclient.grpc import service_pb2, service_pb2_grpc

REPLICA, PORT = (sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 2 else ("", 0)


class Message(BaseModel):
    role: str
    content: str


class ChatRequest(BaseModel):
    model: str
    messages: list[Message]
    max_tokens: int = 128
    stream: bool = False


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with grpc.aio.insecure_channel(REPLICA) as channel:
        app.state.triton = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        yield


app = FastAPI(lifespan=lifespan)


def infer_request(body: ChatRequest) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="ensemble", id=uuid.uuid4().hex)
    messages = json.dumps([message.model_dump() for message in body.messages]).encode()
    for name, datatype, raw in (
        ("messages", "BYTES", struct.pack("<I", len(messages)) + messages),
        ("max_tokens", "INT32", struct.pack("<i", body.max_tokens)),
        ("stream", "BOOL", b"\x01"),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        request.raw_input_contents.append(raw)
    return request


async def events(body: ChatRequest) -> AsyncIterator[str]:
    request = infer_request(body)

    async def requests():
        yield request

    head = {"id": f"chatcmpl-{request.id}", "object": "chat.completion.chunk", "created": 0, "model": body.model}
    async for response in app.state.triton.ModelStreamInfer(requests()):
        if response.error_message:
            yield f"data: {json.dumps({'error': {'message': response.error_message}})}\n\n"
            return
        answer = response.infer_response
        text = {"text_output": "", "finish_reason": ""}
        for index, tensor in enumerate(answer.outputs):
            if tensor.name in text:
                text[tensor.name] = answer.raw_output_contents[index][4:].decode()
        delta = {"content": text["text_output"]}
        choice = {"index": 0, "delta": delta, "finish_reason": text["finish_reason"] or None}
        yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"


@app.post("/v1/chat/completions")
async def chat(body: ChatRequest) -> StreamingResponse:
    return StreamingResponse(events(body), media_type="text/event-stream")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning", access_log=False)
