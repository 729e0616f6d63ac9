"""One replica of a set: its channel, its health, the work reserved there, and each call to it.

A replica is not healthy after three failures in a row, and again after two successes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

from clients.replica_set.costs import Costs
from clients.replica_set.picks import ReplicaLoad
from clients.replica_set.reservation import Reservation, Work
from clients.wire.channel import AsyncChannel, Metadata
from clients.wire.connection import Connection
from clients.wire.response_reader import ResponseReader
from contract.errors import InvalidArgument, TridentError, Unavailable
from contract.generation import GenerationRequest

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class HealthPolicy:
    """fail_after: consecutive failures that take a replica out; recover_after: consecutive successes that bring
    it back. Probes run every ``interval_s``, spread by up to a tenth, and fail after ``timeout_s``."""

    fail_after: int = 3
    recover_after: int = 2
    interval_s: float = 10.0
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("fail_after", "recover_after"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"health.{name}", f"must be 1 or more, got {getattr(self, name)}")
        for name in ("interval_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"health.{name}", f"must be more than 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Health:
    """healthy None: never observed. run: consecutive observations of the opposite of ``healthy``."""

    healthy: bool | None = None
    run: int = 0

    def after(self, ok: bool, policy: HealthPolicy) -> Health:
        """Return the state after one more observation. The first one decides alone."""
        if self.healthy is None or ok is self.healthy:
            return Health(ok)
        needed = policy.recover_after if ok else policy.fail_after
        return Health(ok) if self.run + 1 >= needed else Health(self.healthy, self.run + 1)


class Replica:
    """One replica. Extend it with what a policy needs to know beyond health and reserved work.

    healthy_since_s, progress_s: when it last became healthy, and last generated a token, on the monotonic clock.
    """

    def __init__(self, connection: Connection, health_policy: HealthPolicy) -> None:
        self.channel, self.url = AsyncChannel(connection), connection.url
        self.health = Health()
        self.work = Work()
        self.healthy_since_s = time.monotonic()
        self.progress_s = 0.0
        self._health_policy = health_policy
        self._tasks: list[asyncio.Task] = []

    def load(self, **reported: Any) -> ReplicaLoad:
        """Return what a routing policy sees of it. reported: further fields, of its metrics."""
        return ReplicaLoad(
            self.url,
            pending_tokens=round(self.work.pending_tokens),
            healthy=bool(self.health.healthy),
            outstanding=self.work.outstanding,
            **reported,
        )

    def observe(self, ok: bool) -> None:
        """Count one success or failure of a probe or a request."""
        before = self.health.healthy
        self.health = self.health.after(ok, self._health_policy)
        if self.health.healthy is not before:
            _LOG.info("replica %s is %s", self.url, "healthy" if self.health.healthy else "not healthy")
            if self.health.healthy and before is False:
                self.healthy_since_s = time.monotonic()

    def sent(self) -> None:
        """Take note of a request that has been sent."""

    def ended(self, error: TridentError | None, silent_s: float, sent_s: float = math.inf) -> None:
        """Note a request's end. silent_s: since the replica last made a token for any. sent_s: when it was sent."""
        if error is None or isinstance(error, Unavailable):
            self.observe(error is None)

    def metadata(self, request_id: str, traceparent: str = "") -> Metadata:
        """Return the gRPC metadata of one call."""
        return self.channel.connection.call_metadata(request_id, traceparent)

    def watch(self, task: asyncio.Task) -> None:
        """Cancel this task when the replica leaves its set."""
        self._tasks.append(task)

    async def close(self) -> None:
        """Close the channel; calls that still run fail."""
        self.stop_watching()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.channel.close()

    async def close_when_idle(self) -> None:
        """Close the channel when the last request has ended."""
        self.stop_watching()
        await self.work.idle.wait()
        await self.close()

    def stop_watching(self) -> None:
        for task in self._tasks:
            task.cancel()


class ReservedCall:
    """A call and the work reserved for it; both end together. An Attempt of ``clients.wire.token_stream``."""

    def __init__(
        self,
        replica: Replica,
        costs: Costs,
        request: GenerationRequest,
        payload: bytes,
        remaining_s: float,
        metadata: Metadata,
    ) -> None:
        self.url = replica.url
        self._replica = replica
        self.call = replica.channel.generate(payload, remaining_s, metadata)
        self._reservation = Reservation(replica.work, costs, request)
        replica.sent()
        self._sent_s = time.monotonic()

    def began(self) -> None:
        self._reservation.began()

    def release(self, error: TridentError | None, response: ResponseReader) -> None:
        self._reservation.release()
        # Time in the queue of a replica that serves other requests is not silence.
        heard_s = max(self._sent_s, self._replica.progress_s)
        self._replica.ended(error, 0.0 if response.started else time.monotonic() - heard_s, self._sent_s)
        if error is None:
            self._reservation.learn(response)
