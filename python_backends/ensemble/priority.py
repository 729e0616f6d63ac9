"""Engines and the request parameter ``request_priority``.

Triton's own ``priority`` orders Triton's queues only, which an engine that batches in flight empties at once, and no
Python model can read it. TensorRT-LLM's C++ backend passes neither on, so around it the parameter is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from contract.errors import InvalidArgument
from contract.priority import NORMAL, PARAMETER, read


def refuse(parameters: Mapping[str, object]) -> None:
    """For an engine that cannot honour it: InvalidArgument for any other than NORMAL."""
    if read(parameters) != NORMAL:
        problem = f"got {parameters[PARAMETER]!r}; the TensorRT-LLM engine runs requests as they come, leave it out"
        raise InvalidArgument(PARAMETER, problem)
