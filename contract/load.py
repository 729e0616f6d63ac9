"""The load of a replica, as read from its metrics, for routing and admission."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaLoad:
    """A snapshot of one replica.

    running, waiting: requests, as of the last metrics scrape.
    max_running: slots, 0 if unknown.
    kv_usage: fraction of KV blocks in use, 0 to 1.
    pending_tokens: work this caller has reserved and not released, in tokens of decoding.
    outstanding: this caller's live requests there, always current.
    tokens_per_s: decode rate with all slots taken, measured on earlier requests; 0 if unknown.
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
