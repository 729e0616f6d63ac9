"""The request parameter ``request_priority``, which the ensemble copies to every step."""

from __future__ import annotations

from collections.abc import Mapping

from contract.errors import InvalidArgument

PARAMETER = "request_priority"
NORMAL = 0.5  # the LLM API's scale: 0 is served last, 1 first
HIGHEST = 1.0


def read(parameters: Mapping[str, object]) -> float:
    """Return the priority of a request, NORMAL without one. Raises InvalidArgument: it is no number from 0 to 1."""
    given = parameters.get(PARAMETER, NORMAL)
    try:
        priority = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        priority = -1.0
    if isinstance(given, bool) or not 0.0 <= priority <= 1.0:
        raise InvalidArgument(PARAMETER, f"must be a number from 0 (last) to 1 (first), got {given!r}")
    return priority
