"""How to talk to a replica: streaming clients over gRPC, a command line, and balancing over many replicas."""

from contract import interpreter

interpreter.require("clients")

from clients.async_client import AsyncClient
from clients.balanced import BalancedClient
from clients.client import Client
from clients.wire.blocking_stream import BlockingStream
from clients.wire.completion import Completion
from clients.wire.connection import TLS
from clients.wire.latency import Stopwatch
from clients.wire.retries import NO_RETRY, RetryBudget, RetryPolicy
from clients.wire.token_stream import TokenStream

__all__ = [
    "NO_RETRY",
    "TLS",
    "AsyncClient",
    "BalancedClient",
    "BlockingStream",
    "Client",
    "Completion",
    "RetryBudget",
    "RetryPolicy",
    "Stopwatch",
    "TokenStream",
]
