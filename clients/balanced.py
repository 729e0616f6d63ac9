"""One client over many replicas: finds them, watches their health, picks one per request, fails over.

    async with BalancedClient("dns:///trident:8001", pick=picks.token_aware) as client:
        async for delta in client.generate("def fibonacci(n):", max_tokens=64):
            ...

A request that fails before its first token goes to another replica at once; later it never does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from clients.base import AsyncBaseClient
from clients.replica_set import costs, picks
from clients.replica_set.costs import Costs
from clients.replica_set.discovery import Discovery, source
from clients.replica_set.picks import Pick, ReplicaLoad, RoutingRequest
from clients.replica_set.replica import HealthPolicy, Replica, ReservedCall
from clients.replica_set.replica_set import Check, ReplicaSet
from clients.wire import infer_request, request
from clients.wire.arguments import ClientOptions, GenerateArguments
from clients.wire.completion import Completion
from clients.wire.connection import pairs, trace_context
from clients.wire.retries import RetryBudget
from clients.wire.stream_model import StreamModel
from clients.wire.token_stream import TokenStream
from contract.errors import DeadlineExceeded, InvalidArgument, TridentError
from contract.generation import GenerationRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack


class BalancedClient(AsyncBaseClient):
    """Talk to a set of replicas that serve the same model. Use and close it on one event loop.

    replicas: ``"HOST:PORT,HOST:PORT"``, ``"dns:///NAME:PORT"``, ``"file:///PATH"``, a list, or a Discovery.
    pick: a policy of ``clients.replica_set.picks``, or its name.
    health: when a replica counts as healthy.
    refresh_s: seconds between two discoveries; None: 0.5 for a file, 5 for DNS, 30 for a Discovery that sets none.
    options: see ``ClientOptions``; they hold for every replica.
    """

    def __init__(
        self,
        replicas: str | Iterable[str] | Discovery,
        *,
        pick: Pick | str = picks.power_of_two_choices,
        health: HealthPolicy | None = None,
        refresh_s: float | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        if isinstance(pick, str) and pick not in picks.BY_NAME:
            raise InvalidArgument("pick", f"must be one of {', '.join(picks.BY_NAME)}, got {pick!r}")
        if refresh_s is not None and not refresh_s > 0:
            raise InvalidArgument("refresh_s", f"must be more than 0, or None, got {refresh_s}")
        options["metadata"] = pairs(options.get("metadata", ()))  # an iterator can be read once
        # A replica that fails does so for all its requests.
        options["budget"] = options.get("budget") or RetryBudget(reserve=100.0)
        super().__init__(**options)
        self.costs = Costs()
        self._pick = picks.BY_NAME[pick] if isinstance(pick, str) else pick
        policy = health or HealthPolicy()
        self._set: ReplicaSet[Replica] = ReplicaSet(
            source(replicas),
            lambda url: Replica(self._connection(url), policy),
            (Check(lambda replica: self._probe(replica, policy.timeout_s), policy.interval_s),),
            refresh_s=refresh_s,
            rng=self._rng,
        )
        self._turn = 0

    async def close(self) -> None:
        """Stop watching and close every connection. Streams that still run are cancelled."""
        self._cancel_streams()
        await self._set.close()

    def loads(self) -> list[ReplicaLoad]:
        """Return what the picks see now."""
        return [replica.load() for replica in self._set.replicas.values()]

    def generate(
        self,
        prompt: str | None = None,
        *,
        session: str = "",
        traceparent: str = "",
        timings: bool = False,
        **arguments: Unpack[GenerateArguments],
    ) -> TokenStream:
        """Generate text as ``AsyncClient.generate`` does. session: of a conversation, for ``session_affinity``."""
        generation = request.build(prompt, **arguments)
        return self.open(generation, traceparent=traceparent, timings=timings, session=session)

    async def complete(
        self, prompt: str | None = None, *, session: str = "", **arguments: Unpack[GenerateArguments]
    ) -> Completion:
        """Return the whole text, sent in one response; arguments as for ``generate``."""
        arguments.setdefault("stream", False)
        return await self.generate(prompt, session=session, **arguments).complete()

    def open(
        self, generation: GenerationRequest, *, traceparent: str = "", timings: bool = False, session: str = ""
    ) -> TokenStream:
        """Return a stream for a valid request. A replica is picked when it is first read."""
        self._turn += 1
        routing = RoutingRequest(self._turn, session, costs.prefix(generation))
        model, context = StreamModel(self._options.get("model"), generation.stream), trace_context(traceparent)
        route = _Route(self, model, routing, context)
        return self._tracked(TokenStream(route, request.with_id(generation), self._schedule()))

    async def stop(self, request_id: str, timeout_s: float = 5.0) -> None:
        """End a running request by its id, wherever it runs. Raises the first error if no replica could be reached."""
        await self.found()
        calls = [replica.channel.stop(request_id, timeout_s) for replica in self._set.replicas.values()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors and len(errors) == len(results):
            raise errors[0]

    async def found(self) -> None:
        """Wait until the replicas have been discovered and probed once. Raises Unavailable if there is none."""
        await self._set.found()

    async def _probe(self, replica: Replica, timeout_s: float) -> None:
        ok = False
        with contextlib.suppress(TridentError):
            ok = await replica.channel.model_ready(self.model, timeout_s)
        replica.observe(ok)


class _Route:
    """The route of one request: any replica, but none twice while a healthy one is untried."""

    def __init__(self, client: BalancedClient, model: StreamModel, routing: RoutingRequest, traceparent: str) -> None:
        self._client, self._set = client, client._set
        self._model, self.refused = model, model.refused
        self._routing, self._traceparent = routing, traceparent
        self._tried: set[str] = set()

    async def open(self, generation: GenerationRequest, remaining_s: float) -> ReservedCall:
        if not self._set.replicas:
            try:
                await asyncio.wait_for(self._set.found(), remaining_s)
            except asyncio.TimeoutError as exc:
                raise DeadlineExceeded("the deadline passed before a replica was found") from exc
        untried = self._untried()
        if not untried:
            self._tried.clear()
        loads = untried or [replica.load() for replica in self._set.replicas.values()]
        client = self._client
        replica = self._set.replicas[client._pick(loads, self._routing, client._rng).name]
        self._tried.add(replica.url)
        model = replica.channel.model(self._model)
        payload = infer_request.generation(generation, model, remaining_s, timings=True)
        metadata = replica.metadata(generation.request_id, self._traceparent)
        return ReservedCall(replica, client.costs, generation, payload, remaining_s, metadata)

    def has_alternative(self) -> bool:
        return bool(self._untried())

    def _untried(self) -> list[ReplicaLoad]:
        loads = [replica.load() for replica in self._set.replicas.values() if replica.url not in self._tried]
        return [load for load in loads if load.healthy]
