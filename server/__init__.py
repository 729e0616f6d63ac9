"""The supervisor of one tritonserver: checks, start, liveness probes, restarts, drain and clean-up.

``python -m server`` is the command line; :func:`server.running` starts a server from Python.

supervisor: runs a server by what recovery decides.
    checks before the start: settings, preflight (machine, memory_footprint), installation, repository, ports
    instance: one run of tritonserver (triton_command, process, reaper, shared_memory, shell_paths, admin)
    watching it: liveness_probe, server_metrics, hang_detection, stubs
    several engines: server_chain
    gateways that route to it: registration
    end: drain, child_command
    output: ready_message, progress, status, triton_log
"""

from contract import grpc_environment, interpreter

interpreter.require("grpc", "server")
grpc_environment.for_library()

from server.replica import Replica, running  # noqa: E402 - needs the package checked above

__all__ = ["Replica", "running"]
