"""The replicas behind the gateway: found, watched, picked, booked and let go. The async side of routing and health.

Pools are sets of replicas with a name; each is looked for again and again (``replica_set.discovery``). A request is
booked at a replica when it is sent and settled when it ends, so that the picks see at once what this process has
under way, and the metrics pages tell what everybody else has.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
import grpc.aio

from clients.replica_set import costs, picks
from clients.replica_set.booking import Booking, Work
from clients.replica_set.costs import Costs
from clients.replica_set.discovery import Discovery, source
from clients.replica_set.health import Health, HealthPolicy
from clients.replica_set.picks import Ask
from clients.wire import infer_request, status
from clients.wire.answer import Answer
from clients.wire.connection import TLS, Connection
from clients.wire.failures import RetryHint, from_rpc
from clients.wire.retries import NO_RETRY, RetryBudget, RetryPolicy, RetrySchedule
from clients.wire.token_stream import TokenStream
from contract.errors import DeadlineExceeded, EngineFailed, TridentError, Unavailable
from contract.generation import GenerationRequest, SamplingParams
from contract.load import ReplicaLoad
from contract.priority import HIGHEST, PARAMETER
from gateway.admission.sharing import UNKNOWN, Capacity, OthersLoad, capacity
from gateway.config.settings import SCORED, Settings
from gateway.routing import replica_metrics, scoring
from gateway.routing.circuit_breaker import SILENCE_S, Breaker, BreakerPolicy, BreakerState, token_digest
from gateway.routing.replica_metrics import ReplicaMetrics
from gateway.routing.scoring import Candidate, Explanation, Question, Router

_LOG = logging.getLogger(__name__)
REFRESH_S = 30.0
MAX_PAGE_BYTES = 4 * 1024 * 1024
# A shorter beginning is computed faster than it is worth sending a request out of its way.
SHORTEST_PREFIX = 256
FAILOVER = RetryPolicy(attempts=4)

Metadata = tuple[tuple[str, str | bytes], ...]


class Replica:
    """One replica and what is known of it."""

    def __init__(self, url: str, pool: str, metrics_url: str, tls: TLS | None = None) -> None:
        self.url, self.pool, self.metrics_url = url, pool, metrics_url
        self.health = Health()
        self.breaker = Breaker()
        self.since_s = time.monotonic()
        self.page = ReplicaMetrics()
        self.takes_priority = False  # whether the engine orders its queue by request_priority; its page says so
        self.progress_s = 0.0  # when it was last seen to make something, for whomever
        self._steps = 0.0
        self.deep_digest = ""  # of the latest deep probe, empty if it failed
        self.work = Work()
        self.slots = 0  # requests it can run at once, as its metrics said when they could be read last; 0: never
        self.others = OthersLoad()
        self.own_requests = 0  # the most that this process had there since its metrics were read last
        self.probing = 0  # deep probes under way, which are in no booking
        self._connection = Connection(url, tls)
        self._channel: grpc.aio.Channel | None = None
        self._generate: Callable | None = None
        self.tasks: list[asyncio.Task] = []

    def candidate(self, now_s: float) -> Candidate:
        load = ReplicaLoad(
            self.url,
            running=self.page.running,
            waiting=self.page.waiting,
            max_running=self.page.max_running,
            kv_usage=self.page.kv_usage,
            pending_tokens=round(self.work.pending_tokens),
            healthy=bool(self.health.healthy),
            outstanding=self.work.outstanding,
            tokens_per_s=self.work.pace.tokens_per_s(self.page.max_running),
        )
        return Candidate(load, not self.breaker.allows(now_s), now_s - self.since_s)

    @property
    def own(self) -> int:
        """Requests that this process has there now, probes included."""
        return self.work.outstanding + self.probing

    def sent(self) -> None:
        """One more request of this process is there."""
        self.own_requests = max(self.own_requests, self.own)

    def fit(self, now_s: float) -> bool:
        return bool(self.health.healthy) and self.breaker.allows(now_s)

    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            options = self._connection.options()
            self._channel = (
                grpc.aio.secure_channel(self.url, self._connection.tls.credentials(), options)
                if self._connection.tls
                else grpc.aio.insecure_channel(self.url, options)
            )
        return self._channel

    def metadata(self, request_id: str, traceparent: str = "") -> Metadata:
        return self._connection.call_metadata(request_id, traceparent)

    def generate(self, payload: bytes, left_s: float, metadata: Metadata) -> grpc.aio.UnaryStreamCall:
        """Sends one ModelInferRequest and returns the raw call, which answers with ModelStreamInferResponses."""
        if self._generate is None:
            self._generate = self.channel().unary_stream(infer_request.GENERATE)
        return self._generate(payload, timeout=left_s, metadata=metadata)

    def prioritised(self, payload: bytes, priority: float | None) -> bytes:
        """A ModelInferRequest that says how urgent it is, where the engine understands that."""
        if priority is None or not self.takes_priority:
            return payload
        return infer_request.with_parameter(payload, PARAMETER, priority)

    async def ask(self, method: str, payload: bytes, timeout_s: float, metadata: Metadata = ()) -> bytes:
        """One unary call. Raises what the status means."""
        try:
            return await self.channel().unary_unary(method)(payload, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as exc:
            raise from_rpc(exc.code(), exc.details() or "", self.url) from exc

    def observe(self, ok: bool, policy: HealthPolicy) -> None:
        before = self.health.healthy
        self.health = self.health.after(ok, policy)
        if self.health.healthy is not before:
            _LOG.info("replica %s is %s", self.url, "healthy" if self.health.healthy else "not healthy")
            if self.health.healthy and before is False:
                self.since_s = time.monotonic()

    def read_page(self, page: ReplicaMetrics) -> None:
        """Takes over a page. An engine whose step counter has moved since the last one makes something. A request that
        ended since then may still be counted: the most that this process had there meanwhile is taken for its own."""
        self.page = page
        if page.max_running:
            self.slots = page.max_running
            self.others.observe(page.running + page.waiting, max(self.own_requests, self.own))
        else:
            self.others.forget()
        self.own_requests = self.own
        if page.steps:
            if self._steps and page.steps != self._steps:
                self.progress_s = time.monotonic()
            self._steps = page.steps

    def stop_watching(self) -> None:
        for task in self.tasks:
            task.cancel()

    async def close_when_idle(self) -> None:
        self.stop_watching()
        await self.work.idle.wait()
        await self.close()

    async def close(self) -> None:
        self.stop_watching()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
            self._channel = None


class Failover(RetrySchedule):
    """Another replica at once, or the error: waiting is the caller's part, who is told for how long."""

    def wait_s(self, error: TridentError, hint: RetryHint, left_s: float, alternative: bool = False) -> float | None:
        return super().wait_s(error, hint, left_s, True) if alternative else None


class Replicas:
    """All pools. Make it on the loop that uses it; ``start`` looks for the replicas and probes each once."""

    def __init__(self, settings: Settings, rng: random.Random | None = None, sources: dict | None = None) -> None:
        self._settings = settings
        self._places: dict[str, str] = dict(settings.pools)
        self._sources: dict[str, Discovery] = sources or {pool: source(where) for pool, where in self._places.items()}
        self._rng = rng or random.Random()
        self._health = HealthPolicy(interval_s=settings.probe_interval_s, timeout_s=settings.probe_timeout_s)
        self._breaker = BreakerPolicy(settings.breaker_failures, settings.breaker_open_s)
        pick = None if settings.routing == SCORED else picks.BY_NAME[settings.routing]
        self._router = Router(pick=pick, slow_start_s=settings.slow_start_s)
        self._budget = RetryBudget(reserve=100.0)  # a replica that dies takes all its requests with it
        self._pools: dict[str, dict[str, Replica]] = {pool: {} for pool in self._sources}
        self._weights = settings.weights
        self._dither: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task] = {}  # that keep looking for the replicas of each pool
        self._leaving: set[asyncio.Task] = set()
        self._http: aiohttp.ClientSession | None = None
        self._turn = 0
        self.costs = Costs()
        self.model = settings.triton_model

    async def start(self) -> None:
        """Returns when every pool was looked for once; those that cannot be found now are looked for again."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self._settings.probe_timeout_s))
        await asyncio.gather(*(self._refresh(pool) for pool in self._sources))
        self._tasks = {pool: asyncio.create_task(self._keep_refreshing(pool)) for pool in self._sources}

    def change(self, places: Mapping[str, str], weights: Mapping[str, float]) -> None:
        """Takes other pools and shares from now on. Requests under way are not touched; a replica that has left every
        pool finishes them.

        places: where the replicas of each pool are. weights: share of each.
        """
        self._weights = dict(weights)
        for pool in self._places.keys() - places.keys():
            del self._sources[pool]
            self._cancel(self._tasks.pop(pool, None))
            for replica in self._pools.pop(pool).values():
                self._let_go(replica)
        for pool, where in places.items():
            if self._places.get(pool) == where:
                continue
            self._sources[pool] = source(where)
            self._pools.setdefault(pool, {})
            if self._http is not None:  # started
                self._cancel(self._tasks.pop(pool, None))
                self._tasks[pool] = asyncio.create_task(self._keep_refreshing(pool, at_once=True))
        self._places = dict(places)

    def _cancel(self, task: asyncio.Task | None) -> None:
        if task is not None:
            task.cancel()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self.all()))
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    def all(self) -> list[Replica]:
        return [replica for pool in self._pools.values() for replica in pool.values()]

    def fit(self) -> list[Replica]:
        """Those that may get requests now."""
        now_s = time.monotonic()
        return [replica for replica in self.all() if replica.fit(now_s)]

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(self._pools)

    def public(self) -> list[str]:
        """The pools that requests of tenants without one of their own are sent to."""
        return [pool for pool, weight in self._weights.items() if weight > 0]

    def fit_in(self, pool: str) -> list[Replica]:
        """Those of one pool that may get requests now."""
        now_s = time.monotonic()
        return [replica for replica in self._pools.get(pool, {}).values() if replica.fit(now_s)]

    def draw(self, pinned: str, session: str = "", without: str | None = None) -> str:
        """The pool of a request; see ``routing.choose_pool``. One that is pinned but not configured any more is told by
        the pick, when an overflow target can still take over. without: not that one, if another public one is fit."""
        if pinned:
            return pinned
        available = {pool: pool != without and bool(self.fit_in(pool)) for pool in self.public()}
        if without is not None and not any(available.values()):
            available = {without: True}
        return scoring.choose_pool(self._weights, "", available, self._rng, session)

    def capacity(self, pool: str) -> Capacity:
        """What this process may have at the replicas of a pool. One that does not report its slots counts as the mean
        of the others. A pool without any fit replica takes everybody, so that routing tells them at once."""
        fit = self.fit_in(pool)
        known = [replica for replica in fit if replica.slots]
        if not known:
            return UNKNOWN
        slots = math.ceil(sum(replica.slots for replica in known) * len(fit) / len(known))
        return capacity(slots, sum(replica.others.requests for replica in known), self._dither.get(pool, 0.0))

    def engine(self, pinned: str = "") -> str:
        """The hash of the engine that answers, "" while replicas that might do not all say one and the same."""
        pools = [pinned] if pinned else [pool for pool, weight in self._weights.items() if weight > 0]
        hashes = {replica.page.engine for replica in self.fit() if replica.pool in pools}
        return hashes.pop() if len(hashes) == 1 else ""

    def door(
        self, asked: GenerationRequest, pinned: str = "", session: str = "", traceparent: str = "", payload: bytes = b""
    ) -> Door:
        """Where one request may go. ``payload``: the ModelInferRequest to send in place of the one ``asked`` makes."""
        self._turn += 1
        prefix = costs.prefix(asked)
        ask = Ask(self._turn, session, prefix if len(prefix) >= SHORTEST_PREFIX else "")
        return Door(self, ask, pinned, traceparent, payload)

    def schedule(self) -> RetrySchedule:
        """The retries of one request, under the budget that all requests share."""
        return Failover(FAILOVER, self._budget, self._rng)

    def choose(self, ask: Ask, pinned: str, tried: frozenset[str], explanation: Explanation | None = None) -> Replica:
        """Fills in ``explanation`` if there is one. Raises Unavailable if no replica may be asked."""
        if explanation is None and _LOG.isEnabledFor(logging.DEBUG):
            explanation = Explanation()
        now_s, untried = time.monotonic(), self.has_untried(pinned, tried)
        available = {
            name: any(one.fit(now_s) and (one.url not in tried or not untried) for one in pool.values())
            for name, pool in self._pools.items()
        }
        pool = self._pools[scoring.choose_pool(self._weights, pinned, available, self._rng, ask.session)]
        candidates = [replica.candidate(now_s) for replica in pool.values()]
        chosen = pool[self._router.choose(candidates, Question(ask, tried), self._rng, explanation).name]
        if explanation is not None:
            explanation.pool = chosen.pool
            _LOG.debug("replica picked", extra={"fields": dataclasses.asdict(explanation)})
        return chosen

    def has_untried(self, pinned: str, tried: frozenset[str]) -> bool:
        return any(one.url not in tried for one in self.fit() if self._may_serve(one, pinned))

    def serves(self, pinned: str) -> bool:
        """Whether a healthy replica could take a request of the pool ``pinned``, or of any with a weight."""
        return any(self._may_serve(one, pinned) for one in self.fit())

    def _may_serve(self, replica: Replica, pinned: str) -> bool:
        return replica.pool == pinned if pinned else self._weights.get(replica.pool, 0.0) > 0

    def has_other(self, pool: str) -> bool:
        """Whether another public pool than this one has a fit replica."""
        return any(other != pool and self.fit_in(other) for other in self.public())

    def observe(self, replica: Replica, error: TridentError | None, silent_s: float) -> None:
        """What the end of a request says about its replica, which had been silent for so long."""
        before = replica.breaker.state
        replica.breaker = replica.breaker.over(error, silent_s, time.monotonic(), self._breaker)
        if isinstance(error, Unavailable):
            replica.observe(False, self._health)  # as good as a probe that found nobody
        if replica.breaker.state is BreakerState.OPEN and before is not BreakerState.OPEN:
            pause_s = replica.breaker.pause_s
            _LOG.warning("replica %s: the breaker opens for %g s after: %s", replica.url, pause_s, error)

    async def _keep_refreshing(self, pool: str, at_once: bool = False) -> None:
        if at_once:
            await self._refresh(pool)
        while True:
            found = bool(self._pools[pool])
            await asyncio.sleep(self._rng.uniform(0.9, 1.1) * (REFRESH_S if found else 1.0))
            await self._refresh(pool)

    async def _refresh(self, pool: str) -> None:
        try:
            urls = await self._sources[pool].replicas()
        except TridentError as error:
            _LOG.warning("pool %r: keeping the %d replicas known before: %s", pool, len(self._pools[pool]), error)
            return
        known = self._pools[pool]
        for url in known.keys() - set(urls):
            self._let_go(known.pop(url))
        tls, metrics_url = self._settings.replica_tls, self._settings.metrics_url
        new = [Replica(url, pool, metrics_url(url), tls) for url in urls if url not in known]
        # A new replica is probed before it gets anything, so that one that is still loading is not picked.
        await asyncio.gather(*(self._probe(replica) for replica in new), *(self._read_page(one) for one in new))
        for replica in new:
            known[replica.url] = replica
            replica.tasks.append(asyncio.create_task(self._keep_probing(replica)))
            if replica.metrics_url:
                replica.tasks.append(asyncio.create_task(self._keep_reading(replica)))

    def _let_go(self, replica: Replica) -> None:
        """Nothing new goes there; what it has, it finishes."""
        task = asyncio.create_task(replica.close_when_idle())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _keep_probing(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self._health.interval_s * self._rng.uniform(0.9, 1.1))
            await self._probe(replica)

    async def _probe(self, replica: Replica) -> None:
        question = status.model_ready(self._settings.triton_model)
        digest, began_s = "", time.monotonic()
        try:
            ok = status.read_flag(await replica.ask(question.method, question.payload, self._health.timeout_s))
            if ok and self._settings.deep_probes:
                digest = await self.deep_probe(replica)
        except TridentError as error:
            # A probe that waits behind real requests at a replica which serves them says nothing.
            ok = isinstance(error, DeadlineExceeded) and replica.progress_s > began_s
            if not ok:
                _LOG.warning("replica %s failed its probe: %s", replica.url, error)
        replica.deep_digest = digest
        replica.observe(ok, self._health)

    async def deep_probe(self, replica: Replica) -> str:
        """The digest of one greedy token made there. Raises what keeps it from being made, or EngineFailed if it is
        another token than it must be."""
        timeout_s = max(self._health.timeout_s, SILENCE_S)  # it waits its turn behind real requests
        asked = GenerationRequest(
            text_input=self._settings.deep_prompt,
            max_tokens=1,
            sampling=SamplingParams(temperature=0.0),
            timeout_s=timeout_s,
            request_id=f"probe-{self._rng.getrandbits(64):016x}",
        )
        door = _Fixed(replica, self._settings.triton_model)
        replica.probing += 1
        replica.sent()
        try:
            done = await TokenStream(door, asked, RetrySchedule(NO_RETRY, RetryBudget(), self._rng)).complete()
        finally:
            replica.probing -= 1
        digest = token_digest(done.token_ids)
        if self._settings.deep_sha256 and digest != self._settings.deep_sha256:
            raise EngineFailed(f"{replica.url} made another token than it must: {digest}")
        return digest

    async def _keep_reading(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self._settings.metrics_interval_s * self._rng.uniform(0.9, 1.1))
            await self._read_page(replica)

    async def _read_page(self, replica: Replica) -> None:
        """A page that cannot be read leaves what this process itself has booked as the only load."""
        if not replica.metrics_url:
            return
        try:
            async with self._http.get(replica.metrics_url) as answer:
                page = b""
                async for part in answer.content.iter_any():
                    page += part
                    if len(page) > MAX_PAGE_BYTES:
                        raise ValueError(f"it is larger than {MAX_PAGE_BYTES} bytes")
                if answer.status == 200:
                    replica.read_page(replica_metrics.read(page.decode()))
                    replica.takes_priority = replica.page.kind != "trtllm"  # whose backend refuses the parameter
                else:
                    replica.read_page(ReplicaMetrics())
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as exc:
            _LOG.debug("replica %s: its metrics cannot be read: %s", replica.url, exc)
            replica.read_page(ReplicaMetrics())
        self._dither[replica.pool] = self._rng.random()


class Door:
    """Where one request may go: any replica of its pool, but not twice to one while another is left."""

    def __init__(self, replicas: Replicas, ask: Ask, pinned: str, traceparent: str, payload: bytes) -> None:
        self._replicas, self._ask, self._pinned = replicas, ask, pinned
        self._traceparent, self._payload = traceparent, payload
        self._tried: frozenset[str] = frozenset()
        self._latest: Replica | None = None
        self.replica = self.pool = ""  # where the latest attempt went
        self.picked: Callable[[], None] = lambda: None  # called when that is known
        self.priority: float | None = None  # in the engine's queue; None is the engine's default
        # Waits for a slot in another pool and names it; None where the request has to stay in its own.
        self.move: Callable[[], Awaitable[str]] | None = None
        self.explain = False  # whether ``explanation`` says of each pick why
        self.explanation: Explanation | None = None

    async def open(self, asked: GenerationRequest, left_s: float) -> Call:
        if self.move is not None and self._must_move():
            began_s = time.monotonic()
            self._pinned = await self.move()
            left_s -= time.monotonic() - began_s
            if left_s <= 0:
                raise DeadlineExceeded("the time of the request was up before another pool had a slot for it")
        self.explanation = Explanation() if self.explain else None
        replica = self._replicas.choose(self._ask, self._pinned, self._tried, self.explanation)
        self._tried |= {replica.url}
        self._latest, self.replica, self.pool = replica, replica.url, replica.pool
        self.picked()
        return Call(self._replicas, replica, asked, left_s, self._traceparent, self._payload, self.priority)

    def has_alternative(self) -> bool:
        return self._replicas.has_untried(self._pinned, self._tried) or self._must_move()

    def _must_move(self) -> bool:
        """Whether its pool has nothing left for the request and another one may serve it."""
        replicas = self._replicas
        if self.move is None or replicas.has_untried(self._pinned, self._tried):
            return False
        return replicas.has_other(self._pinned)

    @property
    def progress_s(self) -> float:
        """When the latest replica was last seen to make something; 0 if never."""
        return self._latest.progress_s if self._latest is not None else 0.0

    def made_tokens(self) -> None:
        """Tokens of this request arrived from the latest replica."""
        if self._latest is not None:
            self._latest.progress_s = time.monotonic()

    def is_down(self) -> bool:
        """Whether probes or the breaker have taken the latest replica out."""
        latest = self._latest
        return latest is not None and (
            latest.health.healthy is False or latest.breaker.state_at(time.monotonic()) is BreakerState.OPEN
        )

    def was_silent(self, error: TridentError) -> None:
        """Books at the latest replica that it made nothing for too long."""
        if self._latest is not None:
            self._replicas.observe(self._latest, error, math.inf)


class Call:
    """A call and what is booked for it; both end together. An Attempt of ``clients.wire.token_stream``."""

    def __init__(
        self,
        replicas: Replicas,
        replica: Replica,
        asked: GenerationRequest,
        left_s: float,
        traceparent: str,
        payload: bytes,
        priority: float | None,
    ) -> None:
        self._replicas, self._replica = replicas, replica
        self.url = replica.url
        metadata = replica.metadata(asked.request_id, traceparent)
        data = replica.prioritised(
            payload or infer_request.generation(asked, replicas.model, left_s, timings=True), priority
        )
        self.call = replica.generate(data, left_s, metadata)
        self._sent_s = time.monotonic()
        replica.breaker = replica.breaker.sent(self._sent_s)
        self._booking = Booking(replica.work, replicas.costs, asked)
        replica.sent()

    def began(self) -> None:
        self._booking.began()

    def release(self, error: TridentError | None, answer: Answer) -> None:
        self._booking.release()
        # Time in the queue of a replica that works for others is not its silence.
        heard_s = max(self._sent_s, self._replica.progress_s)
        self._replicas.observe(self._replica, error, 0.0 if answer.started else time.monotonic() - heard_s)
        if error is None:
            self._booking.learn(answer)


class _Fixed:
    """The door of a probe: one replica, nothing booked. Its own Attempt as well."""

    def __init__(self, replica: Replica, model: str) -> None:
        self._replica, self._model = replica, model
        self.url = replica.url

    async def open(self, asked: GenerationRequest, left_s: float) -> _Fixed:
        # Behind all classes it would find a busy replica ill.
        payload = self._replica.prioritised(infer_request.generation(asked, self._model, left_s), HIGHEST)
        self.call = self._replica.generate(payload, left_s, self._replica.metadata(asked.request_id))
        return self

    def has_alternative(self) -> bool:
        return False

    def began(self) -> None:
        """Nothing is booked for a probe."""

    def release(self, error: TridentError | None, answer: Answer) -> None:
        """Nor is anything settled."""
