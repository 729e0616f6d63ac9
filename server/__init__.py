"""The supervisor of one tritonserver: checks, start, liveness probes, restarts, drain and clean-up.

``python -m server`` is the command line; :func:`server.running` starts a server from Python.

supervisor: runs a server by what recovery decides.
    checks before the start: settings, preflight (machine, memory_footprint), installation, repository, ports
    instance: one run of tritonserver (triton_command, process, reaper, shared_memory, admin)
    watching it: liveness_probe, server_metrics, hang_detection, stubs
    several engines: server_chain
    gateways that route to it: registration
    end: drain, child_command
    output: console, status, triton_log
"""

from contract import interpreter

interpreter.require("server")

from server.replica import Replica, running  # noqa: E402 - needs the package checked above

__all__ = ["Replica", "running"]
