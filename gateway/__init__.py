"""How is a public request served?

A request passes ``api`` (OpenAI, KServe) → ``cache`` → ``service`` → ``admission`` → ``choices`` → ``generation`` →
``routing`` → a replica or an upstream. ``config`` and ``telemetry`` serve all; ``batch`` runs files of requests.
"""

from contract import grpc_environment, interpreter

interpreter.require("grpc", "gateway")
grpc_environment.for_gateway()
