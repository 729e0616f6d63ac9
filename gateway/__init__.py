"""How is a public request served? Files in the order of the flow.

settings → configuration (tenants, policy) → schemas → app (chat, completions, kserve) → reuse → permit (admission) →
generation (routing, upstream) → streaming → observability
"""

import os

from contract import interpreter

interpreter.require("grpc", "gateway")

# gRPC reads this once, when it is first imported. Its newer event engine hands every message through two threads of
# its own; without it one thread polls, which takes a third off what a relayed token costs. Whoever sets it wins.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # what it says of connections that close is not one of our log's lines
