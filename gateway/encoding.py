"""Texts to vectors and pairs to scores: admitted by their tokens, then encoded by the replicas of an encoder's pool."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Sequence

import numpy as np
from opentelemetry.trace import SpanKind

from clients.replica_set.picks import RoutingRequest
from clients.wire import encoder_call
from clients.wire.connection import new_request_id
from clients.wire.encoder_call import Encoded, Rows
from contract.encoder import MAX_ROWS
from contract.errors import Cancelled, DeadlineExceeded, InvalidArgument, Overloaded, TridentError, Unavailable
from contract.generation import INT32_MAX, GenerationRequest, Usage
from gateway.admission.fair_admission import FairAdmission
from gateway.admission.prompt_tokens import MOST_COUNTED, PromptCount, PromptTokens
from gateway.generation import GenerationRuntime
from gateway.request_context import RequestContext
from gateway.routing.backend_errors import from_backend
from gateway.routing.replicas import RoutedReplica
from gateway.telemetry import request_log
from gateway.telemetry.tracing import PROVIDER, end_span, traceparent

MOST_CALL_BYTES = 4 * 1024 * 1024
_MOST_ATTEMPTS = 4  # replicas that one call may go to
_ROW = re.compile(r"\[(\d+)\]$")


@dataclasses.dataclass(frozen=True)
class EncodedRows:
    """values: f32[n, d]; d is 1 for scores. headers: of the response."""

    values: np.ndarray
    tokens: int
    headers: dict[str, str]


class Encoding:
    """Encode rows at the replicas of a pool. Made on the loop that uses it."""

    def __init__(self, runtime: GenerationRuntime, admission: FairAdmission) -> None:
        self._settings, self._replicas, self._admission = runtime.settings, runtime.replicas, admission
        self._live, self._metrics, self._tracing = runtime.live, runtime.metrics, runtime.tracing
        self._prompt_tokens = PromptTokens()  # an encoder has a tokenizer of its own: its tokens are estimated
        self._turns = itertools.count()

    async def admitted(self, rows: Rows, pool: str, context: RequestContext, timeout_s: float) -> EncodedRows:
        """Encode the rows of one caller, charged with their tokens.

        Raises: as FairAdmission.admit_input; InvalidArgument that names a wrong row; Unavailable; DeadlineExceeded.
        """
        began_s, key = time.monotonic(), f"{context.tenant.name}\n{pool}"
        attributes = {"trident.pool": pool}
        if context.operation == "embeddings":  # the conventions know no scores
            attributes |= {"gen_ai.operation.name": context.operation, "gen_ai.provider.name": PROVIDER}
            attributes |= {"gen_ai.request.model": pool}
        span = self._tracing.start(f"{context.operation} {pool}", context.carrier, attributes)
        error: BaseException | None = None
        tokens, charge, more = 0, context.charge(), {}
        try:
            with self._live.admitting():
                count = await self._count(rows, key)
                most = _kept(rows) * (len(rows.texts) + len(rows.pairs) + len(rows.ids))
                needed = min(count.tokens, most), count.least
                permit = await self._admission.admit_input(*needed, context.tenant, pool, timeout_s, charge)
                done: list[Encoded] = []
                call_span = self._tracing.child(span, "replica", SpanKind.CLIENT)
                try:
                    left_s = timeout_s - (time.monotonic() - began_s)
                    await self._encode(rows, pool, left_s, traceparent(call_span, context.carrier), done.append)
                finally:
                    tokens = sum(part.tokens for part in done)
                    end_span(call_span)
                    usage = Usage(tokens, 0) if tokens else None
                    permit.settle(usage)
                    if usage is not None:
                        micros = charge.micros(usage)
                        self._metrics.used(context.tenant.name, usage, model=context.model.name, cost=micros / 1e6)
                        more = request_log.cost_fields(context, micros)
            if not count.exact and rows.truncate is None:
                self._prompt_tokens.learn(key, count, tokens)
            return EncodedRows(_array(done), tokens, dict(permit.headers))
        except BaseException as exc:
            error = exc
            raise
        finally:
            end_span(span, error, **{"gen_ai.usage.input_tokens": tokens})
            known = error if isinstance(error, TridentError) else None
            request_log.write(context, known, began_s, pool=pool, input_tokens=tokens, **more)

    async def embedding(self, text: str, pool: str, timeout_s: float) -> np.ndarray | None:
        """Return one text's embedding for the gateway's own use: f32[d] of length 1, or None if there is none in time.

        No tenant is charged; the caller bounds how many run at once.
        """
        done: list[Encoded] = []
        try:
            await asyncio.wait_for(self._encode(Rows((text,)), pool, timeout_s, "", done.append), timeout_s)
        except (asyncio.TimeoutError, TridentError):
            return None
        vector: np.ndarray = _array(done)[0]
        length = float(np.linalg.norm(vector))
        return vector / length if len(vector) > 1 and 0.0 < length < float("inf") else None

    async def _count(self, rows: Rows, key: str) -> PromptCount:
        """Return the tokens of the rows, estimated from their bytes; ids are counted."""
        if rows.ids:
            tokens = sum(min(len(row), _kept(rows)) for row in rows.ids)
            return PromptCount(tokens, tokens, tokens, 0.0, True)
        query = rows.texts[0] if rows.pairs and len(set(rows.texts)) == 1 else None
        count = await self._estimated(rows.pairs if query is not None else (*rows.texts, *rows.pairs), key)
        if query is None:
            return count
        times, first = len(rows.texts), await self._estimated((query,), key)
        summed = [each + times * other for each, other in zip(count[:4], first[:4], strict=True)]
        return PromptCount(int(summed[0]), int(summed[1]), int(summed[2]), summed[3], False)

    async def _estimated(self, texts: Sequence[str], key: str) -> PromptCount:
        text = "\n".join(texts)
        request = GenerationRequest(text_input=text, max_tokens=1)
        if len(text) > MOST_COUNTED:
            return await asyncio.to_thread(self._prompt_tokens.estimate, request, key)
        return self._prompt_tokens.estimate(request, key)

    async def _encode(
        self, rows: Rows, pool: str, timeout_s: float, parent: str, done: Callable[[Encoded], None]
    ) -> None:
        """Encode the rows, one call after the other, so that the calls of others come in between."""
        until_s = time.monotonic() + timeout_s
        for part in encoder_call.batches(rows, MAX_ROWS, MOST_CALL_BYTES):
            batch = dataclasses.replace(rows, texts=rows.texts[part], pairs=rows.pairs[part], ids=rows.ids[part])
            try:
                done(await self._call(batch, pool, until_s, parent))
            except InvalidArgument as exc:
                raise _of_row(exc, part.start) from exc

    async def _call(self, rows: Rows, pool: str, until_s: float, parent: str) -> Encoded:
        """Send one call, to another replica where one fails: encoding twice changes nothing."""
        tried, call = frozenset[str](), encoder_call.call(rows, new_request_id())
        while True:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded("the deadline passed before the input was encoded")
            replica = self._replicas.choose(RoutingRequest(next(self._turns), tried=tried), pool)
            tried |= {replica.url}
            try:
                return await self._sent(replica, call, min(left_s, self._settings.idle_timeout_s), parent)
            except (Unavailable, Overloaded, DeadlineExceeded) as exc:
                if len(tried) == _MOST_ATTEMPTS or not self._replicas.has_untried(pool, tried):
                    raise from_backend(exc) from exc.__cause__
            except TridentError as exc:
                raise from_backend(exc) from exc.__cause__

    async def _sent(
        self, replica: RoutedReplica, call: encoder_call.UnaryCall, timeout_s: float, parent: str
    ) -> Encoded:
        """Send a call to one replica, whose load it is until it ends."""
        size, sent_s = len(call.payload) / 4, time.monotonic()
        replica.work.reserve(size)
        replica.sent()
        ended: TridentError | None = Cancelled("the caller left")
        try:
            encoded = encoder_call.read(await replica.channel.call(call, timeout_s, replica.metadata("", parent)))
            ended, replica.progress_s = None, time.monotonic()
            return encoded
        except TridentError as exc:
            ended = exc
            raise
        finally:
            replica.work.subtract(size)
            replica.work.release()
            # Time in the queue of a replica that serves other requests is not silence.
            silent_s = 0.0 if ended is None else time.monotonic() - max(sent_s, replica.progress_s)
            replica.ended(ended, silent_s, sent_s)


def _array(parts: list[Encoded]) -> np.ndarray:
    return np.concatenate([np.frombuffer(part.values, "<f4").reshape(-1, part.dimensions) for part in parts])


def _kept(rows: Rows) -> int:
    return rows.truncate if rows.truncate is not None and rows.truncate > 0 else INT32_MAX


def _of_row(error: InvalidArgument, first: int) -> InvalidArgument:
    """Return the error of a row of a batch as one of the whole request. first: the batch's first row."""
    return type(error)(_ROW.sub(lambda row: f"[{first + int(row[1])}]", error.field), error.problem)
