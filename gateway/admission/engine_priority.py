"""Which priority a request has in an engine's queue: its tenant's class decides, the caller may only lower it."""

from __future__ import annotations

from contract.priority import NORMAL
from gateway.config.tenant import LOWEST_PRIORITY

_BAND = 1.0 / (LOWEST_PRIORITY + 1)


def engine_priority(tenant_class: int, own: float = NORMAL) -> float:
    """Return the engine's priority, 0 to 1. own: the ``request_priority`` that the caller sent.

    Every class has a tenth of the scale, class 0 the uppermost. A request has the top of its class, as far below it as
    ``own`` is below NORMAL, and never so far that it comes to the next class.
    """
    reduction = 0.9 * _BAND * (1.0 - min(own, NORMAL) / NORMAL)
    return round(1.0 - tenant_class * _BAND - reduction, 6)
