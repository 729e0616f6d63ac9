"""What a request is charged by: the price of its model, and what the ledger says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from contract.generation import Usage
from gateway.config.policy import ModelPrice
from gateway.config.tenant import Levels
from gateway.usage.store import UsageRecord


@dataclass(frozen=True)
class Charge:
    """request_id: as callers and logs have it. model: that serves it, with the adapter. endpoint: one of Operation.
    price: at arrival; None: it costs nothing. source: ``engine``, or where a reused answer comes from."""

    request_id: str = ""
    model: str = ""
    endpoint: str = ""
    price: ModelPrice | None = None
    source: str = "engine"

    def micros(self, usage: Usage | None) -> int:
        """Return what ``usage`` costs in millionths of the currency."""
        return self.price.micros(usage) if self.price is not None and usage is not None else 0

    def most_micros(self, prompt_tokens: int, output_tokens: int) -> int:
        """Return what so many tokens cost at most: none, or all of the prompt, may be cached."""
        uncached, cached = (Usage(prompt_tokens, output_tokens, part) for part in (0, prompt_tokens))
        return max(self.micros(uncached), self.micros(cached))

    def record(self, at_s: float, levels: Levels, usage: Usage | None) -> UsageRecord:
        """Return the ledger's record. Cached tokens are told where they have a price of their own: of others, they
        would tell a tenant about the prompts of another for nothing."""
        used = usage or Usage(0, 0)
        if self.price is None or self.price.cached is None:
            used = replace(used, cached_tokens=0)
        tokens = used.input_tokens, used.cached_tokens, used.output_tokens
        key = levels[-1].name if levels else ""
        about = self.request_id, key, self.model, self.endpoint, self.source
        return UsageRecord(at_s, *about, *tokens, self.micros(usage))


FREE = Charge()
