"""One client over many replicas: finds them, watches their health, picks one per request, fails over.

    async with BalancedClient("dns:///trident:8001", pick=picks.token_aware) as client:
        async for delta in client.generate("def fibonacci(n):", max_tokens=64):
            ...

A request that fails before its first token goes to another replica at once; after it, never.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterable, Mapping
from typing import Any

import grpc.aio

from clients.async_client import AsyncClient
from clients.generations import Generations
from clients.replica_set import costs, picks
from clients.replica_set.booking import Booking, Work
from clients.replica_set.costs import Costs
from clients.replica_set.discovery import Discovery, source
from clients.replica_set.health import Health, HealthPolicy
from clients.replica_set.picks import Ask, Pick
from clients.running import Running
from clients.wire import request
from clients.wire.answer import Answer
from clients.wire.completion import Completion
from clients.wire.connection import DEFAULT_MODEL, TLS, trace_context
from clients.wire.retries import RetryBudget, RetryPolicy, RetrySchedule
from clients.wire.token_stream import TokenStream
from contract.errors import InvalidArgument, TridentError, Unavailable
from contract.generation import GenerationRequest
from contract.load import ReplicaLoad

_LOG = logging.getLogger(__name__)


class BalancedClient(Generations[TokenStream]):
    """Talks to a set of replicas that serve the same model.

    replicas: ``"HOST:PORT,HOST:PORT"``, ``"dns:///NAME:PORT"``, ``"file:///PATH"``, a list, or a Discovery; asked
    again every ``refresh_s``. pick: a policy of ``clients.replica_set.picks``, or its name. The other arguments are
    those of AsyncClient and hold for every replica. One event loop uses it; close it there.
    """

    def __init__(
        self,
        replicas: str | Iterable[str] | Discovery,
        *,
        pick: Pick | str = picks.power_of_two_choices,
        model: str = DEFAULT_MODEL,
        tls: TLS | bool | None = None,
        api_key: str = "",
        metadata: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        retry: RetryPolicy | None = None,
        budget: RetryBudget | None = None,
        health: HealthPolicy | None = None,
        refresh_s: float = 30.0,
        rng: random.Random | None = None,
    ) -> None:
        if isinstance(pick, str) and pick not in picks.BY_NAME:
            raise InvalidArgument("pick", f"got {pick!r}; allowed is {', '.join(picks.BY_NAME)}")
        self.model = model
        self.costs = Costs()
        self._source = source(replicas)
        self._pick = picks.BY_NAME[pick] if isinstance(pick, str) else pick
        self._client_options = {
            "model": model,
            "tls": tls,
            "api_key": api_key,
            "metadata": tuple(dict(metadata).items()),
        }
        self._retry = retry or RetryPolicy()
        self._budget = budget or RetryBudget(reserve=100.0)  # a replica that dies takes all its requests with it
        self._policy = health or HealthPolicy()
        self._refresh_s = refresh_s
        self._rng = rng or random.Random()
        self._replicas: dict[str, _Replica] = {}
        self._watch: asyncio.Task | None = None
        self._found: asyncio.Future | None = None  # done when the first look for replicas is
        self._closing: set[asyncio.Task] = set()
        self._running = Running()
        self._turn = 0

    async def __aenter__(self) -> BalancedClient:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the watching and closes every connection; streams that still run are cancelled."""
        self._running.cancel()  # also those at replicas that were let go, which end with them
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        leaving, self._replicas = list(self._replicas.values()), {}
        await asyncio.gather(*(replica.close() for replica in leaving), *self._closing)

    def loads(self) -> list[ReplicaLoad]:
        """What the picks see now."""
        return [replica.load() for replica in self._replicas.values()]

    def generate(self, prompt: str | None = None, *, session: str = "", **arguments: Any) -> TokenStream:
        """As ``AsyncClient.generate``; ``session`` names the conversation that ``session_affinity`` keeps together."""
        traceparent, timings = arguments.pop("traceparent", ""), arguments.pop("timings", False)
        asked = request.build(prompt, **arguments)
        return self.open(asked, traceparent=traceparent, timings=timings, session=session)

    def open(
        self, asked: GenerationRequest, *, traceparent: str = "", timings: bool = False, session: str = ""
    ) -> TokenStream:
        """A stream for a request that is already valid. The replica is picked when it is first read."""
        self._turn += 1
        ask = Ask(self._turn, session, costs.prefix(asked))
        door = _Door(self, ask, trace_context(traceparent))
        schedule = RetrySchedule(self._retry, self._budget, self._rng)
        return self._running.add(TokenStream(door, request.identified(asked), schedule))

    async def complete(self, prompt: str | None = None, **arguments: Any) -> Completion:
        """The whole answer, in one response; arguments as for ``generate``."""
        return await self.generate(prompt, **{"stream": False, **arguments}).complete()

    async def stop(self, request_id: str, timeout_s: float = 5.0) -> None:
        """Ends a running request by its id, wherever it runs; replicas that do not know it ignore it.

        Raises the first error if no replica at all could be asked.
        """
        await self.found()
        asked = [replica.client.stop(request_id, timeout_s) for replica in self._replicas.values()]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        if all(isinstance(error, BaseException) for error in errors):
            raise errors[0]

    async def found(self) -> None:
        """Waits until the replicas have been looked for, and probed, once. Raises Unavailable if that failed."""
        if self._watch is None:
            self._found = asyncio.get_running_loop().create_future()
            self._watch = asyncio.create_task(self._keep_watch(self._found))
        await asyncio.shield(self._found)

    async def _keep_watch(self, found: asyncio.Future) -> None:
        """Looks for replicas for ever, and probes each on its own schedule."""
        while True:
            try:
                await self._refresh()
            except TridentError as error:
                if self._replicas:
                    _LOG.warning("keeping the %d replicas known before: %s", len(self._replicas), error)
                else:
                    if not found.done():
                        found.set_exception(error)
                        found.exception()  # seen, even if nobody waits
                    self._watch = None  # the next request looks again
                    return
            if not found.done():
                found.set_result(None)
            await asyncio.sleep(self._refresh_s * self._rng.uniform(0.9, 1.1))

    async def _refresh(self) -> None:
        urls = await self._source.replicas()
        for url in self._replicas.keys() - set(urls):
            self._let_go(self._replicas.pop(url))
        new = [_Replica(AsyncClient(url, **self._client_options)) for url in urls if url not in self._replicas]
        # A new replica is probed before it gets anything, so that one that is still loading is not picked.
        await asyncio.gather(*(replica.probe(self._policy) for replica in new))
        for replica in new:
            self._replicas[replica.client.url] = replica
            replica.probing = asyncio.create_task(replica.keep_probing(self._policy, self._rng))

    def _let_go(self, replica: _Replica) -> None:
        """Nothing new goes there; what it has, it finishes."""
        task = asyncio.create_task(replica.close_when_idle())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class _Replica:
    """One replica and what is known of it."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.health = Health()
        self.work = Work()
        self.probing: asyncio.Task | None = None

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            self.client.url,
            pending_tokens=round(self.work.pending_tokens),
            healthy=bool(self.health.healthy),
            outstanding=self.work.outstanding,
        )

    async def probe(self, policy: HealthPolicy) -> None:
        try:
            ok = await self.client.model_ready(self.client.model, policy.timeout_s)
        except TridentError:
            ok = False
        self.observe(ok, policy)

    def observe(self, ok: bool, policy: HealthPolicy) -> None:
        before = self.health.healthy
        self.health = self.health.after(ok, policy)
        if self.health.healthy is not before:
            _LOG.info("replica %s is %s", self.client.url, "healthy" if self.health.healthy else "not healthy")

    async def keep_probing(self, policy: HealthPolicy, rng: random.Random) -> None:
        while True:
            await asyncio.sleep(policy.interval_s * rng.uniform(0.9, 1.1))
            await self.probe(policy)

    async def close_when_idle(self) -> None:
        if self.probing is not None:
            self.probing.cancel()
        await self.work.idle.wait()
        await self.close()

    async def close(self) -> None:
        if self.probing is not None:
            self.probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.probing
            self.probing = None
        self.work.idle.set()
        await self.client.close()


class _Door:
    """Where one request may go: any replica, but not twice to one while another is left."""

    def __init__(self, client: BalancedClient, ask: Ask, traceparent: str) -> None:
        self._client, self._ask, self._traceparent = client, ask, traceparent
        self._tried: set[str] = set()

    async def open(self, asked: GenerationRequest, left_s: float) -> _Booked:
        client = self._client
        if not client._replicas:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(client.found(), left_s)
        loads = client.loads()
        fresh = [load for load in loads if load.healthy and load.name not in self._tried]
        if not fresh:
            self._tried.clear()
        name = client._pick(fresh or loads, self._ask, client._rng).name
        self._tried.add(name)
        replica = client._replicas[name]
        call = replica.client.call(asked, left_s, self._traceparent, timings=True)
        return _Booked(client, replica, call, asked)

    def has_alternative(self) -> bool:
        return any(load.healthy and load.name not in self._tried for load in self._client.loads())


class _Booked:
    """A call and what is booked for it; both end together."""

    def __init__(
        self, client: BalancedClient, replica: _Replica, call: grpc.aio.UnaryStreamCall, asked: GenerationRequest
    ) -> None:
        self.call, self.url = call, replica.client.url
        self._client, self._replica = client, replica
        self._booking = Booking(replica.work, client.costs, asked)

    def began(self) -> None:
        self._booking.began()

    def release(self, error: TridentError | None, answer: Answer) -> None:
        self._booking.release()
        if error is None:
            self._replica.observe(True, self._client._policy)
            self._booking.learn(answer)
        elif isinstance(error, Unavailable):
            self._replica.observe(False, self._client._policy)
