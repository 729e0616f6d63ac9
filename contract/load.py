"""How busy a replica is, as read from its own metrics; what routing, admission and scaling look at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaLoad:
    """A snapshot of one replica.

    running, waiting, max_running: requests; max_running is 0 where unknown. kv_usage: fraction of KV blocks in use,
    0 to 1.
    pending_tokens: work booked by this caller and not yet settled, in tokens of decoding.
    outstanding: this caller's requests that are under way there; known at once, where running and waiting are as
    old as the last look at the metrics.
    tokens_per_s: decode rate with all slots taken, as measured on earlier requests; 0 where unknown.
    """

    name: str
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    kv_usage: float = 0.0
    pending_tokens: int = 0
    healthy: bool = True
    outstanding: int = 0
    tokens_per_s: float = 0.0
