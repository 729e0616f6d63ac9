"""When two requests are the same one: the key that coalescing and the response cache share."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from contract.generation import GenerationRequest

# What says who asks and how the answer is carried, and nothing about what it is.
_NOT_THE_ANSWER = ("request_id", "stream", "timeout_s")


def deterministic(request: GenerationRequest) -> bool:
    """The same request gives the same text: it is greedy, or says its seed."""
    return request.sampling.greedy or request.sampling.seed is not None


def request_key(request: GenerationRequest, tenant: str, engine: str) -> str:
    """64 hexadecimal digits. engine: the hash of the engine's manifest, so that another engine's answers are never
    taken. tenant: what one caller asked shows in no other's answer, nor in how fast it comes."""
    asked = {name: value for name, value in dataclasses.asdict(request).items() if name not in _NOT_THE_ANSWER}
    # JSON, because it marks where each value ends: parts that are only joined can be moved from one to the next.
    text = json.dumps([engine, tenant, asked], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
