"""Find the replicas of one source, check each again and again, and let those go that have left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from clients.replica_set.discovery import Discovery
from clients.replica_set.replica import Replica
from contract.errors import TridentError

_LOG = logging.getLogger(__name__)
REFRESH_S = 30.0
RETRY_S = 1.0  # between discoveries as long as no replica is known
_JITTER = 0.1  # of every interval, so that clients do not poll in step

R = TypeVar("R", bound=Replica)


@dataclass(frozen=True)
class Check(Generic[R]):
    """What is run for each replica before it gets requests, and every ``interval_s`` after that."""

    run: Callable[[R], Awaitable[None]]
    interval_s: float


class ReplicaSet(Generic[R]):
    """The replicas that a source names. Use and close it on one event loop.

    replicas: by HOST:PORT.
    """

    def __init__(
        self,
        source: Discovery,
        make: Callable[[str], R],
        checks: tuple[Check[R], ...],
        *,
        refresh_s: float = REFRESH_S,
        rng: random.Random | None = None,
        name: str = "",
    ) -> None:
        self._source, self._make, self._checks = source, make, checks
        self._refresh_s, self._rng, self._name = refresh_s, rng or random.Random(), name
        self.replicas: dict[str, R] = {}
        self._discovery: asyncio.Future[None] | None = None  # the latest that ``found`` has begun
        self._watch: asyncio.Task | None = None
        self._leaving: dict[asyncio.Task, R] = {}

    async def found(self) -> None:
        """Wait until the replicas have been discovered and checked once. Raises Unavailable if there is none.

        Discovery then goes on in the background.
        """
        if self._discovery is None or (self._discovery.done() and not self.replicas):
            self._discovery = asyncio.ensure_future(self._discover())
        if self._watch is None:
            self._watch = asyncio.create_task(self._keep_discovering())
        await asyncio.shield(self._discovery)

    def start(self) -> None:
        """Discover now, and again and again, without waiting for it."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.create_task(self._keep_discovering(at_once=True))

    def change(self, source: Discovery) -> None:
        """Replace the source. Replicas that it does not name finish their requests."""
        self._source = source
        if self._watch is not None:  # else nothing has been discovered yet
            self.start()

    def retire(self) -> None:
        """Send no further request to any replica; each is closed when it has finished those it has."""
        if self._watch is not None:
            self._watch.cancel()
        replicas, self.replicas = list(self.replicas.values()), {}
        for replica in replicas:
            self._let_go(replica)

    async def close(self) -> None:
        """Close every replica at once; calls that still run fail."""
        pending = [task for task in (self._watch, self._discovery) if task is not None]
        self._watch = self._discovery = None
        replicas, self.replicas = [*self.replicas.values(), *self._leaving.values()], {}
        for task in (*pending, *self._leaving):
            task.cancel()
        await asyncio.gather(*pending, *self._leaving, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in replicas))

    async def _keep_discovering(self, at_once: bool = False) -> None:
        while True:
            if not at_once:
                await asyncio.sleep(self._jittered(self._refresh_s if self.replicas else RETRY_S))
            at_once = False
            with contextlib.suppress(TridentError):
                await self._discover()

    async def _discover(self) -> None:
        source = self._source
        try:
            urls = await source.replicas()
        except TridentError as error:
            _LOG.warning("replicas %r: keeping the %d known before: %s", self._name, len(self.replicas), error)
            raise
        if source is not self._source:  # it was replaced meanwhile
            return
        for url in self.replicas.keys() - set(urls):
            self._let_go(self.replicas.pop(url))
        new = [self._make(url) for url in urls if url not in self.replicas]
        # Checked before they get requests, so that a replica which still loads is not picked.
        await asyncio.gather(*(check.run(replica) for replica in new for check in self._checks))
        for replica in new:
            if source is not self._source or replica.url in self.replicas:
                await replica.close()
                continue
            self.replicas[replica.url] = replica
            for check in self._checks:
                replica.watch(asyncio.create_task(self._keep_checking(replica, check)))

    async def _keep_checking(self, replica: R, check: Check[R]) -> None:
        while True:
            await asyncio.sleep(self._jittered(check.interval_s))
            await check.run(replica)

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(1 - _JITTER, 1 + _JITTER)

    def _let_go(self, replica: R) -> None:
        task = asyncio.create_task(replica.close_when_idle())
        self._leaving[task] = replica
        task.add_done_callback(lambda done: self._leaving.pop(done, None))
