"""How urgent a request is: the request parameter ``request_priority``, which the ensemble copies to every step.

Triton's own ``priority`` orders Triton's queues only, which an engine that batches in flight empties at once, and no
Python model can read it. TensorRT-LLM's C++ backend passes neither on, so around it the parameter is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from contract.errors import InvalidArgument

PARAMETER = "request_priority"
NORMAL = 0.5  # the LLM API's scale: 0 waits for all others, 1 goes before them


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


def refuse(parameters: Mapping[str, object]) -> None:
    """For an engine that cannot honour it: InvalidArgument for any other than NORMAL."""
    if read(parameters) != NORMAL:
        problem = f"got {parameters[PARAMETER]!r}; the TensorRT-LLM engine runs requests as they come, leave it out"
        raise InvalidArgument(PARAMETER, problem)
