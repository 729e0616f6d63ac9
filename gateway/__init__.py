"""How is a public request served?

A request passes ``api`` (OpenAI, KServe) → ``cache`` → ``service`` → ``admission`` → ``choices`` → ``generation`` →
``routing`` → a replica or an upstream. ``config`` and ``telemetry`` serve all; ``batch`` runs files of requests.
"""

import os

from contract import interpreter

# gRPC reads them when it is imported. Its newer event engine hands every message through two threads of its own;
# without it one thread polls, which takes a third off the CPU time of a relayed token.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
interpreter.require("gateway")
