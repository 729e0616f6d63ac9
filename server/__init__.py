"""The supervisor of one tritonserver: checks, start, liveness probes, restarts, drain and clean-up.

``python -m server`` is the command line; :func:`server.running` starts a server from Python.
"""

from contract import grpc_environment, interpreter

interpreter.require("grpc", "server")
grpc_environment.for_library()

from server.replica import Replica, running  # noqa: E402 - needs the package checked above

__all__ = ["Replica", "running"]
