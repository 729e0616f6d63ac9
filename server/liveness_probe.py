"""The liveness probe over gRPC, as a client sends it: one token through the whole ensemble, or a pair to an encoder."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2

from clients.wire import infer_request
from contract.errors import Overloaded, from_text
from contract.generation import FinishReason
from server.repository import ENSEMBLE
from server.server_metrics import ServerMetrics
from server.settings import Settings

PROMPT = "ping"
# Triton's message for a full queue; the engine's own is an Overloaded error.
QUEUE_FULL = "Exceeds maximum queue size"

_request_numbers = count(1)


class Outcome(Enum):
    PASSED = "passed"
    BUSY = "busy"  # refused because a queue is full
    TIMED_OUT = "timed out"
    FAILED = "failed"


@dataclass(frozen=True)
class ProbeResult:
    """reason: why the probe did not pass, or ""."""

    outcome: Outcome
    reason: str = ""


async def probe(settings: Settings, timeout_s: float, model: str = ENSEMBLE) -> ProbeResult:
    """Send one request to ``model`` on a new connection."""
    try:
        async with _channel(settings) as channel:
            if model != ENSEMBLE:
                await channel.unary_unary(infer_request.INFER)(encoder_request(model), timeout=timeout_s)
                return ProbeResult(Outcome.PASSED)
            call = channel.unary_stream(
                infer_request.GENERATE,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            finish_reason = None
            async for response in call(request(), timeout=timeout_s):
                if response.error_message:
                    return result_of_error(response.error_message)
                outputs = text_outputs(response.infer_response)
                finish_reason = outputs.get("finish_reason") or finish_reason
                if finish_reason == FinishReason.ERROR.value:
                    return result_of_error(outputs.get("error_message", ""))
                if response.infer_response.parameters["triton_final_response"].bool_param:
                    return result_of_finish(finish_reason)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ProbeResult(Outcome.TIMED_OUT, f"no token within {timeout_s:g} s")
        if QUEUE_FULL in (error.details() or ""):
            return ProbeResult(Outcome.BUSY, str(error.details()))
        return ProbeResult(Outcome.FAILED, f"{error.code().name}: {error.details()}")
    return ProbeResult(Outcome.FAILED, "stream closed before its final response")


def passes(result: ProbeResult, before: ServerMetrics | None, after: ServerMetrics | None) -> bool:
    """Return whether the server is live, given its metrics before and after the probe (None: scrape failed).

    A full server refuses probes or lets them wait. It is live as long as the engine makes steps and responses reach
    other clients. Responses alone prove nothing: the engine's probes of silent streams are counted among them. One
    step and one response may be the liveness probe's own.
    """
    if result.outcome not in (Outcome.BUSY, Outcome.TIMED_OUT):
        return result.outcome is Outcome.PASSED
    if before is None or after is None or before.steps is None or after.steps is None:
        return False
    return after.steps > before.steps + 1 and after.responses > before.responses + 1


def result_of_error(message: str) -> ProbeResult:
    """message: a Triton error, or the error_message of a stream that ended with finish_reason error."""
    if QUEUE_FULL in message or isinstance(from_text(message), Overloaded):
        return ProbeResult(Outcome.BUSY, message)
    return ProbeResult(Outcome.FAILED, message or "stream ended with an error without a message")


def result_of_finish(finish_reason: str | None) -> ProbeResult:
    """finish_reason: of the final response; None if it had none."""
    if finish_reason in (FinishReason.STOP.value, FinishReason.LENGTH.value):
        return ProbeResult(Outcome.PASSED)
    return ProbeResult(Outcome.FAILED, f"stream ended with finish_reason {finish_reason!r}")


def request() -> bytes:
    """Return a serialised ModelInferRequest for one token."""
    inputs: list[tuple[str, str, list[Any]]] = [("text_input", "BYTES", [PROMPT]), ("max_tokens", "INT32", [1])]
    parameters: dict[str, bool | int | str] = {"triton_enable_empty_final_response": True}
    return infer_request.infer_request(ENSEMBLE, f"liveness-probe-{next(_request_numbers)}", inputs, parameters)


def encoder_request(model: str) -> bytes:
    """Return a serialised ModelInferRequest for the score of one pair, which every encoder computes."""
    inputs: list[tuple[str, str, list[Any]]] = [(name, "BYTES", [PROMPT]) for name in ("text_input", "text_pair")]
    return infer_request.infer_request(model, f"liveness-probe-{next(_request_numbers)}", inputs, {})


def text_outputs(response: service_pb2.ModelInferResponse) -> dict[str, str]:
    """Return the first element of every non-empty BYTES output, by name."""
    texts = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.datatype == "BYTES" and len(content) >= 4:
            (length,) = struct.unpack_from("<I", content)
            texts[output.name] = content[4 : 4 + length].decode(errors="replace")
    return texts


def _channel(settings: Settings) -> grpc.aio.Channel:
    if settings.tls_cert is None:
        return grpc.aio.insecure_channel(settings.grpc_url, options=[("grpc.use_local_subchannel_pool", 1)])
    trusted = (settings.tls_ca or settings.tls_cert).read_bytes()
    options = [("grpc.ssl_target_name_override", settings.tls_name), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(settings.grpc_url, grpc.ssl_channel_credentials(trusted), options=options)
