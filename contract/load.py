"""How busy a replica is, as read from its own metrics; what routing, admission and scaling look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaLoad:
    """A snapshot of one replica.

    running, waiting, max_running: requests. kv_usage: fraction of KV blocks in use, 0 to 1.
    pending_tokens: prompt and output tokens booked by this caller and not yet settled.
    """

    name: str
    running: int = 0
    waiting: int = 0
    max_running: int = 1
    kv_usage: float = 0.0
    pending_tokens: int = 0
    healthy: bool = True
