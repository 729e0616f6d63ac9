"""The pools of replicas behind the gateway: discovered, probed, measured, picked and accounted for.

A request's work is reserved at a replica from when it is sent to its end, so that the next pick sees what this process
has in progress; the metrics tell what all others have.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import aiohttp
import grpc.aio

from clients.replica_set import costs, picks
from clients.replica_set.costs import Costs
from clients.replica_set.discovery import Discovery
from clients.replica_set.picks import RoutingRequest
from clients.replica_set.replica import HealthPolicy, Replica, ReservedCall
from clients.replica_set.replica_set import Check, ReplicaSet
from clients.wire import encoder_call, infer_request, protobuf
from clients.wire.connection import DEFAULT_MODEL, Connection
from clients.wire.encoder_call import Rows
from clients.wire.failures import RetryHint
from clients.wire.retries import NO_RETRY, RetryBudget, RetryPolicy, RetrySchedule
from clients.wire.token_stream import SingleRoute, TokenStream
from contract import encoder, packed_delta
from contract.errors import DeadlineExceeded, EngineFailed, NotFound, TridentError, Unavailable
from contract.generation import GenerationRequest, SamplingParams, Usage, changed
from contract.priority import HIGHEST, PARAMETER
from gateway.admission.sharing import UNKNOWN, Capacity, OthersLoad, capacity
from gateway.config import release
from gateway.config.release import ReleaseRules
from gateway.config.settings import SCORED, Settings, replica_source
from gateway.routing import circuit_breaker, prefix_cache, replica_metrics, scoring
from gateway.routing.circuit_breaker import SILENCE_S, Breaker, BreakerPolicy, BreakerState, token_digest
from gateway.routing.prefix_cache import PrefixCache
from gateway.routing.registrations import Registered, Registrations
from gateway.routing.replica_metrics import ReplicaMetrics
from gateway.routing.scoring import Candidate, Explanation, Router

_LOG = logging.getLogger(__name__)
MAX_METRICS_BYTES = 4 * 1024 * 1024
# A shorter beginning is computed faster than it is worth sending a request out of its way.
SHORTEST_PREFIX = 256
TYPICAL_CONTEXT = 512  # tokens of a sequence, as long as nothing was learned from requests
FAILOVER = RetryPolicy(attempts=4)


class RoutedReplica(Replica):
    """A replica with what routing knows of it: its breaker and its metrics.

    takes_priority: whether the engine orders its queue by ``request_priority``.
    slots: requests that it can run at once, from the last metrics that could be read; 0 before any.
    others: requests that others have there. own_requests: the most that this process had since the last metrics.
    tokens: that this process relayed from it.
    probing: deep probes in progress, which have no reservation. deep_digest: of the latest deep probe, "" if it failed.
    probed: the latest probe succeeded; after a failed one requests do not count for its health, as they see less.
    """

    def __init__(self, url: str, pool: str, pools: Replicas) -> None:
        super().__init__(Connection(url, pools.settings.replica_tls), pools.health_policy)
        self.pool, self._pools, self.metrics_url = pool, pools, pools.metrics_url(url)
        self.breaker = Breaker()
        self.metrics = ReplicaMetrics()
        self.takes_priority, self.deep_digest, self.probed = False, "", True
        self.others = OthersLoad()
        self.prefixes = PrefixCache()
        self.slots = self.own_requests = self.probing = self.tokens = 0

    def candidate(self, now_s: float) -> Candidate:
        metrics = self.metrics
        load = self.load(
            running=metrics.running,
            waiting=metrics.waiting,
            max_running=metrics.max_running,
            kv_usage=metrics.kv_usage,
            tokens_per_s=self.tokens_per_s(metrics.max_running),
        )
        return Candidate(load, not self.breaker.allows(now_s), now_s - self.healthy_since_s)

    def tokens_per_s(self, slots: int) -> float:
        """Return the pace with all slots taken: as learned from requests, before that as calibrated; 0 if unknown."""
        learned, step = self.work.pace.tokens_per_s(slots), self.metrics.step
        return learned or (step.decode_tokens_per_s(slots, TYPICAL_CONTEXT) if step else 0.0)

    @property
    def own(self) -> int:
        """Requests that this process has there now, probes included."""
        return self.work.outstanding + self.probing

    def sent(self) -> None:
        self.breaker = self.breaker.sent(time.monotonic())
        self.own_requests = max(self.own_requests, self.own)

    def observe(self, ok: bool) -> None:
        before = self.health.healthy
        super().observe(ok)
        if before and not self.health.healthy:  # it may be restarted, with another engine
            self.prefixes, self.metrics = PrefixCache(), ReplicaMetrics()

    def ended(self, error: TridentError | None, silent_s: float, sent_s: float = math.inf) -> None:
        self._pools.on_call(self.pool, error, circuit_breaker.blames_replica(error, silent_s))
        before, now_s = self.breaker.state, time.monotonic()
        self.breaker = self.breaker.over(error, silent_s, now_s, self._pools.breaker_policy, sent_s)
        if isinstance(error, Unavailable):
            self.observe(False)  # as a failed probe
        elif error is None and self.health.healthy and self.probed:
            self.observe(True)
        # After an inconclusive trial it is open and allows the next one at once.
        opened = self.breaker.state is BreakerState.OPEN and not self.breaker.allows(now_s)
        if opened and before is not BreakerState.OPEN:
            _LOG.warning("replica %s: the breaker opens for %g s after: %s", self.url, self.breaker.pause_s, error)
            self._pools.on_open(self.url)

    def ready(self, now_s: float) -> bool:
        return bool(self.health.healthy) and self.breaker.allows(now_s)

    def is_down(self) -> bool:
        """Return whether probes or the breaker have taken it out."""
        open_breaker = self.breaker.state_at(time.monotonic()) is BreakerState.OPEN
        return self.health.healthy is False or open_breaker

    def prioritised(self, payload: bytes, priority: float | None) -> bytes:
        """Add the priority to a ModelInferRequest if the engine takes one."""
        if priority is None or not self.takes_priority:
            return payload
        return infer_request.with_parameter(payload, PARAMETER, priority)

    def read_metrics(self, metrics: ReplicaMetrics, own: float) -> None:
        """Take over the latest metrics; a step counter that has moved is progress. own: requests of this process there
        when they were made."""
        if 0 < self.metrics.steps != metrics.steps > 0:
            self.progress_s = time.monotonic()
        self.metrics = metrics
        if metrics.max_running:
            self.slots = metrics.max_running
            self.others.observe(metrics.running + metrics.waiting, own, max(self.own_requests, self.own))
        else:
            self.others.forget()
        self.own_requests = self.own


class Failover(RetrySchedule):
    """Another replica at once, or the error: waiting is the caller's part, who is told for how long."""

    def wait_s(
        self, error: TridentError, hint: RetryHint, remaining_s: float, alternative: bool = False
    ) -> float | None:
        return super().wait_s(error, hint, remaining_s, True) if alternative else None


class Replicas:
    """All pools. Make it on the loop that uses it; ``start`` looks for the replicas and probes each once.

    on_call: called at the end of every call with the pool, the error and blames_replica. on_open: with the URL of a
    replica whose breaker opens.
    """

    def __init__(self, settings: Settings, rng: random.Random | None = None) -> None:
        self.settings = settings
        self._addresses: dict[str, str] = dict(settings.pools)
        self._rng = rng or random.Random()
        self.health_policy = HealthPolicy(interval_s=settings.probe_interval_s, timeout_s=settings.probe_timeout_s)
        self.breaker_policy = BreakerPolicy(settings.breaker_failures, settings.breaker_open_s)
        pick = None if settings.routing == SCORED else picks.BY_NAME[settings.routing]
        self._router = Router(pick=pick, slow_start_s=settings.slow_start_s)
        self._budget = RetryBudget(reserve=100.0)  # a replica that fails does so for all its requests
        self.registrations = Registrations(self._joined, self._left)
        self._sets = {pool: self._set(pool, self._source(pool, where)) for pool, where in self._addresses.items()}
        self._retired: list[ReplicaSet[RoutedReplica]] = []  # of pools that are no longer configured
        self._weights: Mapping[str, float] = settings.weights
        self._groups: Mapping[str, Sequence[str]] = {}
        self.releases: Mapping[str, ReleaseRules] = {}  # whose candidates take a part of a pool's requests
        self._http: aiohttp.ClientSession | None = None
        self._turn = 0
        self.on_call: Callable[[str, TridentError | None, bool | None], None] = lambda pool, error, failed: None
        self.on_open: Callable[[str], None] = lambda url: None
        self._costs: dict[str, Costs] = {}  # by the engine's hash
        self.model = settings.triton_model
        self.encoders: frozenset[str] = frozenset()  # pools of encoders
        self.held: Mapping[str, float] = {}  # seconds that requests wait for a replica where there is none, by pool

    def _set(self, pool: str, discovery: Discovery) -> ReplicaSet[RoutedReplica]:
        metrics = Check(self._read_metrics, self.settings.metrics_interval_s)
        checks = (Check(self._probe, self.health_policy.interval_s), metrics)
        return ReplicaSet(discovery, lambda url: RoutedReplica(url, pool, self), checks, rng=self._rng, name=pool)

    def metrics_url(self, url: str) -> str:
        return self.registrations.metrics_url(url) or self.settings.metrics_url(url)

    def _source(self, pool: str, where: str) -> Discovery:
        return Registered(replica_source(where), self.registrations, pool)

    def _joined(self, pool: str, url: str) -> None:
        if url in (known := self._replicas_of(pool)):
            known[url].metrics_url = self.metrics_url(url)
        elif pool in self._sets:
            self._sets[pool].add(url)

    def _left(self, pool: str, url: str) -> None:
        if pool in self._sets:
            self._sets[pool].remove(url)

    async def start(self) -> None:
        """Discover the replicas of every pool once; discovery goes on where it failed."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(self.settings.probe_timeout_s))
        await asyncio.gather(*(self._found(pool) for pool in self._sets.values()))

    async def _found(self, pool: ReplicaSet[RoutedReplica]) -> None:
        with contextlib.suppress(TridentError):  # it has been logged
            await pool.found()

    def change(
        self, addresses: Mapping[str, str], weights: Mapping[str, float], groups: Mapping[str, Sequence[str]]
    ) -> None:
        """Replace the pools: the source of each one's replicas, and their weights. Requests in progress stay.

        groups: pools by the name of a group, which requests can be pinned to as to a pool; a group may be empty.
        """
        self._weights, self._groups = dict(weights), groups
        for pool in self._addresses.keys() - addresses.keys():
            retired = self._sets.pop(pool)
            retired.retire()
            self._retired.append(retired)
        for pool, where in addresses.items():
            if self._addresses.get(pool) == where:
                continue
            source = self._source(pool, where)
            if pool in self._sets:
                self._sets[pool].change(source)
                continue
            self._sets[pool] = self._set(pool, source)
            if self._http is not None:  # started
                self._sets[pool].start()
        self._addresses = dict(addresses)

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in (*self._sets.values(), *self._retired)))
        if self._http is not None:
            await self._http.close()

    def all(self) -> list[RoutedReplica]:
        return [replica for pool in self._sets.values() for replica in pool.replicas.values()]

    def _replicas_of(self, pool: str) -> Mapping[str, RoutedReplica]:
        return self._sets[pool].replicas if pool in self._sets else {}

    def ready(self) -> list[RoutedReplica]:
        """Return the replicas that may get requests now."""
        return [fit for pool in self._sets for fit in self.ready_in(pool)]

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(self._sets)

    @property
    def public(self) -> dict[str, float]:
        """The weights of the pools of requests that are not pinned."""
        return {pool: weight for pool, weight in self._weights.items() if weight > 0}

    def suspect(self, url: str) -> None:
        """Take note that the breaker of a replica has opened in another process."""
        for replica in self.all():
            if replica.url == url:
                replica.breaker = replica.breaker.suspected(self.breaker_policy)

    def ready_in(self, pool: str) -> list[RoutedReplica]:
        """Return the replicas of one pool that may get requests now."""
        now_s = time.monotonic()
        return [replica for replica in self._replicas_of(pool).values() if replica.ready(now_s)]

    async def joined(self, pool: str, timeout_s: float) -> bool:
        """Wait until a replica of a pool has been checked for the first time; return False if none is being checked."""
        return await self._sets[pool].joined(timeout_s)

    def draw(self, pinned: str, session: str = "", without: str | None = None) -> str:
        """Return the pool of a request; see ``scoring.choose_pool``. One that is pinned but not configured any more is
        told by the pick, when an overflow target can still take over. without: not that one, if another is fit."""
        shares = self._shares(pinned)
        if pinned in shares or not shares:
            return self._released(pinned, session, without)
        available = {pool: pool != without and self._fit(pool) for pool in shares}
        if without is not None and not any(available.values()):
            available = {without: True}
        return self._released(scoring.choose_pool(shares, "", available, self._rng, session), session, without)

    def _released(self, pool: str, session: str, without: str | None) -> str:
        """Return the candidate of a release that takes the request of its stable pool, else ``pool``. A candidate
        without a ready replica takes none."""
        for name, rules in self.releases.items():
            if rules.stable == pool and rules.candidate != without and self.ready_in(rules.candidate):
                if release.takes(name, session, rules.served_share, self._rng.random()):
                    return rules.candidate
        return pool

    def _fit(self, pool: str) -> bool:
        """Whether a pool, or a candidate that takes all of its requests, has a ready replica."""
        return bool(self.ready_in(pool)) or any(
            rules.stable == pool and rules.served_share == 1 and self.ready_in(rules.candidate)
            for rules in self.releases.values()
        )

    def _shares(self, pinned: str) -> Mapping[str, float]:
        """Return the pools that a request may go to, with their shares: its group's, its own, or the public ones."""
        if pinned not in self._groups:
            return {pinned: 1.0} if pinned else self.public
        shares = {pool: self._weights.get(pool, 0.0) for pool in self._groups[pinned]}
        return shares if any(shares.values()) else dict.fromkeys(shares, 1.0)

    def capacity(self, pool: str, others: float | None = None) -> Capacity:
        """Return what this process may have at the replicas of a pool. One that does not report its slots counts as
        the mean of the others. A pool without a ready replica admits all requests, which routing refuses at once, or
        none, where they are held. others: requests of others there; None for those that the metrics tell."""
        fit = self.ready_in(pool)
        if not fit and pool in self.held:
            return Capacity(0, 0, hold_s=self.held[pool])
        known = [replica for replica in fit if replica.slots]
        if not known:
            return UNKNOWN
        slots = math.ceil(sum(replica.slots for replica in known) * len(fit) / len(known))
        kv_usage = sum(replica.metrics.kv_usage for replica in known) / len(known)
        if others is None:
            others = sum(replica.others.requests for replica in known)
        return capacity(slots, others, kv_usage)

    def reported(self) -> dict[str, tuple[Capacity, float]]:
        """Return for each pool what its replicas could run for this process alone, and the requests they reported."""
        return {
            pool: (
                self.capacity(pool, 0.0),
                sum(fit.metrics.running + fit.metrics.waiting for fit in self.ready_in(pool) if fit.slots),
            )
            for pool in self._sets
        }

    def engine(self, pinned: str = "", several: str = "") -> str:
        """Return the hash of the engine of the pool, or ``several`` while its ready replicas report different ones."""
        pools = set(self._shares(pinned))
        pools |= {rules.candidate for rules in self.releases.values() if rules.served_share and rules.stable in pools}
        hashes = {replica.metrics.engine for replica in self.ready() if replica.pool in pools}
        return several if len(hashes) > 1 else "".join(hashes)

    def route(
        self,
        request: GenerationRequest,
        pinned: str = "",
        session: str = "",
        traceparent: str = "",
        payload: bytes = b"",
        tried: frozenset[str] = frozenset(),
    ) -> Route:
        """Return the route of one request. payload: the ModelInferRequest to send in place of one made from
        ``request``. tried: URLs of replicas that are picked only where no other is ready."""
        self._turn += 1
        prefix = costs.prefix(request)
        routing = RoutingRequest(self._turn, session, prefix if len(prefix) >= SHORTEST_PREFIX else "", tried)
        shared = not session and routing.prefix and any(len(pool.replicas) > 1 for pool in self._sets.values())
        blocks = prefix_cache.blocks(request) if shared and self._router.pick is None else ()
        return Route(self, routing, pinned, traceparent, payload, blocks)

    def costs_of(self, replica: RoutedReplica) -> Costs:
        """Return the cost model of the replica's kind: of all that serve the same engine. It begins with the engine's
        step model, if the engine was calibrated."""
        engine, step = replica.metrics.engine, replica.metrics.step
        if engine not in self._costs:
            weight = step.prefill_weight(max(1, replica.slots), TYPICAL_CONTEXT) if step else 0.0
            self._costs[engine] = Costs(weight) if weight else Costs()
            origin = "its step model" if weight else "defaults: it was not calibrated"
            _LOG.info("engine %s: costs are learned from requests and begin with %s", engine[:12], origin)
        return self._costs[engine]

    def prompt_weight(self) -> float:
        """Return the work of a prompt token in tokens of decoding: the mean over the engines of the replicas."""
        engines = {replica.metrics.engine for replica in self.all()}
        weights = [self._costs[engine].prefill_weight for engine in engines if engine in self._costs]
        return sum(weights) / len(weights) if weights else Costs().prefill_weight

    def schedule(self) -> RetrySchedule:
        """Return the retry schedule of one request, under the budget that all requests share."""
        return Failover(FAILOVER, self._budget, self._rng)

    def choose(
        self, request: RoutingRequest, pinned: str, explanation: Explanation | None = None, blocks: Sequence[bytes] = ()
    ) -> RoutedReplica:
        """Pick a replica; fill in ``explanation``. blocks: of the prompt, for prefix affinity. Raises Unavailable if
        no replica is ready."""
        if explanation is None and _LOG.isEnabledFor(logging.DEBUG):
            explanation = Explanation()
        now_s = time.monotonic()
        pool = self._sets[self._pool_of(request, pinned)].replicas
        if explanation is None and len(pool) == 1 and (only := next(iter(pool.values()))).ready(now_s):
            return only
        candidates = [replica.candidate(now_s) for replica in pool.values()]
        if blocks:
            cached = {name: replica.prefixes.fraction(blocks) for name, replica in pool.items()}
            request = dataclasses.replace(request, cached=cached)
        chosen = pool[self._router.choose(candidates, request, self._rng, explanation).name]
        if explanation is not None:
            explanation.pool = chosen.pool
            _LOG.debug("replica picked", extra={"fields": dataclasses.asdict(explanation)})
        return chosen

    def _pool_of(self, request: RoutingRequest, pinned: str) -> str:
        """Return the pool of the request: the pinned one, or a public one with an untried ready replica."""
        if pinned in self._sets:
            return pinned
        avoided = request.tried if self.has_untried(pinned, request.tried) else frozenset()
        available = {pool: any(fit.url not in avoided for fit in self.ready_in(pool)) for pool in self._sets}
        return scoring.choose_pool(self._weights, pinned, available, self._rng, request.session)

    def has_untried(self, pinned: str, tried: frozenset[str]) -> bool:
        return any(fit.url not in tried for pool in self._shares(pinned) for fit in self.ready_in(pool))

    def serves(self, pinned: str) -> bool:
        """Whether a healthy replica could take a request of the pool or group ``pinned``, or of any with a weight."""
        return any(self._fit(pool) for pool in self._shares(pinned))

    def ready_with(self, pool: str, engine: str) -> list[RoutedReplica]:
        """Return the fit replicas of one pool that serve ``engine``, or do not say which; "" for any engine."""
        return [fit for fit in self.ready_in(pool) if not engine or fit.metrics.engine in ("", engine)]

    def with_other_engine(self, pool: str, engine: str) -> frozenset[str]:
        """Return the URLs of the replicas of one pool that say that they serve another engine than ``engine``."""
        found = self._replicas_of(pool).values() if engine else ()
        return frozenset([other.url for other in found if other.metrics.engine not in ("", engine)])

    def adapters(self, pinned: str) -> tuple[str, ...]:
        """Return the LoRA adapters that ready replicas of a pool or group report; "": of the public pools."""
        fit = (replica for pool in self._shares(pinned) for replica in self.ready_in(pool))
        return tuple(sorted({name for replica in fit for name in replica.metrics.adapters}))

    async def _probe(self, replica: RoutedReplica) -> None:
        digest, began_s, timeout_s = "", time.monotonic(), self.health_policy.timeout_s
        model, probe = self.model, self._deep_probe
        if replica.pool in self.encoders:
            model, probe = encoder.MODEL, self._encoder_probe
        try:
            ok = await replica.channel.model_ready(model, timeout_s)
            if ok and self.settings.deep_probes:  # which wait behind real requests
                digest = await probe(replica, f"probe-{self._rng.getrandbits(64):016x}", max(timeout_s, SILENCE_S))
        except TridentError as error:
            # A probe that waits behind real requests, at a replica that serves them, is no failure.
            ok = isinstance(error, DeadlineExceeded) and replica.progress_s > began_s
            if not ok:
                _LOG.warning("replica %s failed its probe: %s", replica.url, error)
        replica.deep_digest, replica.probed = digest, ok
        replica.observe(ok)

    async def _deep_probe(self, replica: RoutedReplica, request_id: str, timeout_s: float) -> str:
        """Return the digest of one greedy token generated there. Raises TridentError, EngineFailed if it is not the
        expected one."""
        prompt, greedy = self.settings.deep_prompt, SamplingParams(temperature=0.0)
        request = GenerationRequest(prompt, max_tokens=1, sampling=greedy, timeout_s=timeout_s, request_id=request_id)

        def send(request: GenerationRequest, remaining_s: float) -> grpc.aio.UnaryStreamCall:
            # With the highest priority, or a busy replica would fail its probes.
            payload = replica.prioritised(infer_request.generation(request, self.model, remaining_s), HIGHEST)
            return replica.channel.generate(payload, remaining_s, replica.metadata(request.request_id))

        schedule = RetrySchedule(NO_RETRY, RetryBudget(), self._rng)
        replica.probing += 1
        replica.own_requests = max(replica.own_requests, replica.own)
        try:
            completion = await TokenStream(SingleRoute(replica.url, send), request, schedule).complete()
        finally:
            replica.probing -= 1
        digest = token_digest(completion.token_ids)
        expected = self.settings.deep_sha256
        if expected and digest != expected:
            raise EngineFailed(f"{replica.url}: deep probe mismatch: expected {expected}, got {digest}")
        return digest

    async def _encoder_probe(self, replica: RoutedReplica, request_id: str, timeout_s: float) -> str:
        """Return the digest of the score of one pair, which every encoder computes. Raises TridentError."""
        prompt = (self.settings.deep_prompt,)
        call = encoder_call.call(Rows(prompt, prompt), request_id)
        encoded = encoder_call.read(await replica.channel.call(call, timeout_s))
        return hashlib.sha256(encoded.values).hexdigest()

    async def _read_metrics(self, replica: RoutedReplica) -> None:
        """Read the replica's metrics. Without them the work that this process has reserved is the only known load; what
        the replica is holds until it is unhealthy."""
        if not replica.metrics_url:
            return
        own, metrics = replica.own, None
        try:
            metrics = await self._scrape(replica.metrics_url)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as exc:
            _LOG.debug("replica %s: its metrics cannot be read: %s", replica.url, exc)
        if metrics is not None:
            replica.takes_priority = metrics.kind != "trtllm"  # whose backend refuses the parameter
        else:
            metrics = dataclasses.replace(replica.metrics, running=0, waiting=0, max_running=0, kv_usage=0.0)
        replica.read_metrics(metrics, (own + replica.own) / 2)

    async def _scrape(self, url: str) -> ReplicaMetrics | None:
        assert self._http is not None, "start() comes first"
        async with self._http.get(url) as response:
            text = b""
            async for part in response.content.iter_any():
                text += part
                if len(text) > MAX_METRICS_BYTES:
                    raise ValueError(f"larger than {MAX_METRICS_BYTES} bytes")
            return replica_metrics.read(text.decode()) if response.status == 200 else None


class Route:
    """The route of one request: any replica of its pool, but none twice while a healthy one is untried.

    packs: it may go to the packed ensemble. sent_packed: the latest attempt did.
    replica, pool: of the latest attempt. picked: called when they are known. priority: in the engine's queue.
    move: waits for a slot in another pool and names it; None if the request must stay in its own.
    group: of the pools that it may move to; "" for the public ones. explain: fill in ``explanation``.
    """

    def __init__(
        self,
        replicas: Replicas,
        request: RoutingRequest,
        pinned: str,
        traceparent: str,
        payload: bytes,
        blocks: tuple[bytes, ...],
    ) -> None:
        self._replicas, self._request, self._pinned = replicas, request, pinned
        self.packs, self.sent_packed = not payload, False
        self._traceparent, self._payload = traceparent, payload
        self._blocks, self._cached, self._sent_s = blocks, 0.0, 0.0
        self._latest: RoutedReplica | None = None
        self.replica = self.pool = ""
        self.picked: Callable[[], None] = lambda: None
        self.priority: float | None = None
        self.move: Callable[[], Awaitable[str]] | None = None
        self.group = ""
        self.explain = False
        self.explanation: Explanation | None = None

    async def open(self, request: GenerationRequest, remaining_s: float) -> ReservedCall:
        if self.move is not None and self._must_move():
            began_s = time.monotonic()
            self._pinned = await self.move()
            remaining_s -= time.monotonic() - began_s
            if remaining_s <= 0:
                raise DeadlineExceeded("the deadline passed before another pool had a slot for the request")
        self.explanation = Explanation() if self.explain else None
        replicas = self._replicas
        replica = replicas.choose(self._request, self._pinned, self.explanation, self._blocks)
        self._request = changed(self._request, tried=self._request.tried | {replica.url})
        self.sent_to(replica)
        self.picked()
        self.sent_packed = self.packs and replicas.model == DEFAULT_MODEL and request.stream and replica.metrics.packed
        model = packed_delta.MODEL if self.sent_packed else replicas.model
        payload = self._payload or infer_request.generation(request, model, remaining_s, timings=True)
        if self._payload and self.sent_packed:
            payload += protobuf.text(1, model)  # the name that stands last counts
        metadata = replica.metadata(request.request_id, self._traceparent)
        data = replica.prioritised(payload, self.priority)
        call = ReservedCall(replica, replicas.costs_of(replica), request, data, remaining_s, metadata)
        self._sent_s = time.monotonic()
        return call

    def ordered(self, most: int, outside: frozenset[str]) -> list[RoutedReplica]:
        """Return up to ``most`` ready replicas of its pool, best first, without those of the URLs ``outside``."""
        found: dict[str, RoutedReplica] = {}
        with contextlib.suppress(Unavailable):
            while len(found) < most:
                tried = outside | found.keys()
                request = dataclasses.replace(self._request, tried=tried)
                replica = self._replicas.choose(request, self._pinned, None, self._blocks)
                if replica.url in tried:  # there is no other
                    break
                found[replica.url] = replica
        return list(found.values())

    def sent_to(self, replica: RoutedReplica) -> None:
        """Take note of the replica that gets the request."""
        if self._blocks:
            self._cached = replica.prefixes.fraction(self._blocks)
            replica.prefixes.sent(self._blocks)
        self._latest, self.replica, self.pool = replica, replica.url, replica.pool

    def has_alternative(self) -> bool:
        return self._replicas.has_untried(self._pinned, self._request.tried) or self._must_move()

    def refused(self, error: TridentError) -> bool:
        """Return whether the latest replica only lacks the packed ensemble, which it had when its metrics were read."""
        lacking = self.sent_packed and isinstance(error, NotFound)
        if self._latest is not None and lacking:
            self._latest.metrics = dataclasses.replace(self._latest.metrics, packed=False)
        return lacking

    def _must_move(self) -> bool:
        """Return whether its pool has no replica left for the request and another pool may serve it."""
        replicas = self._replicas
        if self.move is None or replicas.has_untried(self._pinned, self._request.tried):
            return False
        return any(pool != self._pinned and replicas.ready_in(pool) for pool in replicas._shares(self.group))

    @property
    def progress_s(self) -> float:
        """When the latest replica last generated a token; 0 if never."""
        return self._latest.progress_s if self._latest is not None else 0.0

    def made_tokens(self, count: int) -> str:
        """Take note of tokens of this request from the latest replica. Return its engine's hash; "" if unknown."""
        latest = self._latest
        if latest is None:
            return ""
        latest.tokens += count
        latest.progress_s = time.monotonic()
        if count and latest.breaker.state is BreakerState.HALF_OPEN:
            latest.breaker = latest.breaker.began(self._replicas.breaker_policy, self._sent_s)
        return latest.metrics.engine

    def read_usage(self, usage: Usage) -> None:
        """Learn from what the latest replica reports as cached."""
        if self._latest is not None and usage.input_tokens:
            self._latest.prefixes.reported(self._cached, usage.cached_tokens / usage.input_tokens)

    def is_down(self) -> bool:
        """Return whether probes or the breaker have taken the latest replica out."""
        return self._latest is not None and self._latest.is_down()

    def was_silent(self, error: TridentError) -> None:
        """Count against the latest replica that it generated nothing for too long."""
        if self._latest is not None:
            self._latest.ended(error, math.inf, self._sent_s)
