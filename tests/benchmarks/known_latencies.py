"""A server whose latencies are known: it draws them, keeps to them, and writes down when it did what.

    python -m tests.benchmarks.known_latencies OUT.jsonl [--stall FROM,FOR]      prints "HOST:PORT", serves until killed

Nothing of ours but the protocol: KServe by tritonclient's protobufs on grpc.aio. A request that asks for N tokens gets
them in N messages; waits are drawn by the request's number, the first word of its prompt's digest. With ``--stall`` it
is deaf for a while: whatever comes due between FROM and FROM + FOR seconds after the first request waits for the end.
The line of a request: ``{"received_s": …, "sent_s": […]}``, instants on CLOCK_MONOTONIC, as the load generator's are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import struct
import time
import zlib
from pathlib import Path

import grpc.aio
from tritonclient.grpc import service_pb2

MEDIAN_FIRST_S, SIGMA_FIRST = 0.06, 0.5
MEDIAN_GAP_S, SIGMA_GAP = 0.02, 0.4


class Server:
    def __init__(self, out: Path, stall: tuple[float, float] | None) -> None:
        self._out, self._stall = out.open("a"), stall
        self._first_s: float | None = None

    async def stream(self, requests, context):
        async for request in requests:
            received_s = time.monotonic()
            self._first_s = self._first_s or received_s
            inputs = dict(zip((one.name for one in request.inputs), request.raw_input_contents, strict=True))
            tokens = struct.unpack("<i", inputs["max_tokens"])[0]
            rng = random.Random(zlib.crc32(inputs["text_input"]))
            sent_s: list[float] = []
            for n in range(tokens):
                wait = (MEDIAN_FIRST_S, SIGMA_FIRST) if n == 0 else (MEDIAN_GAP_S, SIGMA_GAP)
                await asyncio.sleep(wait[0] * rng.lognormvariate(0.0, wait[1]))
                await self._deaf()
                sent_s.append(time.monotonic())
                yield message(request.id, n, n == tokens - 1)
            self._out.write(json.dumps({"received_s": received_s, "sent_s": sent_s}) + "\n")
            self._out.flush()

    async def _deaf(self) -> None:
        if self._stall is None:
            return
        at_s, (begins_s, lasts_s) = time.monotonic() - self._first_s, self._stall
        if begins_s <= at_s < begins_s + lasts_s:
            await asyncio.sleep(begins_s + lasts_s - at_s)


def message(request_id: str, n: int, last: bool) -> bytes:
    answer = service_pb2.ModelStreamInferResponse()
    inner = answer.infer_response
    inner.model_name, inner.id = "ensemble", request_id
    inner.parameters["triton_final_response"].bool_param = last
    outputs = [("text_output", "BYTES", struct.pack("<I", 1) + b"x"), ("output_ids", "INT32", struct.pack("<i", n))]
    if last:
        outputs.append(("finish_reason", "BYTES", struct.pack("<I", 6) + b"length"))
        outputs += [(name, "INT32", struct.pack("<i", n + 1)) for name in ("num_input_tokens", "num_output_tokens")]
    for name, datatype, raw in outputs:
        inner.outputs.add(name=name, datatype=datatype, shape=[1, 1])
        inner.raw_output_contents.append(raw)
    return answer.SerializeToString()


async def serve(out: Path, stall: tuple[float, float] | None) -> None:
    method = grpc.stream_stream_rpc_method_handler(
        Server(out, stall).stream, service_pb2.ModelInferRequest.FromString, None
    )
    service = "inference.GRPCInferenceService"
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"ModelStreamInfer": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stall", help="FROM,FOR")
    options = parser.parse_args()
    asyncio.run(serve(options.out, tuple(map(float, options.stall.split(","))) if options.stall else None))
