"""The boundary between the doors and admission: who asks, and the right to be served until the stream's end.

The doors (HTTP and gRPC) do, for every request, in this order:

    tenant = keys.tenant(api_key)                        # Unauthenticated
    permit = await admission.admit(request, tenant)      # Overloaded, DeadlineExceeded, PermissionDenied, NotFound
    try: serve permit.request, which may ask for less than ``request`` did
    finally: permit.settle(usage)                        # exactly once, whichever end

``admit`` may wait in a fair, bounded queue; the caller leaves by cancelling it, and then nothing stays reserved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from contract.errors import Overloaded
from contract.generation import GenerationRequest, Usage


@dataclass(frozen=True)
class Tenant:
    """Who pays for a request and is kept apart from the others.

    name: stable, from configuration, never from the request: it keys caches and labels metrics. models: the public
    model names it may use, empty for all. pool: the label of the replicas it is pinned to, empty for any.
    priority: 0 is the most urgent class. weight: its share among tenants that compete.
    """

    name: str = "anonymous"
    models: tuple[str, ...] = ()
    pool: str = ""
    priority: int = 1
    weight: float = 1.0


class Permit(Protocol):
    """An admitted request.

    request: what may be served: the asked one, or less of it. headers: what the response says about it, in lower
    case: ``x-ratelimit-*``, and ``x-trident-degraded`` where something was lowered.
    """

    request: GenerationRequest
    headers: Mapping[str, str]

    def settle(self, usage: Usage | None) -> None:
        """The stream is over: what was used is charged, the rest of the reservation comes back.

        None: nothing was generated, all of it comes back. A stream cut midway is settled with what it had produced.
        Never blocks and never raises; state that lives elsewhere is written behind. A second call does nothing.
        """


class Admission(Protocol):
    """Decides whether, and when, a request may be served."""

    async def admit(self, request: GenerationRequest, tenant: Tenant) -> Permit:
        """The permit, as soon as it is this request's turn.

        Raises Overloaded with ``retry_after_s`` (budget, concurrency or queue full), DeadlineExceeded (it expired in
        the queue), PermissionDenied. An error may carry ``headers`` (a mapping such as a permit's), which the
        refusal then bears.
        """


class Keys(Protocol):
    """API keys and whose they are."""

    def tenant(self, api_key: str) -> Tenant:
        """The tenant of the key, "" if none was sent. Raises Unauthenticated."""

    def named(self, tenant: str, key: str) -> Tenant | None:
        """For work that outlives its request: the tenant of this name as its key ``key`` sees it today, where ``key``
        is the name of its last level and empty if it has none. None if there is no such key any more."""


class Everyone:
    """No keys: every caller is one and the same tenant. The default on a private network."""

    def tenant(self, api_key: str) -> Tenant:
        return Tenant()

    def named(self, tenant: str, key: str) -> Tenant | None:
        return Tenant() if tenant == Tenant.name and not key else None


@dataclass(eq=False)
class InFlightCap:
    """The smallest admission there is: so many requests at once, the next one refused at once.

    retry_after_s: what a refused caller is told.
    """

    limit: int
    retry_after_s: float = 1.0
    in_flight: int = 0

    async def admit(self, request: GenerationRequest, tenant: Tenant) -> Permit:
        if self.in_flight >= self.limit:
            raise Overloaded(f"{self.in_flight} requests are in flight and no more are taken", self.retry_after_s)
        self.in_flight += 1
        return _Slot(request, self)


@dataclass(eq=False)
class _Slot:
    request: GenerationRequest
    cap: InFlightCap | None
    headers: Mapping[str, str] = field(default_factory=dict)

    def settle(self, usage: Usage | None) -> None:
        if self.cap is not None:
            self.cap.in_flight -= 1
            self.cap = None
