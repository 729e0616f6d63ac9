"""One answer that no engine made for its request, measured, traced and logged from admission to its end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

from contract.errors import Cancelled, TridentError
from contract.generation import GenerationRequest, Usage
from gateway.admission.prompt_tokens import prompt_of
from gateway.choices import ChoiceDelta, total
from gateway.telemetry import observability
from gateway.telemetry.observability import end_span

if TYPE_CHECKING:
    from gateway.request_context import RequestContext
    from gateway.service import Service

# The label of an answer, by what x-trident-cache says of it.
SOURCES = {"hit": "cache", "semantic": "semantic", "coalesced": "coalesced", "replayed": "replayed"}


class ReusedAnswer:
    """Made by ``admitted``. ``read`` the pieces through it, then ``close`` it, whatever happens."""

    def __init__(
        self, service: Service, asking: RequestContext, wanted: Sequence[GenerationRequest], result: str
    ) -> None:
        """result: what x-trident-cache says."""
        self._service, self._asking, self._wanted = service, asking, wanted
        self._result, self.source = result, SOURCES[result]
        self.began_s = time.monotonic()
        self.first_s = 0.0
        self.usage: Usage | None = None
        self._tokens = 0
        self._usages: dict[int, Usage | None] = {}
        self._ends: dict[int, str] = {}
        self._whole = self._closed = False
        attributes = {
            "gen_ai.operation.name": asking.operation,
            "gen_ai.provider.name": "trident",
            "gen_ai.request.model": service.settings.model,
            "trident.cache": result,
            "trident.source": self.source,
        }
        self._span = service.tracing.start(f"{asking.operation} {service.settings.model}", asking.carrier, attributes)

    async def admitted(self) -> Mapping[str, str]:
        """Returns what the response says of it. Raises what admission raises; then there is nothing to close."""
        service = self._service
        try:
            service.check_open()
            self._permit = await service.admission.admit_reader(self._asking.tenant)
        except BaseException as exc:
            end_span(self._span, exc)
            if isinstance(exc, TridentError):
                service.refused(self._asking, exc, self.began_s)
            raise
        service.metrics.in_flight.inc()
        return self._permit.headers

    async def read(self, pieces: AsyncIterator[ChoiceDelta]) -> AsyncIterator[ChoiceDelta]:
        """The pieces as they are, looked at on their way."""
        try:
            async for piece in pieces:
                self._saw(piece)
                yield piece
            self._whole = True
        finally:
            await pieces.aclose()

    def close(self, error: BaseException | None) -> None:
        """error: what the caller saw; None if it went well or the caller left. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._permit.settle(None)
        service, asking = self._service, self._asking
        service.metrics.in_flight.dec()
        if not self._whole and not isinstance(error, TridentError):
            error = Cancelled("the caller went away")
        told = error if isinstance(error, TridentError) else None
        self.usage = self._used()
        ends = [self._ends[choice] for choice in sorted(self._ends)]
        end = observability.end_of(told) or next(iter(ends), "")
        service.metrics.reused(self, asking, end, told)
        if self.usage is not None:
            service.metrics.used(asking.tenant.name, self.usage, self.source)
        end_span(self._span, told, **observability.generation_attributes(self.usage, ends))
        usage = self.usage or Usage(0, 0)
        service.log(
            asking,
            told,
            self.began_s,
            reuse=self._result,
            finish_reason=end if told is None else "",
            ttft_s=round(self.first_s - self.began_s, 6) if self.first_s else None,
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
        )

    def _saw(self, piece: ChoiceDelta) -> None:
        choice, delta = piece
        tokens = len(delta.token_ids) or bool(delta.text)
        self._tokens += tokens
        if not self.first_s and (tokens or delta.finish_reason):
            self.first_s = time.monotonic()
        if delta.finish_reason:
            self._ends[choice], self._usages[choice] = delta.finish_reason.value, delta.usage

    def _used(self) -> Usage | None:
        """Tokens of a whole answer; of one that was cut, or that goes on with an earlier one, those delivered."""
        if len(self._usages) == len(self._wanted):
            choices = range(len(self._wanted))
            return total([self._usages[one] for one in choices], [id(prompt_of(one)) for one in self._wanted])
        return Usage(0, self._tokens) if self._tokens else None
