"""How a generation that lost its replica goes on at another one, from the ids that were relayed.

The rules are in docs/decisions/0023-streams-continue-at-another-replica.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import random
import time
from typing import Any

from cachetools import TTLCache

from contract.errors import EngineFailed, TridentError, Unavailable
from contract.generation import GenerationRequest, TokenDelta, changed

_LOG = logging.getLogger(__name__)
HEADER = "x-trident-continued"
# The longest wait for a replica: a supervisor restarts a small engine in seconds, and two probes must pass.
WAIT_S = 30.0
POLL_S = 0.05
# Pause before the same replica is tried again: its supervisor notices a dead process within this time.
PAUSE_S = 0.5
SUSPECT_S = 600.0
MAX_SUSPECTS = 10_000


class SuspectPrompts:
    """Prompts whose generations lost more replicas than are allowed: they may be the cause, and are not continued."""

    def __init__(self) -> None:
        self._digests: TTLCache[str, bool] = TTLCache(MAX_SUSPECTS, SUSPECT_S)

    def __contains__(self, request: GenerationRequest) -> bool:
        return _digest(request) in self._digests

    def add(self, request: GenerationRequest, request_id: str, error: TridentError) -> None:
        """Remember the prompt for SUSPECT_S, and tell the operator."""
        digest = _digest(request)
        self._digests[digest] = True
        fields = {"request_id": request_id, "prompt_sha256": digest, "error": str(error)}
        _LOG.error("suspect prompt: every replica that ran it was lost", extra={"fields": fields})


def _digest(request: GenerationRequest) -> str:
    prompt = repr((request.text_input, request.messages, request.input_ids))
    return hashlib.sha256(prompt.encode(errors="surrogatepass")).hexdigest()


def needs_seed(request: GenerationRequest) -> bool:
    """Return whether a sampled request can only go on by generating its ids again, for which it has no seed."""
    sampling = request.sampling
    counts = bool(sampling.presence_penalty or sampling.frequency_penalty or request.guide)
    return counts and not sampling.greedy and sampling.seed is None


class Continuation:
    """What one generation needs to go on elsewhere.

    count: attempts that failed.
    losses: those of them whose replica ended while it ran the request; a drain and a replica that is not up are none.
    tried: URLs of the replicas of failed attempts.
    lost_s: when the first attempt since the latest response failed, ``time.monotonic()``; 0 if none did.
    error: of the first loss.
    """

    def __init__(self, limit: int) -> None:
        """limit: losses that a generation may survive."""
        self._limit = limit
        self._ids: list[int] = []
        self._complete = True  # every text came with its ids
        self._echoed = 0  # ids of an echoed prompt in front
        self._seed = 0
        self.count = self.losses = 0
        self.tried: frozenset[str] = frozenset()
        self.lost_s = 0.0
        self.error: TridentError | None = None

    def observe(self, delta: TokenDelta) -> None:
        """Take note of what was relayed."""
        if not self._ids:
            self._echoed = delta.prompt_ids
        self._ids += delta.token_ids
        if delta.text and not delta.token_ids:
            self._complete = False
        self.lost_s = 0.0

    def allows(self, request: GenerationRequest) -> bool:
        """Return whether the request may go on after another loss."""
        echoes = bool(request.echo and self._ids and not request.continue_ids)
        told = not echoes or 0 < self._echoed < len(self._ids)  # which ids are the prompt's
        return 0 < self._limit >= self.losses and self._complete and told

    @property
    def exhausted(self) -> bool:
        """Whether it lost more replicas than are allowed. A single loss says nothing about the prompt."""
        return self.losses > max(1, self._limit)

    def lose(self, error: TridentError, replica: str, lost: bool) -> None:
        """Take note of an attempt that failed with ``error``. lost: whether it counts as a loss."""
        self.count += 1
        self.losses += lost
        self.lost_s = self.lost_s or time.monotonic()
        self.error = self.error or error
        if replica:
            self.tried |= {replica}

    def request(self, request: GenerationRequest, **changes: Any) -> GenerationRequest:
        """Return the request for the next replica, the first one or the one that goes on, with other fields changed.

        Where an engine can only go on by generating the ids again, a sampled request needs a seed from the start.
        """
        if self._limit and needs_seed(request):
            self._seed = self._seed or random.getrandbits(64)
            changes["sampling"] = dataclasses.replace(request.sampling, seed=self._seed)
        if self._ids and request.sampling.prompt_log_probs:  # they were relayed
            sampling = changes.get("sampling", request.sampling)
            changes["sampling"] = dataclasses.replace(sampling, prompt_log_probs=False)
        return changed(request, continue_ids=self.ids(request), **changes)

    def ids(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the ids of the output so far, without an echoed prompt's."""
        echoed = self._echoed if request.echo and not request.continue_ids else 0
        return request.continue_ids + tuple(self._ids[echoed:])


def is_loss(error: TridentError, in_band: bool, ran_s: float, began: bool) -> bool:
    """Return whether the end of an attempt blames the request: the replica ended while it ran the request.

    in_band: the replica told the error in a message; with Unavailable it is draining. began: it had sent a response.
    """
    if isinstance(error, Unavailable):
        return not in_band and (began or ran_s > PAUSE_S)
    return isinstance(error, EngineFailed)
