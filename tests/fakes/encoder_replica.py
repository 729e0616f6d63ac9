"""A replica that serves an encoder: texts that share words have similar vectors."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from contract.encoder import MAX_ROWS

DIMENSIONS = 32


def vector(text: str) -> np.ndarray:
    """f32[DIMENSIONS] of length 1."""
    places = [zlib.crc32(word.encode()) % DIMENSIONS for word in text.lower().replace("?", "").split()]
    counts = np.bincount(places, minlength=DIMENSIONS).astype(np.float32)
    return counts / max(1e-6, float(np.linalg.norm(counts)))


class EncoderReplica:
    """Serves on loopback while its block runs.

    refusal: (status, message) of every call, in place of an answer. gate: calls wait for it. calls: requests so far.
    reranks: whether it takes pairs only.
    """

    def __init__(self, reranks: bool = False) -> None:
        self.reranks = reranks
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[pb.ModelInferRequest] = []
        self.cancelled = 0
        self.url = ""

    async def __aenter__(self) -> EncoderReplica:
        self._server = grpc.aio.server()
        unary = grpc.unary_unary_rpc_method_handler
        methods = {
            "ModelReady": unary(self._ready, pb.ModelReadyRequest.FromString, _bytes),
            "ModelInfer": unary(self._infer, pb.ModelInferRequest.FromString, _bytes),
        }
        handlers = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods)
        self._server.add_generic_rpc_handlers((handlers,))
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.gate.set()
        await self._server.stop(None)

    async def _ready(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=request.name == "encoder")

    async def _infer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        self.calls.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.refusal is not None:
            await context.abort(*self.refusal)
        raws = {one.name: (one, raw) for one, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
        rows = request.inputs[0].shape[0]
        assert rows <= MAX_ROWS
        if "input_ids" in raws:
            ids = np.frombuffer(raws["input_ids"][1], "<i4").reshape(rows, -1)
            texts = [" ".join(map(str, row[row >= 0])) for row in ids]
        else:
            texts = _texts(raws["text_input"][1])
        pairs = _texts(raws["text_pair"][1]) if "text_pair" in raws else []
        for number, text in enumerate(texts):
            if "too long" in text:
                message = f"PromptTooLong: text_input[{number}]: must have at most 8 tokens, got 9"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, message)
        if self.reranks and not pairs:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "InvalidArgument: text_pair: must be sent")
        counts = np.array([len(text.split()) for text in texts], "<i4")
        vectors = np.stack([vector(text) for text in texts]).astype("<f4")
        response = pb.ModelInferResponse(model_name="encoder", model_version="1", id=request.id)
        outputs = {"num_input_tokens": ("INT32", counts[:, None])}
        if pairs:
            counts += np.array([len(text.split()) for text in pairs], "<i4")
            scores = (vectors * np.stack([vector(text) for text in pairs])).sum(axis=1, keepdims=True)
            outputs["score"] = ("FP32", scores.astype("<f4"))
        else:
            outputs["embedding"] = ("FP32", vectors)
        for name, (datatype, array) in outputs.items():
            response.outputs.add(name=name, datatype=datatype, shape=array.shape)
            response.raw_output_contents.append(array.tobytes())
        return response


def _texts(raw: bytes) -> list[str]:
    found, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        found.append(raw[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return found


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
