"""How is a public request served? Files in the order of the flow.

settings → configuration (tenants, policy) → schemas → app (chat, completions, kserve) → reuse → permit (admission) →
generation (routing, upstream) → streaming → observability
"""

from contract import grpc_environment, interpreter

interpreter.require("grpc", "gateway")
grpc_environment.for_gateway()
