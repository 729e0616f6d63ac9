"""Compute the key under which equal requests share a response: in caches, coalescing and shadow traffic."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from contract.generation import GenerationRequest

# Fields that do not change the text of the response.
_IGNORED = ("request_id", "stream", "timeout_s")


def deterministic(request: GenerationRequest) -> bool:
    """Return whether the same request gives the same text: it is greedy or has a seed."""
    return request.sampling.greedy or request.sampling.seed is not None


def request_key(request: GenerationRequest, tenant: str, engine: str) -> str:
    """Return 64 hexadecimal digits, which differ by tenant and by engine, the hash of its manifest."""
    fields = {name: value for name, value in dataclasses.asdict(request).items() if name not in _IGNORED}
    # JSON delimits each value; joined parts would collide.
    text = json.dumps([engine, tenant, fields], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
