"""The request parameter ``request_priority`` and the engines.

Triton's own ``priority`` orders only Triton's queues, which an engine with in-flight batching empties immediately, and
no Python model can read it. TensorRT-LLM's C++ backend supports neither, so the parameter is refused for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from contract.errors import InvalidArgument
from contract.priority import NORMAL, PARAMETER, read


def refuse(parameters: Mapping[str, object]) -> None:
    """Check the parameter for an engine that does not support it.

    Raises:
        InvalidArgument: it is not NORMAL.
    """
    if read(parameters) != NORMAL:
        problem = f"must be left out, the TensorRT-LLM engine has no priorities; got {parameters[PARAMETER]!r}"
        raise InvalidArgument(PARAMETER, problem)
