"""The liveness probe over gRPC, as a client sends it: one token through the whole ensemble, or a pair to an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any

from clients.wire import encoder_call, infer_request
from clients.wire.channel import AsyncChannel
from clients.wire.connection import TLS, Connection
from clients.wire.encoder_call import Rows
from clients.wire.retries import NO_RETRY, RetrySchedule
from clients.wire.token_stream import SingleRoute, TokenStream
from contract.errors import DeadlineExceeded, Overloaded, TridentError
from contract.generation import FinishReason, GenerationRequest
from server.repository import ENSEMBLE
from server.server_metrics import ServerMetrics
from server.settings import Settings

PROMPT = "ping"
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


async def probe(settings: Settings, model: str = ENSEMBLE) -> ProbeResult:
    """Send one request to ``model`` on a new connection."""
    timeout_s = settings.canary_timeout_s
    tls = TLS(settings.tls_ca or settings.tls_cert, server_name=settings.tls_name) if settings.tls_cert else None
    channel = AsyncChannel(Connection(settings.grpc_url, tls), shared=False)
    request_id = f"liveness-probe-{next(_request_numbers)}"
    generation = GenerationRequest(PROMPT, max_tokens=1, timeout_s=timeout_s, request_id=request_id)
    route = SingleRoute(
        settings.grpc_url, lambda _, remaining_s: channel.generate(request(request_id), remaining_s, ())
    )
    try:
        if model != ENSEMBLE:  # the score of one pair, which every encoder computes
            await channel.call(encoder_call.call(Rows(texts=(PROMPT,), pairs=(PROMPT,)), request_id), timeout_s)
            return ProbeResult(Outcome.PASSED)
        reason = (await TokenStream(route, generation, RetrySchedule(NO_RETRY)).complete()).finish_reason
    except TridentError as error:
        return result_of_error(error, timeout_s)
    finally:
        await channel.close()
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return ProbeResult(Outcome.PASSED)
    return ProbeResult(Outcome.FAILED, f"stream ended with finish_reason {reason}")


def passes(result: ProbeResult, before: ServerMetrics | None, after: ServerMetrics | None) -> bool:
    """Return whether the server is live, given its metrics before and after the probe (None: scrape failed).

    A full server refuses probes or lets them wait. It is live as long as the engine makes steps and responses reach
    other clients. Responses alone prove nothing: the engine's probes of silent streams are counted among them. One
    step and one response may be the liveness probe's own. While an engine reads long prompts and generates nothing
    there are no responses, for longer than three probes wait; then a request is left in it, and any step is progress.
    """
    if result.outcome not in (Outcome.BUSY, Outcome.TIMED_OUT):
        return result.outcome is Outcome.PASSED
    if before is None or after is None or before.steps is None or after.steps is None:
        return False
    if after.generating == 0 and after.in_engine:
        return after.steps > before.steps
    return after.steps > before.steps + 1 and after.responses > before.responses + 1


def result_of_error(error: TridentError, timeout_s: float) -> ProbeResult:
    if isinstance(error, DeadlineExceeded):
        return ProbeResult(Outcome.TIMED_OUT, f"no token within {timeout_s:g} s")
    outcome = Outcome.BUSY if isinstance(error, Overloaded) else Outcome.FAILED
    return ProbeResult(outcome, f"{type(error).__name__}: {error}")


def request(request_id: str) -> bytes:
    """Return a serialised ModelInferRequest for one token."""
    inputs: list[tuple[str, str, list[Any]]] = [("text_input", "BYTES", [PROMPT]), ("max_tokens", "INT32", [1])]
    return infer_request.infer_request(ENSEMBLE, request_id, inputs, {"triton_enable_empty_final_response": True})
