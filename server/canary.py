"""One real token through the whole ensemble, over gRPC, as a client would ask for it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from itertools import count

import grpc.aio
from tritonclient.grpc import service_pb2

from clients.wire import infer_request
from contract.errors import Overloaded, from_text
from contract.generation import FinishReason
from server.repository import ENSEMBLE
from server.settings import Settings
from server.traffic import Traffic

PROMPT = "ping"
# Triton's own words for a full queue; ours come as an Overloaded error.
QUEUE_FULL = "Exceeds maximum queue size"

_numbers = count(1)


class Health(Enum):
    WELL = "well"
    BUSY = "busy"  # refused for being full
    SLOW = "slow"  # no end in time
    ILL = "ill"


@dataclass(frozen=True)
class Finding:
    health: Health
    reason: str = ""


async def ask(settings: Settings, timeout_s: float) -> Finding:
    """Sends one request for one token on a new connection and says how the server is."""
    try:
        async with _channel(settings) as channel:
            call = channel.unary_stream(
                infer_request.GENERATE,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            stream = call(request(), timeout=timeout_s)
            finish_reason = None
            async for response in stream:
                if response.error_message:
                    return judge_error(response.error_message)
                outputs = texts(response.infer_response)
                finish_reason = outputs.get("finish_reason") or finish_reason
                if finish_reason == FinishReason.ERROR.value:
                    return judge_error(outputs.get("error_message", ""))
                if response.infer_response.parameters["triton_final_response"].bool_param:
                    return judge_end(finish_reason)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Finding(Health.SLOW, f"no token within {timeout_s:g} s")
        return Finding(Health.ILL, f"{error.code().name}: {error.details()}")
    return Finding(Health.ILL, "the stream closed before its final response")


def is_well(finding: Finding, before: Traffic | None, now: Traffic | None) -> bool:
    """Whether the server is well, given its traffic before the canary and after it; None if the metrics did not answer.

    A full server refuses canaries or lets them wait, and is well as long as the engine makes steps and answers reach
    other clients. Answers alone prove nothing: the engine's probes of silent streams count among them. A canary's own
    steps and answers are at most one each.
    """
    if finding.health not in (Health.BUSY, Health.SLOW):
        return finding.health is Health.WELL
    if before is None or now is None or before.steps is None or now.steps is None:
        return False
    return now.steps > before.steps + 1 and now.answered > before.answered + 1


def judge_error(message: str) -> Finding:
    """``message``: a Triton error, or the error_message of a stream that ended with finish_reason error."""
    if QUEUE_FULL in message or isinstance(from_text(message), Overloaded):
        return Finding(Health.BUSY, message)
    return Finding(Health.ILL, message or "the stream ended with an error that says nothing")


def judge_end(finish_reason: str | None) -> Finding:
    if finish_reason in (FinishReason.STOP.value, FinishReason.LENGTH.value):
        return Finding(Health.WELL)
    return Finding(Health.ILL, f"the stream ended with finish_reason {finish_reason!r}")


def request() -> bytes:
    """A serialised ModelInferRequest for one token."""
    inputs = [("text_input", "BYTES", [PROMPT]), ("max_tokens", "INT32", [1])]
    parameters = {"triton_enable_empty_final_response": True}
    return infer_request.infer_request(ENSEMBLE, f"canary-{next(_numbers)}", inputs, parameters)


def texts(response: service_pb2.ModelInferResponse) -> dict[str, str]:
    """The first element of every non-empty BYTES output, by name."""
    found = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=False):
        if output.datatype == "BYTES" and len(content) >= 4:
            (length,) = struct.unpack_from("<I", content)
            found[output.name] = content[4 : 4 + length].decode(errors="replace")
    return found


def _channel(settings: Settings) -> grpc.aio.Channel:
    if settings.tls_cert is None:
        return grpc.aio.insecure_channel(settings.grpc_url, options=[("grpc.use_local_subchannel_pool", 1)])
    trusted = (settings.tls_ca or settings.tls_cert).read_bytes()
    options = [("grpc.ssl_target_name_override", settings.tls_name), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(settings.grpc_url, grpc.ssl_channel_credentials(trusted), options=options)
