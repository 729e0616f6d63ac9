"""The choices of one admitted request: generated and read together, settled together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import NamedTuple, Protocol

from opentelemetry.trace import Span

from clients.wire import completion
from clients.wire.completion import Completion
from contract.errors import TridentError
from contract.generation import TokenDelta, Usage
from gateway.admission.budgets import Reservation
from gateway.admission.fair_admission import Permit
from gateway.admission.prompt_tokens import PromptTokens, prompt_of
from gateway.admission.request_class import BATCH
from gateway.generation import Generation, GenerationRuntime
from gateway.request_context import RequestContext
from gateway.telemetry.metrics import error_type
from gateway.telemetry.tracing import end_request, generation_attributes


class ChoiceDelta(NamedTuple):
    """choice: its index. delta: what it adds to the choice."""

    choice: int
    delta: TokenDelta


class ChoiceDeltas(Protocol):
    """The deltas of a response, in order of arrival. Its reader closes it."""

    def __aiter__(self) -> AsyncIterator[ChoiceDelta]: ...
    async def __anext__(self) -> ChoiceDelta: ...
    async def aclose(self) -> None: ...


class Choices:
    """The generations of one permit, which is settled when the last one has ended, with the usage of all.

    Iterate to read their deltas in order of arrival. The first error ends all of them, and so does ``close``, which
    the caller must call in any case.
    headers: of the response. A generation that moves to another target changes them.
    charged_elsewhere: another gateway has taken the stream over, and charges all of it.
    """

    def __init__(
        self,
        runtime: GenerationRuntime,
        permit: Permit,
        prompt_tokens: PromptTokens,
        context: RequestContext,
        began_s: float,
        span: Span | None,
    ) -> None:
        """prompt_tokens: learns from the engine's token counts. began_s: arrival. span: of the request."""
        self._metrics, self._permit, self._prompt_tokens = runtime.metrics, permit, prompt_tokens
        self._context, self._span, self._began_s = context, span, began_s
        self._usages: list[Usage | None] = [None] * len(permit.requests)  # of those that have ended
        self._micros, self.charged_elsewhere = 0, False
        self.headers: dict[str, str] = permit.headers
        self._live = len(permit.requests)
        self.generations: list[Generation] = []
        for index in range(self._live):
            self.generations.append(Generation(runtime, permit, index, context, began_s, span, self._ended))

    def __aiter__(self) -> ChoiceDeltas:
        return _OneChoice(*self.generations) if len(self.generations) == 1 else _merged(self.generations)

    @property
    def reservation(self) -> Reservation | None:
        """Of the budget; to be settled by another gateway if this one dies."""
        return self._permit.reservation

    @property
    def made_elsewhere(self) -> bool:
        """Whether an overflow target served any of them."""
        return any(generation.target for generation in self.generations)

    def close(self, error: BaseException | None = None) -> None:
        """End all generations. error: what the caller saw; None for success, or if the caller left."""
        for generation in self.generations:
            generation.close(error)

    def _total(self) -> Usage | None:
        if self.charged_elsewhere:
            return None
        if len(self._usages) == 1:
            return self._usages[0]
        return total(self._usages, [id(prompt_of(request)) for request in self._permit.requests])

    def _ended(self, ended: Generation) -> int:
        """Return what a generation that ends adds to the cost: of choices of one prompt, the first has the prompt's."""
        before, paid = self._micros, self._context.paid
        # A batch runs a line again whose generation was cut, and what came of it before is dropped.
        usage = ended.usage if ended.finish_reason or self._context.operation != BATCH else None
        self._usages[ended.index] = usage if paid is None else _unpaid(ended, usage, paid[ended.index])
        if self._permit.charge.price is not None:
            self._micros = self._permit.charge.micros(self._total())
        # An upstream counts with another tokenizer, and the count of a cut generation is an estimate.
        if ended.finish_reason and ended.usage is not None and not self._permit.target:
            # Ids need no estimate, and a truncated prompt's count says nothing about its text.
            if ended.request.input_ids is None and ended.request.truncate_prompt_tokens is None:
                self._prompt_tokens.learn(self._context.tenant.name, ended.prompt_count, ended.usage.input_tokens)
        self._live -= 1
        if not self._live:
            self._settle()
        return self._micros - before

    def _settle(self) -> None:
        usage, tenant, model = self._total(), self._context.tenant.name, self._context.model
        self._permit.settle(usage)
        if usage is not None:
            self._metrics.used(tenant, usage, model=model.name, cost=self._micros / 1e6)
        if self._span is None and self._context.trace is None:
            return
        ends = [generation.finish_reason or error_type(generation.error) for generation in self.generations]
        error = next((generation.error for generation in self.generations if generation.error is not None), None)
        first_s = min((one.first_s for one in self.generations if one.first_s), default=None)
        attributes = generation_attributes(usage, ends, first_s and first_s - self._began_s)
        if model.price is not None:
            attributes["trident.cost"] = self._micros / 1e6
        end_request(self._span, self._context.trace, error, attributes)


def _unpaid(ended: Generation, usage: Usage | None, paid: int | None) -> Usage | None:
    """Return what is to be charged of a choice that another gateway began, of whose output ``paid`` tokens are."""
    if not ended.finish_reason:  # its own count is of what was generated here
        output_tokens = len(ended.request.continue_ids) + ended.tokens
        usage = Usage(ended.prompt_count.likely, output_tokens) if output_tokens else None
    return usage if usage is None or paid is None else Usage(0, usage.output_tokens - paid)


def total(usages: Sequence[Usage | None], prompts: Iterable[object]) -> Usage | None:
    """Return the usage of all choices; each prompt counts once, by its identity. None if nothing was generated."""
    known = [(prompt, usage) for prompt, usage in zip(prompts, usages, strict=True) if usage is not None]
    if not known:
        return None
    largest: dict[object, Usage] = {}
    for prompt, usage in known:
        largest[prompt] = max(largest.get(prompt, usage), usage, key=lambda one: one.input_tokens)
    output_tokens, each = sum(usage.output_tokens for _, usage in known), largest.values()
    return Usage(sum(usage.input_tokens for usage in each), output_tokens, sum(usage.cached_tokens for usage in each))


async def together(deltas: AsyncIterable[ChoiceDelta], request_id: str) -> list[Completion]:
    """Read every choice to its end. Raises the first error."""
    by_choice: defaultdict[int, list[TokenDelta]] = defaultdict(list)
    async for choice, delta in deltas:
        by_choice[choice].append(delta)
    return [completion.join(by_choice[choice], request_id) for choice in sorted(by_choice)]


class _OneChoice:
    """The deltas of a single choice. An asynchronous generator would cost every token a frame more."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __aiter__(self) -> _OneChoice:
        return self

    async def __anext__(self) -> ChoiceDelta:
        return ChoiceDelta(0, await self._generation.__anext__())

    async def aclose(self) -> None:
        """Nothing is held here: ``Choices.close`` ends the generation."""


async def _merged(generations: list[Generation]) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield deltas in order of arrival. A slow reader applies backpressure to all generations."""
    arrived: asyncio.Queue = asyncio.Queue(maxsize=len(generations))

    async def read(choice: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                await arrived.put((choice, delta))
            generation.close()  # frees its slot at once
            await arrived.put((choice, None))
        except TridentError as error:
            generation.close(error)
            await arrived.put((choice, error))

    tasks = [asyncio.ensure_future(read(*pair)) for pair in enumerate(generations)]
    try:
        live = len(tasks)
        while live:
            choice, item = await arrived.get()
            if isinstance(item, TridentError):
                raise item
            if item is None:
                live -= 1
            else:
                yield ChoiceDelta(choice, item)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
