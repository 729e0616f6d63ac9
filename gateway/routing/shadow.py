"""Shadow traffic: a fraction of the requests is copied to another pool, and the outputs are compared.

A copy is sent after the first token of the original, which it does not delay, and only while fewer than ``max_running``
copies run. Callers never wait for copies or see their errors.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping

from clients.wire.connection import new_request_id
from clients.wire.retries import NO_RETRY, RetryBudget, RetrySchedule
from clients.wire.token_stream import TokenStream
from contract.background import Background
from contract.errors import TridentError
from contract.generation import GenerationRequest, TokenDelta, Usage
from gateway.config.policy import ShadowRules
from gateway.request_key import deterministic
from gateway.routing.replicas import Replicas

Keep = Callable[[str, str | None], None]


class Shadow:
    """Sends copies to other pools.

    rules: by the pool that serves the original; None: of all other pools. generated: as Metrics.generated.
    count: called with a copy's pool and its result: agree, differ: the texts of a deterministic request; undetermined:
        they need not be equal; failed: the copy; unfinished: the original; full: no copy was made, too many run.
    """

    def __init__(
        self,
        replicas: Replicas,
        rng: random.Random,
        count: Callable[[str, str], None],
        generated: Callable[[str, int, int, float | None, float | None], None],
    ) -> None:
        self._replicas, self._rng, self.count, self._generated = replicas, rng, count, generated
        self.rules: Mapping[str | None, ShadowRules] = {}
        self._running: Counter[str] = Counter()
        self.tasks = Background()

    def begin(self, request: GenerationRequest, pool: str) -> Copy | None:
        """Return the copy of this request, which ``pool`` serves; None if it is not in the fraction."""
        rules = self.rules.get(pool) or self.rules.get(None)
        if rules is None or rules.pool == pool or self._rng.random() >= rules.fraction:
            return None
        return Copy(self, rules, request)

    def start(self, request: GenerationRequest, rules: ShadowRules, payload: bytes) -> asyncio.Task[str | None] | None:
        if self._running[rules.pool] >= rules.max_running:
            self.count(rules.pool, "full")
            return None
        self._running[rules.pool] += 1
        return self.tasks.start(self._output(request, rules.pool, payload))

    async def _output(self, request: GenerationRequest, pool: str, payload: bytes) -> str | None:
        """Return the copy's text at ``pool``; None if it fails."""
        copy = dataclasses.replace(request, request_id=new_request_id(), stream=True)
        route = self._replicas.route(copy, pool, payload=payload)
        route.priority = 0.0  # behind all requests of callers
        schedule = RetrySchedule(NO_RETRY, RetryBudget(), self._rng)
        began_s, first_s, usage = time.monotonic(), 0.0, Usage(0, 0)
        parts: list[str] = []
        try:
            async for delta in TokenStream(route, copy, schedule):
                first_s = first_s or time.monotonic()
                parts.append(delta.text)
                usage = delta.usage or usage
        except TridentError:
            return None
        finally:
            self._running[pool] -= 1
        decoding_s, tokens = time.monotonic() - first_s, usage.output_tokens
        per_token_s = decoding_s / (tokens - 1) if tokens > 1 else None
        self._generated(pool, usage.input_tokens, tokens, first_s - began_s if first_s else None, per_token_s)
        return "".join(parts)


class Copy:
    """The copy of one request; it observes the original. payload: the ModelInferRequest, where one is relayed."""

    def __init__(self, shadow: Shadow, rules: ShadowRules, request: GenerationRequest) -> None:
        self._shadow, self._rules, self._request = shadow, rules, request
        self._parts: list[str] = []
        self._task: asyncio.Task[str | None] | None = None
        self._whole = False
        self.payload = b""

    def observe(self, delta: TokenDelta) -> None:
        self._parts.append(delta.text)
        self._whole = self._whole or delta.finish_reason is not None
        if len(self._parts) == 1:
            self._task = self._shadow.start(self._request, self._rules, self.payload)

    def ended(self, error: TridentError | None, keep: Keep | None = None) -> None:
        """Compare the outputs once the copy has ended. keep: called once, with the copy's pool and its text; None
        unless both texts are whole."""
        self._shadow.tasks.start(self._compare(self._whole and error is None, keep))

    async def _compare(self, whole: bool, keep: Keep | None) -> None:
        pool, original, found = self._rules.pool, "".join(self._parts), None
        try:
            found = await self._task if self._task is not None else None
        finally:
            if keep is not None:
                keep(pool, found if whole else None)
        if self._task is None:
            return
        if found is None:
            result = "failed"
        elif not whole:
            result = "unfinished"
        elif not deterministic(self._request):
            result = "undetermined"
        else:
            result = "agree" if found == original else "differ"
        self._shadow.count(pool, result)
