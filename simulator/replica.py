"""A replica as the gateway meets it: a channel, a metrics page, beats; behind them the model of an engine.

Messages travel as the objects that the wire's encoding would carry: ``plain_wire`` leaves the encoding out.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import grpc
import grpc.aio

from clients.wire import infer_request, infer_response
from cluster.plan import engine
from cluster.plan.engine import Sequence
from contract import errors
from contract.errors import DeadlineExceeded, PromptTooLong, Unavailable
from contract.generation import FinishReason, GenerationRequest, Timings, TokenDelta, Usage
from gateway.routing.registrations import Registration
from gateway.routing.replica_metrics import ReplicaMetrics
from simulator.routes import Breaker, Routes
from simulator.scenario import Pool

Message = tuple[TokenDelta, bool, str]


class Prompt(str):
    """A prompt that tells the model of the engine what it cannot know from a text: its own tokens, how many tokens its
    answer has, the key of what it shares with other prompts and how many tokens that are, and the answer's first id.

    session: the conversation that it belongs to. pools: of the replicas that it was sent to.
    """

    tokens: int
    answer: int
    prefix: tuple[str, int]
    base: int
    session: str
    pools: set[str]

    @classmethod
    def of(
        cls, text: str, tokens: int, answer: int, prefix: tuple[str, int] = ("", 0), base: int = 0, session: str = ""
    ) -> Prompt:
        prompt = cls(text)
        prompt.tokens, prompt.answer, prompt.prefix, prompt.base = tokens, answer, prefix, base
        prompt.session, prompt.pools = session, set()
        return prompt


class Sent(NamedTuple):
    """A request on its way."""

    request: GenerationRequest
    priority: float = 0.5


@contextmanager
def plain_wire() -> Iterator[None]:
    """Send requests and responses as they are."""

    def prioritised(sent: Sent, _: str, value: float) -> Sent:
        return sent._replace(priority=value)

    decoder = SimpleNamespace(decode=lambda message: message)
    with patch.multiple(infer_request, generation=lambda request, *_, **__: Sent(request), with_parameter=prioritised):
        with patch.multiple(infer_response, ResponseDecoder=lambda: decoder):
            yield


class Engine(engine.Engine):
    """The model of one engine of a pool, whose spans end by themselves on the simulation's clock."""

    def __init__(self, pool: Pool, rng: random.Random) -> None:
        super().__init__(pool.kind, pool.send_s, pool.noise, rng)
        self.pool, self._loop = pool, asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, sequence: Sequence, now_s: float) -> None:
        super().submit(sequence, now_s)
        self._arm()

    def cancel(self, sequence: Sequence, now_s: float) -> None:
        super().cancel(sequence, now_s)
        self._arm()

    def stop(self) -> None:
        super().stop()
        self._arm()

    def resume(self, now_s: float) -> None:
        super().resume(now_s)
        self._arm()

    def finish(self) -> None:
        self._timer = None
        super().finish()
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            if self._timer.when() == self.due_s:
                return
            self._timer.cancel()
        self._timer = None if self.due_s == math.inf else self._loop.call_at(self.due_s, self.finish)


class Replica:
    """One replica. state: starting, ready, draining, hung, dead or gone.

    held: numbers of the faults that keep it dead or hung. left_s: of its start, after these.
    delay_s: of the network, each way. blind: outages of its metrics that last. failing: faults of its engine that last.
    late: requests of people that were sent to it after it had withdrawn.
    """

    def __init__(self, pool: str, number: int, make_engine: Callable[[], Engine], ready_s: float) -> None:
        self.pool, self._make_engine, self.ready_s = pool, make_engine, ready_s
        self.engine = make_engine()
        self.host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self.address = f"{self.host}:8001"
        self.state = "starting"
        self.held: set[int] = set()
        self.left_s = 0.0
        self.delay_s = 0.0
        self.blind = self.late = self.failing = 0
        self.calls: dict[Call, None] = {}

    def listens(self, now_s: float) -> bool:
        """Whether connections are taken; a replica that starts takes none."""
        return self.state not in ("dead", "gone") and not (self.state == "starting" and self.ready_s > now_s)

    def registration(self, now_s: float) -> Registration:
        expected_s = max(0.0, self.ready_s - now_s)
        state = "ready" if self.state == "ready" else "starting"
        return Registration.model_construct(
            address=self.address, pool=self.pool, slots=self.engine.pool.slots, state=state, expected_s=expected_s,
            metrics_url=f"http://{self.host}:8002/metrics", engine="simulated", manifest_sha256="", lease_s=3.0,
        )  # fmt: skip

    def metrics(self) -> ReplicaMetrics:
        """Raises OSError where they cannot be read."""
        if self.blind or self.state in ("hung", "dead", "gone"):
            raise OSError("the replica's metrics cannot be read")
        own = self.engine
        requests = len(own.running), own.waiting, own.pool.slots
        return ReplicaMetrics(*requests, own.kv_usage, steps=own.steps + 1.0, engine=self.pool, kind="cpu")

    def die(self) -> None:
        """End as a killed process does: every call fails."""
        self.state = "dead"
        self.engine.stop()
        for call in tuple(self.calls):
            call.fail(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
        ended, self.engine = self.engine, self._make_engine()
        self.engine.drafted_tokens, self.engine.slow = ended.drafted_tokens, ended.slow  # its machine is still slow

    def hang(self) -> None:
        self.state = "hung"
        self.engine.stop()


class Channel:
    """In place of the gRPC channel of one gateway to one replica."""

    def __init__(self, replica: Replica, connection: Any, routes: Routes) -> None:
        self._replica, self.connection, self.url = replica, connection, replica.address
        self._routes, self.breaker = routes, Breaker(routes.settings, routes.broken)

    @property
    def has_room(self) -> bool:
        replica = self._replica
        working = replica.state == "ready" and not replica.failing
        return working and len(replica.calls) < replica.engine.pool.slots

    async def model_ready(self, model: str, timeout_s: float) -> bool:
        replica = self._replica
        if not replica.listens(asyncio.get_running_loop().time()):
            raise Unavailable(f"{self.url}: connection refused")
        if replica.state == "hung":
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded(f"{self.url} did not answer within {timeout_s:g} s")
        if replica.delay_s:
            await asyncio.sleep(2 * replica.delay_s)
        return True

    def generate(self, sent: Sent, timeout_s: float, metadata: object) -> Call:
        prompt = sent.request.text_input
        if not isinstance(prompt, Prompt):  # a probe, which the gateway's breaker does not see
            return Call(self._replica, sent, timeout_s, Breaker(self._routes.settings, self._routes.broken))
        if not prompt.pools:
            self._routes.check(self.url, self._replica.pool, sent.request)
        return Call(self._replica, sent, timeout_s, self.breaker)

    async def close(self) -> None:
        """Nothing is open."""


class Call:
    """In place of grpc.aio.UnaryStreamCall: yields messages, then ends or raises grpc.aio.AioRpcError."""

    def __init__(self, replica: Replica, sent: Sent, timeout_s: float, breaker: Breaker) -> None:
        self._loop = asyncio.get_running_loop()
        self._breaker, self._sent_s = breaker, self._loop.time()
        self._replica, self._request = replica, sent.request
        self.prompt = sent.request.text_input
        breaker.sent(self, self._sent_s)
        self._messages: deque[Message] = deque()
        self._error: grpc.aio.AioRpcError | None = None
        self._ended, self._due_s = False, 0.0  # when the last message arrives
        self._reader: asyncio.Future[None] | None = None
        prompt = self.prompt if isinstance(self.prompt, Prompt) else Prompt.of("", 1, 1)
        prompt.pools.add(replica.pool)
        self._prompt, made, most = prompt, len(sent.request.continue_ids), sent.request.max_tokens
        replica.late += replica.state == "draining" and prompt is self.prompt
        # After other ids than it made an engine makes other ones.
        goes_on = sent.request.continue_ids == tuple(range(prompt.base, prompt.base + made))
        self._base = prompt.base if goes_on else -(1 << 20)
        lengths = prompt.tokens + made, most - made, max(1, min(prompt.answer, most) - made)
        self._sequence = Sequence(*lengths, self._tell, sent.priority, made, prompt.prefix)
        self._timer = self._loop.call_later(timeout_s, self.fail, grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        if not replica.listens(self._loop.time()):
            self.fail(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            return
        replica.calls[self] = None
        if replica.failing and prompt is self.prompt:
            self._after(self.fail, grpc.StatusCode.INTERNAL, "engine failed")
        else:
            self._after(self._submit if self._sequence.reserved <= replica.engine.kind.longest else self._refuse)

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Message:
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._reader = self._loop.create_future()
            await self._reader
        return self._messages.popleft()

    def cancel(self) -> bool:
        if self._ended:
            return False
        self._end()
        self._breaker.left(self)
        self._replica.engine.cancel(self._sequence, self._loop.time())
        if self._reader is not None and not self._reader.done():
            self._reader.cancel()
        return True

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        if not self._ended:
            self._end()
            self._replica.engine.cancel(self._sequence, self._loop.time())
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
                self._breaker.failed(self, self._sent_s, self._loop.time())
            else:
                self._breaker.left(self)
            self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
            self._wake()

    def _after(self, act: Any, *arguments: Any) -> None:
        """Act when it has gone over the network, and through what stands before and behind the engine."""
        step, now_s = self._replica.engine.pool.step, self._loop.time()
        due_s = now_s + self._replica.delay_s + (step.request_s + step.gateway_s) / 2
        # What comes after the network's delay ended does not overtake what is on its way.
        self._due_s = max(due_s, math.nextafter(self._due_s, math.inf))
        if self._due_s > now_s:
            self._loop.call_at(self._due_s, act, *arguments)
        else:
            act(*arguments)

    def _refuse(self) -> None:
        longest, tokens, most = self._replica.engine.kind.longest, self._prompt.tokens, self._request.max_tokens
        problem = f"must be at most {max(0, longest - tokens)} with a prompt of {tokens} tokens, got {most}"
        self.fail(grpc.StatusCode.INVALID_ARGUMENT, errors.to_text(PromptTooLong("max_tokens", problem)))

    def _submit(self) -> None:
        if not self._ended:
            self._replica.engine.submit(self._sequence, self._loop.time())

    def _tell(self, sequence: Sequence, tokens: int, end: bool) -> None:
        first = self._base + sequence.first_id + sequence.sent - tokens
        ids = tuple(range(first, first + tokens))
        if not end:
            self._after(self._arrive, (TokenDelta(token_ids=ids), False, ""))
            return
        made, prompt = sequence.first_id + sequence.answer, self._prompt.tokens
        instants = (sequence.arrived_s, sequence.scheduled_s, sequence.first_s, sequence.last_s)
        timings = Timings(*(int(1e9 * at_s) for at_s in instants))
        reason = FinishReason.LENGTH if made >= self._request.max_tokens else FinishReason.STOP
        usage = Usage(prompt, made, min(sequence.cached, prompt))
        self._after(self._arrive, (TokenDelta("", ids, (), reason, "", usage, timings), True, ""))

    def _arrive(self, message: Message) -> None:
        if not self._ended:
            self._messages.append(message)
            self._breaker.began(self)
            if message[1]:
                self._end()
                self._breaker.succeeded(self._sent_s)
            self._wake()

    def _end(self) -> None:
        self._ended = True
        self._timer.cancel()
        self._replica.calls.pop(self, None)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
