"""Prompt lookup: how many tokens to draft for each request, from the load and from what was accepted so far.

A step that verifies drafts computes more tokens. Alone a sequence leaves the cores waiting for memory, and drafts cost
little; in a full batch every rejected draft takes time from the others. The pipeline fixes the length when a request is
added, and its least is 1.
"""

from __future__ import annotations

import openvino_genai as genai

from contract.manifest import EngineManifest

BUSY = 4  # running sequences from which on one token is drafted
SHORT = 3  # tokens drafted beside a few others
# Accepted tokens per step below which longer drafts are not worth their verification.
WORTH = 0.2
RETRY = 16  # requests after which longer drafts are tried again
_WEIGHT = 0.02  # of a step in the moving average


class DraftLength:
    """The length for the next request. most: of the recipe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._accepted = 2 * WORTH  # moving average per step of a sequence with more than one draft token
        self._since_long = 0

    def choose(self, running: int) -> int:
        """Return the draft tokens per step of a request that is added to ``running`` others."""
        if running >= BUSY:
            return 1
        self._since_long += 1
        if self._accepted < WORTH and self._since_long < RETRY:
            return 1
        self._since_long = 0
        return self._most if running == 0 else min(SHORT, self._most)

    def observe(self, length: int, accepted: int) -> None:
        """Take in a step that accepted so many tokens of a sequence with drafts of ``length``."""
        if length > 1:
            self._accepted += (accepted - self._accepted) * _WEIGHT


class Drafting:
    """Configure requests of a pipeline with prompt lookup, and count what it gains.

    most: draft tokens of a step.
    ngram_size: tokens of the longest n-gram looked up.
    """

    def __init__(self, most: int, ngram_size: int) -> None:
        self._length = DraftLength(most)
        self._ngram_size = ngram_size
        self._lengths: dict[int, int] = {}  # of the live sequences
        self._steps = self._accepted = 0

    @classmethod
    def of(cls, manifest: EngineManifest) -> Drafting | None:
        """Return what the engine's recipe says; None if it does not draft."""
        declared = manifest.recipe.get("speculative_decoding")
        return cls(declared["max_draft_len"], declared["ngram_size"]) if declared else None

    def configure(self, config: genai.GenerationConfig, id: int, running: int) -> None:
        """Set what every request of such a pipeline needs; without it ``add_request`` refuses.

        running: other sequences.
        """
        config.num_assistant_tokens = self._lengths[id] = self._length.choose(running)
        config.max_ngram_size = self._ngram_size

    def observe(self, id: int, tokens: int) -> None:
        """Take in a step that gave ``tokens`` to a sequence after its first ones."""
        self._steps += 1
        self._accepted += tokens - 1
        self._length.observe(self._lengths[id], tokens - 1)

    def end(self, id: int) -> None:
        """Forget a sequence."""
        self._lengths.pop(id, None)

    def take_counts(self) -> tuple[int, int]:
        """Return the steps of sequences and the accepted draft tokens since the last time."""
        counts = self._steps, self._accepted
        self._steps = self._accepted = 0
        return counts
