"""The boundary between the doors and admission: who asks, and the right to be served until the stream's end.

The doors (HTTP and gRPC) do, for every request, in this order:

    tenant = keys.tenant(api_key)                        # Unauthenticated
    permit = await admission.admit(requests, tenant)     # Overloaded, DeadlineExceeded, InvalidArgument, Unavailable
    try: serve permit.requests, which may ask for less than ``requests`` did
    finally: permit.settle(usage)                        # exactly once, whichever end

``admit`` may wait in a fair, bounded queue; the caller leaves by cancelling it, and then nothing stays reserved. The
choices of one caller (``n``, several prompts) are admitted together, all or none: each waiting for a place of its own
while it holds another's is how two callers would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from contract.generation import GenerationRequest, Usage
from gateway.budgets import Level
from gateway.prompt_tokens import PromptCount


@dataclass(frozen=True)
class Tenant:
    """Who pays for a request and is kept apart from the others.

    name: stable, from configuration, never from the request: it keys caches and labels metrics. models: the public
    model names it may use, empty for all. pool: the label of the replicas it is pinned to, empty for any.
    priority: 0 is the most urgent class. weight: its share among tenants that compete. levels: whose limits hold,
    outermost first: organisation, team, key; none for callers without a key.
    """

    name: str = "anonymous"
    models: tuple[str, ...] = ()
    pool: str = ""
    priority: int = 1
    weight: float = 1.0
    levels: tuple[Level, ...] = ()


Release = Callable[[int], None]


class Permit(Protocol):
    """An admitted request.

    requests: what may be served, in the order asked: the asked ones, or less of each. headers: what the response says
    about it, in lower case: ``x-ratelimit-*``, and ``x-trident-degraded`` where something was lowered. target: the
    overflow target that shall serve it, empty for the usual replicas. counts: of each request's prompt, in tokens.
    """

    requests: tuple[GenerationRequest, ...]
    headers: dict[str, str]
    target: str
    counts: tuple[PromptCount, ...]

    async def queue_for_replicas(self, left_s: float) -> Release:
        """For a permit with a target that could not serve one of the requests: waits in the queue for a slot at the
        replicas, at most ``left_s`` seconds. Nothing is charged again. Returns what gives the slot back, told the
        tokens used. Raises Overloaded, DeadlineExceeded."""

    def settle(self, usage: Usage | None) -> None:
        """The last stream is over: what was used is charged, the rest of the reservation comes back.

        None: nothing was generated, all of it comes back. A stream cut midway is settled with what it had produced.
        Never blocks and never raises; state that lives elsewhere is written behind. A second call does nothing.
        """


class Keys(Protocol):
    """API keys and whose they are."""

    def tenant(self, api_key: str) -> Tenant:
        """The tenant of the key, "" if none was sent. Raises Unauthenticated."""

    def named(self, tenant: str, key: str) -> Tenant | None:
        """For work that outlives its request: the tenant of this name as its key ``key`` sees it today, where ``key``
        is the name of its last level and empty if it has none. None if there is no such key any more."""
