"""A fleet of replicas in simulated time, to let picks play against each other.

Each replica batches in flight: a step decodes one token of every running sequence and takes ``step_s`` plus
``step_s_per_sequence`` for each; a prompt is computed before its sequence joins, has the engine to itself and
takes ``prefill_s_per_token`` for every token that the replica's prefix cache does not hold.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from clients.replica_set.costs import Cost, Costs, Observation
from clients.replica_set.picks import Pick, ReplicaLoad, RoutingRequest

BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Job:
    """One request: when it arrives and how large it really is; ``prefix_tokens`` of the prompt are shared."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0
    session: str = ""


@dataclass(frozen=True)
class Engine:
    """How fast a replica is."""

    slots: int = 16
    step_s: float = 0.010
    step_s_per_sequence: float = 0.0005
    prefill_s_per_token: float = 0.0001
    cached_prefixes: int = 8


@dataclass
class Outcome:
    """What the requests of a run experienced, in order of completion."""

    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    shares: Counter = field(default_factory=Counter)
    cached_tokens: int = 0
    shared_tokens: int = 0
    most_outstanding: int = 0

    def ttft(self, fraction: float) -> float:
        return _quantile(self.ttft_s, fraction)

    def latency(self, fraction: float) -> float:
        return _quantile(self.latency_s, fraction)

    @property
    def hit_rate(self) -> float:
        """Of the prompt tokens that were shared with earlier requests, the fraction found in a cache."""
        return self.cached_tokens / self.shared_tokens if self.shared_tokens else 0.0


@dataclass
class _Sequence:
    job: Job
    cost: Cost
    cached: int = 0
    scheduled_s: float = 0.0
    first_s: float = 0.0
    made: int = 0

    @property
    def booked(self) -> float:
        return self.cost.decode if self.made else self.cost.total


class _Replica:
    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self.waiting: deque[_Sequence] = deque()
        self.running: list[_Sequence] = []
        self.busy = False
        self.prefixes: OrderedDict[str, None] = OrderedDict()

    @property
    def outstanding(self) -> int:
        return len(self.waiting) + len(self.running)

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            self.name,
            pending_tokens=round(sum(sequence.booked for sequence in itertools.chain(self.waiting, self.running))),
            outstanding=self.outstanding,
            max_running=self.engine.slots,
        )

    def cached(self, job: Job) -> int:
        """Tokens of the prompt found in the cache; the prefix is there from now on."""
        if not job.prefix:
            return 0
        hit = job.prefix in self.prefixes
        self.prefixes[job.prefix] = None
        self.prefixes.move_to_end(job.prefix)
        if len(self.prefixes) > self.engine.cached_prefixes:
            self.prefixes.popitem(last=False)
        return job.prefix_tokens if hit else 0


def simulate(
    pick: Pick,
    jobs: Sequence[Job],
    engines: dict[str, Engine],
    *,
    costs: Costs | None = None,
    look_every_s: float = 0.0,
    seed: int = 0,
) -> Outcome:
    """Plays ``jobs`` against a fleet. ``look_every_s``: how old the loads may be that ``pick`` sees; 0 is now."""
    rng, outcome, costs = random.Random(seed), Outcome(), costs or Costs()
    replicas = {name: _Replica(name, engine) for name, engine in engines.items()}
    order = itertools.count()
    events: list[tuple[float, int, Callable[[float], None]]] = []
    seen: list[ReplicaLoad] = []
    seen_at_s = -1e9

    def at(time_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(events, (time_s, next(order), event))

    def arrive(turn: int, job: Job) -> Callable[[float], None]:
        def event(now_s: float) -> None:
            nonlocal seen, seen_at_s
            if now_s - seen_at_s >= look_every_s:
                seen, seen_at_s = [replica.load() for replica in replicas.values()], now_s
            cost = costs.estimate(job.prompt_tokens * BYTES_PER_TOKEN, job.max_tokens)
            replica = replicas[pick(seen, RoutingRequest(turn, job.session, job.prefix), rng).name]
            outcome.shares[replica.name] += 1
            replica.waiting.append(_Sequence(job, cost))
            outcome.most_outstanding = max(outcome.most_outstanding, replica.outstanding)
            if not replica.busy:
                step(replica, now_s)

        return event

    def step(replica: _Replica, now_s: float) -> None:
        """Computes at most one prompt, then one token of everything that runs; comes back when that is done."""
        engine, took_s = replica.engine, 0.0
        if replica.waiting and len(replica.running) < engine.slots:
            sequence = replica.waiting.popleft()
            sequence.cached = replica.cached(sequence.job)
            sequence.scheduled_s = now_s
            outcome.cached_tokens += sequence.cached
            outcome.shared_tokens += sequence.job.prefix_tokens
            took_s += (sequence.job.prompt_tokens - sequence.cached) * engine.prefill_s_per_token
            replica.running.append(sequence)
        replica.busy = bool(replica.running)
        if replica.busy:
            took_s += engine.step_s + engine.step_s_per_sequence * len(replica.running)
            at(now_s + took_s, lambda then_s: stepped(replica, then_s))

    def stepped(replica: _Replica, now_s: float) -> None:
        running = len(replica.running)
        for sequence in list(replica.running):
            sequence.made += 1
            if sequence.made == 1:
                sequence.first_s = now_s
            if sequence.made >= sequence.job.output_tokens:
                replica.running.remove(sequence)
                finish(sequence, now_s, running)
        step(replica, now_s)

    def finish(sequence: _Sequence, now_s: float, running: int) -> None:
        job = sequence.job
        outcome.ttft_s.append(sequence.first_s - job.arrival_s)
        outcome.latency_s.append(now_s - job.arrival_s)
        prefill_s, decode_s = sequence.first_s - sequence.scheduled_s, now_s - sequence.first_s
        uncached = job.prompt_tokens - sequence.cached
        costs.observe(Observation(prefill_s, uncached, decode_s, job.output_tokens, running))
        costs.observe_size(job.prompt_tokens * BYTES_PER_TOKEN, job.prompt_tokens)

    for turn, job in enumerate(jobs):
        at(job.arrival_s, arrive(turn, job))
    while events:
        now_s, _, event = heapq.heappop(events)
        event(now_s)
    return outcome


def poisson(rate: float, count: int, rng: random.Random, make: Callable[[float, random.Random], Job]) -> list[Job]:
    """``count`` jobs that arrive at random, ``rate`` a second on average."""
    jobs, now_s = [], 0.0
    for _ in range(count):
        now_s += rng.expovariate(rate)
        jobs.append(make(now_s, rng))
    return jobs


def _quantile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
