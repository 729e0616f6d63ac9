"""The boundary between the doors and admission: who asks, and the right to be served until the stream's end.

The doors (HTTP and gRPC) do, for every request, in this order:

    tenant = keys.tenant(api_key)                        # Unauthenticated
    permit = await admission.admit(requests, tenant)     # Overloaded, DeadlineExceeded, InvalidArgument, Unavailable
    try: serve permit.requests, which may ask for less than ``requests`` did, each when its turn has begun
    finally: permit.settle(usage)                        # exactly once, whichever end

``admit`` may wait in a fair, bounded queue; the caller leaves by cancelling it, and then nothing stays reserved. The
choices of one caller (``n``, several prompts) are admitted together, all or none: caps and budgets are taken for all of
them at once. Each begins when there is a slot for it and gives the slot back when it ends, whatever the others do; so
no caller waits for another one's end while it keeps slots idle.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from contract.errors import TridentError
from contract.generation import GenerationRequest, Usage
from gateway.admission.prompt_tokens import PromptCount
from gateway.config.tenant import Tenant


class Turn(Protocol):
    """The turn of one choice to be served. pool: where; it stays that one unless the choice moves."""

    pool: str

    def begin(self) -> asyncio.Future[None]:
        """Done when there is a slot for the choice; fails with DeadlineExceeded if its time was up before. The first
        choice of a permit has its slot already."""

    @property
    def may_move(self) -> bool:
        """Whether another pool may serve it: not if the pool is the tenant's own or an overflow target's."""

    async def move(self) -> str:
        """Leaves its pool, whose replicas are gone, for another one that serves the tenant, and waits for a slot there.
        Raises Overloaded, DeadlineExceeded."""

    async def go(self, target: str, left_s: float) -> None:
        """Leaves its slot for an overflow target, or for the usual replicas if that is empty, and waits for a slot
        where one is needed, at most ``left_s`` seconds. Nothing is charged again. Raises Overloaded, DeadlineExceeded.
        """

    def fail(self, error: TridentError) -> None:
        """End its wait for a slot with ``error``; nothing if it does not wait."""

    def release(self) -> None:
        """The choice is over, and its slot free. Safe to call twice."""


class Permit(Protocol):
    """An admitted request.

    requests: what may be served, in the order asked: the asked ones, or less of each. turns: one for each of them.
    headers: what the response says about it, in lower case: ``x-ratelimit-*``, and ``x-trident-degraded`` where
    something was lowered. target: the overflow target that shall serve it, empty for the usual replicas. counts: of
    each request's prompt, in tokens.
    """

    requests: tuple[GenerationRequest, ...]
    headers: dict[str, str]
    target: str
    counts: tuple[PromptCount, ...]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """One for each request."""

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
