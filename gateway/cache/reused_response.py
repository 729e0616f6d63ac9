"""A response that no engine generated for its request: admitted, measured, traced and logged."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from contract.errors import Cancelled, TridentError
from contract.generation import GenerationRequest, Usage
from gateway.admission.prompt_tokens import prompt_of
from gateway.choices import ChoiceDelta, ChoiceDeltas, total
from gateway.request_context import RequestContext
from gateway.service import Service
from gateway.telemetry import request_log
from gateway.telemetry.tracing import end_request, end_span, generation_attributes

# The metrics' label ``source``, by the value of x-trident-cache.
SOURCES = {"hit": "cache", "semantic": "semantic", "coalesced": "coalesced", "replayed": "replayed"}


class ReusedResponse:
    """Admit it, ``read`` the deltas through it, then ``close`` it, whatever happens. result: of x-trident-cache."""

    def __init__(
        self, service: Service, context: RequestContext, requests: Sequence[GenerationRequest], result: str
    ) -> None:
        self._service, self._context, self._requests = service, context, requests
        self._result, self._source = result, SOURCES[result]
        self._began_s = time.monotonic()
        self._first_s = 0.0
        self._tokens = 0
        self._usages: dict[int, Usage | None] = {}
        self._ends: dict[int, str] = {}
        self._complete = self._closed = False
        self._span = service.request_span(context, requests, self._source, **{"trident.cache": result})

    async def admit(self) -> Mapping[str, str]:
        """Charge one request; return the budget's response headers. Where it raises, there is nothing to close."""
        service = self._service
        try:
            with service.live.admitting():
                charge = self._context.charge(self._source)
                self._permit = await service.admission.admit_reader(self._context.tenant, charge)
        except BaseException as exc:
            end_span(self._span, exc)
            if isinstance(exc, TridentError):
                service.refused(self._context, exc, self._began_s)
            raise
        service.live.add(self)
        return {**self._permit.headers, **service.context_headers(self._context)}

    async def read(self, deltas: ChoiceDeltas) -> AsyncGenerator[ChoiceDelta, None]:
        """Pass on the deltas and count their tokens."""
        async with aclosing(deltas):
            async for item in deltas:
                self._record(item)
                yield item
            self._complete = True

    def close(self, error: BaseException | None) -> None:
        """Settle and record the response, once. error: that the client saw; None also where it disconnected."""
        if self._closed:
            return
        self._closed = True
        self._permit.settle(None)
        service, context = self._service, self._context
        service.live.discard(self)
        if not self._complete and not isinstance(error, TridentError):
            error = Cancelled("the client disconnected")
        seen = error if isinstance(error, TridentError) else None
        usage = self._usage()
        ends = [self._ends[choice] for choice in sorted(self._ends)]
        end = next(iter(ends), "") if seen is None else ""
        first_s = self._first_s - self._began_s if self._first_s else None
        service.metrics.ended(context, seen, end, began_s=self._began_s, first_s=self._first_s, source=self._source)
        if usage is not None:
            service.metrics.used(context.tenant.name, usage, self._source)
        end_request(self._span, context.trace, seen, generation_attributes(usage, ends, first_s))
        request_log.write(
            context,
            seen,
            self._began_s,
            reuse=self._result,
            finish_reason=end,
            ttft_s=round(first_s, 6) if first_s is not None else None,
            input_tokens=usage.input_tokens if usage else 0,
            output_tokens=usage.output_tokens if usage else 0,
        )

    def check(self, now_s: float) -> None:
        """Nothing: the generation that it reads is checked."""

    def cut(self, error: TridentError) -> None:
        """Nothing: the generation that it reads is cut, and a stream of another gateway is not read on."""

    def _record(self, item: ChoiceDelta) -> None:
        choice, delta = item
        tokens = len(delta.token_ids) or bool(delta.text)
        self._tokens += tokens
        if not self._first_s and (tokens or delta.finish_reason):
            self._first_s = time.monotonic()
        if delta.finish_reason:
            self._ends[choice], self._usages[choice] = delta.finish_reason.value, delta.usage

    def _usage(self) -> Usage | None:
        """Return the tokens of a complete response; of a cut or resumed one, the tokens that were sent."""
        if len(self._usages) == len(self._requests):
            usages = [self._usages[choice] for choice in range(len(self._requests))]
            return total(usages, [id(prompt_of(request)) for request in self._requests])
        return Usage(0, self._tokens) if self._tokens else None
