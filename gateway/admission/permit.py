"""The interface between the endpoints and admission: a permit to generate, held until the end of the stream.

For every request an endpoint does, in this order:

    tenant = keys.tenant(api_key)                        # Unauthenticated
    permit = await admission.admit(requests, tenant)     # Overloaded, DeadlineExceeded, InvalidArgument, Unavailable
    try: serve permit.requests, perhaps with fewer max_tokens than ``requests``, each when its turn has begun
    finally: permit.settle(usage)                        # once, at the end

``admit`` may wait in a fair, bounded queue; cancelling it releases everything. The choices of one request (``n``,
several prompts) are admitted together or not at all: caps and budgets are taken for all of them. Each choice begins
when it gets a slot and releases the slot when it ends, so that no request keeps slots idle.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from contract.errors import TridentError
from contract.generation import GenerationRequest, Usage
from gateway.admission.prompt_tokens import PromptCount
from gateway.config.tenant import Tenant


class Turn(Protocol):
    """The slot of one choice. pool: where the slot is."""

    pool: str

    def begin(self) -> asyncio.Future[None]:
        """Return a future that is done when the choice has its slot; it fails with DeadlineExceeded. The first choice
        of a permit has its slot already."""

    @property
    def may_move(self) -> bool:
        """Whether another pool may serve the choice: not if the tenant or an overflow target names the pool."""

    async def move(self) -> str:
        """Wait for a slot in another public pool, because the replicas of its own are down, and return that pool.

        Raises: Overloaded, DeadlineExceeded.
        """

    async def go(self, target: str, remaining_s: float) -> None:
        """Release the slot and wait for one at an overflow target, or at the replicas if ``target`` is "".

        remaining_s: longest wait. Upstreams need no slot. Nothing is charged again.
        Raises: Overloaded, DeadlineExceeded.
        """

    def fail(self, error: TridentError) -> None:
        """End its wait for a slot with ``error``; nothing if it does not wait."""

    def release(self) -> None:
        """Release the slot. Safe to call twice."""


class Permit(Protocol):
    """An admitted request.

    requests: as requested, in order, perhaps with fewer ``max_tokens``.
    headers: of the response, in lower case: ``x-ratelimit-*``, and ``x-trident-degraded`` if it is degraded.
    target: the overflow target that serves it; "" for replicas.
    counts: tokens of each request's prompt.
    """

    requests: tuple[GenerationRequest, ...]
    headers: dict[str, str]
    target: str
    counts: tuple[PromptCount, ...]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """One for each request."""

    def settle(self, usage: Usage | None) -> None:
        """Charge ``usage`` and return the rest of the reservation. A second call does nothing.

        usage: of all choices, also of a stream that was cut; None if nothing was generated.
        Does not block or raise; shared state is written in the background.
        """


class Keys(Protocol):
    """A table of API keys."""

    def tenant(self, api_key: str) -> Tenant:
        """Return the tenant of a key; "" is no key. Raises Unauthenticated."""

    def named(self, tenant: str, key: str) -> Tenant | None:
        """Return a tenant as its key sees it now, for work that outlives its request.

        key: name of the key's level; "" without keys. None if the key does not exist any more.
        """
