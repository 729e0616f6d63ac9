"""One log line for every request that ended. It holds no prompt and no generated text."""

from __future__ import annotations

import logging
import time

from contract.errors import InvalidArgument, TridentError
from gateway.request_context import RequestContext

_LOG = logging.getLogger("gateway.request")


def write(context: RequestContext, error: TridentError | None, began_s: float, **more: object) -> None:
    """Log the end of a generation, at level ERROR for a defect.

    began_s: arrival, ``time.monotonic()``. more: further fields.
    """
    level = _level(error)
    fields = {
        "request_id": context.request_id,
        "tenant": context.tenant.name,
        "key": context.key,
        "protocol": context.protocol,
        "operation": context.operation,
        "model": context.model.name,
        "error_type": type(error).__name__ if error else "",
        # The text of a client's own mistake may quote its prompt.
        "error": str(error) if error and (error.internal or not isinstance(error, InvalidArgument)) else "",
        "duration_s": round(time.monotonic() - began_s, 6),
        **context.notes,
        **more,
    }
    message = f"generation failed: {error}" if level == logging.ERROR else "generation"
    _LOG.log(level, message, extra={"fields": fields})


def writes(error: TridentError | None) -> bool:
    """Return whether ``write`` writes a line for a request that ended so, by the level of the log."""
    return _LOG.isEnabledFor(_level(error))


def _level(error: TridentError | None) -> int:
    return logging.ERROR if error and error.http_status == 500 else logging.INFO


def cost_fields(context: RequestContext, micros: int) -> dict[str, float]:
    """Return the field of what a request cost, in the currency of [prices]; none where its model has no price."""
    return {"cost": micros / 1e6} if context.model.price is not None else {}


def moved(text: str, context: RequestContext, generation_id: str, error: TridentError, **more: object) -> None:
    """Log that a generation goes on elsewhere after ``error``."""
    fields = {"request_id": context.request_id, "generation_id": generation_id, **more, "error": str(error)}
    _LOG.warning(text, extra={"fields": fields})
