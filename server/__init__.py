"""How Triton is run: one supervisor per tritonserver, from installation check to the last process gone.

``python -m server`` is the door for people and make; :func:`server.running` the one for tests and tools.
"""

from contract import grpc_environment, interpreter

interpreter.require("grpc", "server")
grpc_environment.for_library()

from server.replica import Replica, running  # noqa: E402 - needs what was just required

__all__ = ["Replica", "running"]
