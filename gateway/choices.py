"""What was admitted for one caller: a generation for each choice, read together, settled together."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.trace import Span

from clients.wire import completion
from clients.wire.completion import Completion
from contract.errors import TridentError
from contract.generation import TokenDelta, Usage
from gateway.admission.permit import Permit
from gateway.admission.prompt_tokens import prompt_of
from gateway.generation import Generation
from gateway.telemetry import observability
from gateway.telemetry.observability import end_span

if TYPE_CHECKING:
    from gateway.request_context import RequestContext
    from gateway.service import Service


class ChoiceDelta(NamedTuple):
    """A delta, and which choice it adds to."""

    choice: int
    delta: TokenDelta


class Choices:
    """The generations behind one permit; ``headers`` is what the response says about them.

    Read with ``async for``, in order of arrival; the first error ends them all, and so does ``close``, which whoever
    has them calls whatever happens. The permit is settled when the last generation has ended, with what all of them
    used; a prompt counts once, however many choices were made of it.
    """

    def __init__(
        self, service: Service, permit: Permit, asking: RequestContext, began_s: float, span: Span | None
    ) -> None:
        self._service, self._tenant, self._permit, self._span = service, asking.tenant.name, permit, span
        self.headers: dict[str, str] = permit.headers  # one that goes elsewhere changes what it says
        self._open = len(permit.requests)
        self.generations = [
            Generation(service, request, permit, turn, asking, began_s, span, self._ended)
            for request, turn in zip(permit.requests, permit.turns, strict=True)
        ]
        for generation, count in zip(self.generations, permit.counts, strict=True):
            generation.prompt_count = count
        self._pieces: AsyncIterator[ChoiceDelta] | None = None

    def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        self._pieces = _merged(self.generations)
        return self._pieces

    @property
    def made_elsewhere(self) -> bool:
        """Whether an overflow target served any of them."""
        return any(generation.target for generation in self.generations)

    def close(self, error: BaseException | None = None) -> None:
        for generation in self.generations:
            generation.close(error)

    def _ended(self, one: Generation) -> None:
        # Of an upstream's tokens and of what was cut the engine's count is not known.
        if one.finish_reason and one.usage is not None and one.prompt_count is not None and not self._permit.target:
            self._service.admission.prompt_tokens.learn(self._tenant, one.prompt_count, one.usage.input_tokens)
        self._open -= 1
        if self._open:
            return
        usage = total([one.usage for one in self.generations], [id(prompt_of(one.request)) for one in self.generations])
        self._permit.settle(usage)
        if usage is not None:
            self._service.metrics.used(self._tenant, usage)
        ends = [one.finish_reason or observability.end_of(one.error) for one in self.generations]
        error = next((one.error for one in self.generations if one.error is not None), None)
        end_span(self._span, error, **observability.generation_attributes(usage, ends))


def total(usages: Sequence[Usage | None], prompts: Iterable[object]) -> Usage | None:
    """Tokens of all choices. prompts: which prompt each is of; None: nothing was generated at all."""
    known = [(prompt, usage) for prompt, usage in zip(prompts, usages, strict=True) if usage is not None]
    if not known:
        return None
    largest: dict[object, Usage] = {}
    for prompt, usage in known:
        if prompt not in largest or usage.input_tokens > largest[prompt].input_tokens:
            largest[prompt] = usage
    output_tokens = sum(usage.output_tokens for _, usage in known)
    each = largest.values()
    return Usage(sum(one.input_tokens for one in each), output_tokens, sum(one.cached_tokens for one in each))


async def together(pieces: AsyncIterable[ChoiceDelta], request_id: str) -> list[Completion]:
    """Every choice, read to its end. The first error ends them all."""
    deltas: defaultdict[int, list[TokenDelta]] = defaultdict(list)
    async for choice, delta in pieces:
        deltas[choice].append(delta)
    return [completion.join(deltas[choice], request_id) for choice in sorted(deltas)]


async def _merged(generations: list[Generation]) -> AsyncIterator[ChoiceDelta]:
    """A slow reader holds all of them back."""
    if len(generations) == 1:
        async for delta in generations[0]:
            yield ChoiceDelta(0, delta)
        return
    arrived: asyncio.Queue = asyncio.Queue(maxsize=len(generations))

    async def read(choice: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                await arrived.put((choice, delta))
            generation.close()  # its slot is free for one that waits
            await arrived.put((choice, None))
        except TridentError as error:
            generation.close(error)
            await arrived.put((choice, error))

    tasks = [asyncio.ensure_future(read(*one)) for one in enumerate(generations)]
    try:
        left = len(tasks)
        while left:
            choice, item = await arrived.get()
            if isinstance(item, TridentError):
                raise item
            if item is None:
                left -= 1
            else:
                yield ChoiceDelta(choice, item)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
