"""How a pool's last ready replica leaves: when its successor has been checked, in every worker of the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import time

from contract.background import Background
from gateway.admission.hub_link import HubLink
from gateway.routing.replicas import Replicas

SUCCESSOR_S = 1.5  # less than the time in which a server must be answered (server/registration.py: TIMEOUT_S)


class Succession:
    """Waits before a replica leaves: a rolling upgrade stops it as soon as the next one is ready, which may be sooner
    than the first probe of that one here. workers: of the gateway, this one included."""

    def __init__(self, replicas: Replicas, link: HubLink | None, workers: int) -> None:
        self._replicas, self._link, self._others = replicas, link, workers - 1 if link is not None else 0
        self._answers: dict[str, asyncio.Semaphore] = {}  # of other workers, by the URL that leaves
        self._background = Background()
        if link is not None:
            link.topics |= {"leaves": self._requested, "left": self._answered}

    async def wait(self, pool: str, url: str) -> None:
        """Return when each worker has another ready replica, or checks none, at most SUCCESSOR_S later."""
        answers = self._answers[url] = asyncio.Semaphore(0)
        if self._link is not None:
            self._link.publish("leaves", pool, url)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all(answers, pool, url), SUCCESSOR_S)
        self._answers.pop(url, None)

    async def _all(self, answers: asyncio.Semaphore, pool: str, url: str) -> None:
        for _ in range(self._others):
            await answers.acquire()
        await self._here(pool, url)  # last: who answered has passed on before which replicas there are

    async def _here(self, pool: str, url: str) -> None:
        deadline_s = time.monotonic() + SUCCESSOR_S
        while [replica.url for replica in self._replicas.ready_in(pool)] == [url]:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not await self._replicas.joined(pool, remaining_s):
                return

    def _requested(self, pool: str, url: str) -> None:
        async def answer() -> None:
            await self._here(pool, url)
            assert self._link is not None
            self._link.publish("left", url)

        self._background.start(answer())

    def _answered(self, url: str) -> None:
        if url in self._answers:
            self._answers[url].release()
