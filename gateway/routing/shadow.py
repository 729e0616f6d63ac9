"""Shadow traffic: a fraction of the requests is copied to another pool, and the outputs are compared.

A copy is sent after the first token of the original, so that it does not delay it, and only while fewer than
``max_running`` copies run. Callers never wait for copies or see their errors.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
import time
from collections.abc import Callable

from prometheus_client import Counter

from clients.wire.connection import new_request_id
from clients.wire.retries import NO_RETRY, RetryBudget, RetrySchedule
from clients.wire.token_stream import TokenStream
from contract.errors import TridentError
from contract.generation import GenerationRequest, TokenDelta, Usage
from gateway.config.policy import ShadowRules
from gateway.request_key import deterministic
from gateway.routing.replicas import Replicas

# agree, differ: the texts of a deterministic request; undetermined: both are there and need not be equal;
# failed: the copy; unfinished: the original; full: no copy was made, too many run.
RESULTS = ("agree", "differ", "undetermined", "failed", "unfinished", "full")


class Shadow:
    """Sends copies to one pool. ``close`` cancels those that run.

    generated: called at the end of a copy as Metrics.generated. counts: the results of this object.
    """

    def __init__(
        self,
        rules: ShadowRules,
        replicas: Replicas,
        results: Counter,
        rng: random.Random,
        generated: Callable[[str, int, int, float | None, float | None], None] = lambda *figures: None,
    ) -> None:
        self.rules, self._replicas, self._results, self._rng = rules, replicas, results, rng
        self._generated = generated
        self.counts = dict.fromkeys(RESULTS, 0)
        self._copies: set[asyncio.Task] = set()
        self._comparing: set[asyncio.Task] = set()

    def begin(self, request: GenerationRequest) -> Copy | None:
        """Return the copy of this request; None if it is not in the fraction."""
        if self._rng.random() >= self.rules.fraction:
            return None
        return Copy(self, request)

    def start(self, request: GenerationRequest) -> asyncio.Task[str] | None:
        if len(self._copies) >= self.rules.max_running:
            self.count("full")
            return None
        task = asyncio.ensure_future(self._digest(request))
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)
        return task

    def count(self, result: str) -> None:
        self.counts[result] += 1
        self._results.labels(result).inc()

    def compare(self, copy: asyncio.Task[str], original: str, determined: bool) -> None:
        """Count the result once the copy has ended. original: digest of the text; "" if it is incomplete."""
        comparing = asyncio.ensure_future(self._compare(copy, original, determined))
        self._comparing.add(comparing)
        comparing.add_done_callback(self._comparing.discard)

    async def close(self) -> None:
        tasks = self._copies | self._comparing
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _compare(self, copy: asyncio.Task[str], original: str, determined: bool) -> None:
        found = await copy
        if not found:
            self.count("failed")
        elif not original:
            self.count("unfinished")
        elif not determined:
            self.count("undetermined")
        else:
            self.count("agree" if found == original else "differ")

    async def _digest(self, request: GenerationRequest) -> str:
        """Return the digest of the copy's text; "" if it fails."""
        copy = dataclasses.replace(request, request_id=new_request_id(), stream=True)
        route = self._replicas.route(copy, self.rules.pool)
        route.priority = 0.0  # behind all requests of callers
        schedule = RetrySchedule(NO_RETRY, RetryBudget(), self._rng)
        began_s, first_s, text, usage = time.monotonic(), 0.0, hashlib.sha256(), Usage(0, 0)
        try:
            async for delta in TokenStream(route, copy, schedule):
                first_s = first_s or time.monotonic()
                text.update(delta.text.encode(errors="surrogatepass"))
                usage = delta.usage or usage
        except TridentError:
            return ""
        decoding_s, tokens = time.monotonic() - first_s, usage.output_tokens
        per_token_s = decoding_s / (tokens - 1) if tokens > 1 else None
        self._generated(route.pool, usage.input_tokens, tokens, first_s - began_s if first_s else None, per_token_s)
        return text.hexdigest()


class Copy:
    """The copy of one request; it observes the original."""

    def __init__(self, shadow: Shadow, request: GenerationRequest) -> None:
        self._shadow, self._request = shadow, request
        self._text = hashlib.sha256()
        self._task: asyncio.Task[str] | None = None
        self._begun = self._whole = False

    def observe(self, delta: TokenDelta) -> None:
        self._text.update(delta.text.encode(errors="surrogatepass"))
        self._whole = self._whole or delta.finish_reason is not None
        if not self._begun:
            self._begun = True
            self._task = self._shadow.start(self._request)

    def ended(self, error: TridentError | None) -> None:
        if self._task is not None:
            original = self._text.hexdigest() if self._whole and error is None else ""
            self._shadow.compare(self._task, original, deterministic(self._request))
