"""Find the replicas of one source, check each again and again, and let those go that have left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from clients.replica_set.discovery import REFRESH_S, Discovery
from clients.replica_set.replica import Replica
from contract.errors import TridentError

_LOG = logging.getLogger(__name__)
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

    refresh_s: seconds between two discoveries; None: as the source says.
    replicas: by HOST:PORT.
    """

    def __init__(
        self,
        source: Discovery,
        make: Callable[[str], R],
        checks: tuple[Check[R], ...],
        *,
        refresh_s: float | None = None,
        rng: random.Random | None = None,
        name: str = "",
    ) -> None:
        self._source, self._make, self._checks = source, make, checks
        self._refresh_s, self._rng, self._name = refresh_s, rng or random.Random(), name
        self.replicas: dict[str, R] = {}
        self._discovery: asyncio.Future[None] | None = None  # the latest that ``found`` has begun
        self._watch: asyncio.Task | None = None
        self._joining: dict[str, asyncio.Task] = {}
        self._leaving: dict[asyncio.Task, R | None] = {}  # None: it left before its checks were done
        self._problem = ""  # of the latest discovery

    async def found(self) -> None:
        """Wait until replicas were discovered and checked once; discovery goes on. Raises Unavailable: none there."""
        if self._discovery is None or (self._discovery.done() and not self.replicas):
            self._discovery = asyncio.ensure_future(self._discover_and_check())
        if self._watch is None:
            self._watch = asyncio.create_task(self._keep_discovering())
        try:
            await asyncio.shield(self._discovery)
        except TridentError:
            if not self.replicas:  # else a later discovery has found them
                raise

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

    def add(self, url: str) -> None:
        """Check an unknown replica, then let it have requests; one that the source does not name leaves again."""
        if url not in self.replicas and url not in self._joining:
            self._joining[url] = asyncio.create_task(self._join(url))

    def remove(self, url: str) -> None:
        """Send no further request to a replica; it is closed when it has finished those it has."""
        if url in self._joining:
            task = self._joining.pop(url)
            task.cancel()
            self._leave(task, None)
        if url in self.replicas:
            replica = self.replicas.pop(url)
            self._leave(asyncio.create_task(replica.close_when_idle()), replica)

    def retire(self) -> None:
        """Send no further request to any replica; each is closed when it has finished those it has."""
        if self._watch is not None:
            self._watch.cancel()
        for url in [*self.replicas, *self._joining]:
            self.remove(url)

    async def joined(self, timeout_s: float) -> bool:
        """Wait until a replica has been checked for the first time; return False if none is being checked."""
        if self._joining:
            await asyncio.wait(self._joining.values(), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return True
        return False

    async def close(self) -> None:
        """Close every replica at once; calls that still run fail."""
        tasks = [task for task in (self._watch, self._discovery) if task is not None]
        tasks += [*self._joining.values(), *self._leaving]
        self._watch = self._discovery = None
        replicas = [*self.replicas.values(), *filter(None, self._leaving.values())]
        self.replicas, self._joining = {}, {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in replicas))

    async def _keep_discovering(self, at_once: bool = False) -> None:
        while True:
            if not at_once:
                await asyncio.sleep(self._jittered(self._interval_s()))
            at_once = False
            with contextlib.suppress(TridentError):
                await self._discover()

    def _interval_s(self) -> float:
        own_s: float = getattr(self._source, "refresh_s", REFRESH_S)
        refresh_s = own_s if self._refresh_s is None else self._refresh_s
        return refresh_s if self.replicas else min(RETRY_S, refresh_s)

    async def _discover_and_check(self) -> None:
        await self._discover()
        if self._joining:
            await asyncio.wait(self._joining.values())

    async def _discover(self) -> None:
        source = self._source
        try:
            urls = await source.replicas()
        except TridentError as error:
            if str(error) != self._problem:
                _LOG.warning("replicas %r: keeping the %d known before: %s", self._name, len(self.replicas), error)
            self._problem = str(error)
            raise
        self._problem = ""
        if source is not self._source:  # it was replaced meanwhile
            return
        for url in (self.replicas.keys() | self._joining.keys()) - set(urls):
            self.remove(url)
        for url in urls:
            self.add(url)

    async def _join(self, url: str) -> None:
        """Add a replica once it has been checked, so that one which still loads is not picked."""
        replica = self._make(url)
        try:
            await asyncio.gather(*(check.run(replica) for check in self._checks))
        except BaseException:  # it left meanwhile
            if self._joining.get(url) is asyncio.current_task():
                del self._joining[url]
            await replica.close()
            raise
        del self._joining[url]
        self.replicas[url] = replica
        for check in self._checks:
            replica.watch(asyncio.create_task(self._keep_checking(replica, check)))

    async def _keep_checking(self, replica: R, check: Check[R]) -> None:
        while True:
            await asyncio.sleep(self._jittered(check.interval_s))
            await check.run(replica)

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(1 - _JITTER, 1 + _JITTER)

    def _leave(self, task: asyncio.Task, replica: R | None) -> None:
        self._leaving[task] = replica
        task.add_done_callback(lambda done: self._leaving.pop(done, None))
