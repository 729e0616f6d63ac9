"""The one way to ask for a generation, whatever client it is asked of."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from clients.wire import request
from contract.generation import GenerationRequest

Stream = TypeVar("Stream")


class Generations(Generic[Stream]):
    """``generate`` for every client that can ``open`` a stream."""

    def open(self, asked: GenerationRequest, *, traceparent: str = "", timings: bool = False) -> Stream:
        raise NotImplementedError

    def generate(
        self, prompt: str | None = None, *, traceparent: str = "", timings: bool = False, **arguments: Any
    ) -> Stream:
        """The answer as it is made: ``for delta in client.generate(prompt, max_tokens=64)``, or ``async for``.

        Instead of ``prompt``, ``messages`` is a chat; the server applies the model's template. The other arguments,
        see ``clients.wire.request.build``: max_tokens, stop, stop_token_ids, timeout_s (the whole request, queueing and
        retries included), echo, skip_special_tokens, json_schema, request_id, and the fields of SamplingParams
        (temperature, top_k, top_p, min_p, seed, log_probs, …). ``timings`` asks for the engine's own instants;
        ``traceparent`` joins a trace that the caller has begun. Raises InvalidArgument at once; what goes wrong
        later is raised by the loop. Leaving the loop cancels.
        """
        return self.open(request.build(prompt, **arguments), traceparent=traceparent, timings=timings)
