"""How urgent a request is: the request parameter ``request_priority``, which the ensemble copies to every step."""

from __future__ import annotations

from collections.abc import Mapping

from contract.errors import InvalidArgument

PARAMETER = "request_priority"
NORMAL = 0.5  # the LLM API's scale: 0 waits for all others, 1 goes before them
HIGHEST = 1.0


def read(parameters: Mapping[str, object]) -> float:
    """Of a request's parameters; NORMAL where they say nothing. Raises InvalidArgument that says what is allowed."""
    given = parameters.get(PARAMETER, NORMAL)
    try:
        priority = float(given)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        priority = -1.0
    if isinstance(given, bool) or not 0.0 <= priority <= 1.0:
        raise InvalidArgument(PARAMETER, f"got {given!r}; allowed is a number from 0 (last) to 1 (first)")
    return priority
