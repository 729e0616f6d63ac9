"""What an engine was built and sized for, and whether a request fits. Checked by the tokenizer and the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from contract.errors import InvalidArgument, PromptTooLong
from contract.manifest import EngineManifest
from contract.scheduling import BLOCK_TOKENS


@dataclass(frozen=True)
class EngineLimits:
    """An engine's limits.

    max_seq_len: tokens of prompt and output together.
    max_batch_size: sequences at once.
    kv_cache_blocks: size of the KV cache in blocks of BLOCK_TOKENS tokens.
    max_draft_len: draft tokens that a step of a CPU engine may verify beside each sequence's own; 0 if it never drafts.
    """

    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    kv_cache_blocks: int
    max_draft_len: int = 0

    @classmethod
    def from_manifest(cls, manifest: EngineManifest) -> EngineLimits:
        """Read the limits of a built engine."""
        sizes = manifest.max_seq_len, manifest.max_batch_size, manifest.kv_cache_blocks
        return cls(manifest.vocab_size, *sizes, manifest.draft_tokens)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens of one sequence that the whole KV cache can hold."""
        return self.kv_cache_blocks * BLOCK_TOKENS

    @property
    def draft_pool_blocks(self) -> int:
        """Blocks of the KV cache of the pipeline that drafts: a quarter of the other's, or one longest sequence."""
        return max(self.kv_cache_blocks // 4, self.draft_blocks(min(self.max_seq_len, self.kv_cache_tokens)))

    def blocks(self, tokens: int) -> int:
        """Return the KV cache blocks of a sequence of ``tokens`` tokens."""
        return -(-tokens // BLOCK_TOKENS)

    def draft_blocks(self, tokens: int) -> int:
        """Return the blocks of a sequence in the pipeline that drafts: of its tokens and of the drafts beside them."""
        return self.blocks(tokens + self.max_draft_len)


def check_fits(
    prompt_tokens: int, max_tokens: int, limits: EngineLimits, prompt: str = "text_input", output: str = "max_tokens"
) -> None:
    """Check that prompt and output fit the engine's length and its KV cache.

    prompt, output: names of the two fields for the error.
    Raises PromptTooLong: they do not.
    """
    total = prompt_tokens + max_tokens
    if prompt_tokens > limits.max_seq_len - min(1, max_tokens):
        allowed = f"{limits.max_seq_len - 1} tokens, because prompt and output together may have {limits.max_seq_len}"
        raise PromptTooLong(prompt, f"must have at most {allowed} (max_seq_len), got {prompt_tokens}")
    if total > limits.max_seq_len:
        allowed = f"{limits.max_seq_len - prompt_tokens} with a prompt of {prompt_tokens} tokens, because both together"
        problem = f"must be at most {allowed} may have {limits.max_seq_len} (max_seq_len), got {max_tokens}"
        raise PromptTooLong(output, problem)
    blocks = limits.blocks(total)
    if blocks > limits.kv_cache_blocks:
        allowed = f"{limits.kv_cache_blocks} KV cache blocks of {BLOCK_TOKENS} tokens together with the prompt"
        raise PromptTooLong(output, f"must need at most {allowed}, got {total} tokens, which need {blocks}")


def check_ids(name: str, ids: ArrayLike, vocab_size: int) -> None:
    """Check that all ids are in the vocabulary. Raises InvalidArgument: one is not."""
    found = np.asarray(ids)
    wrong = found[(found < 0) | (found >= vocab_size)]
    if wrong.size:
        raise InvalidArgument(name, f"must hold ids from 0 to {vocab_size - 1}, got {wrong[0]}")


def check_end_id(end_id: int, vocab_size: int) -> None:
    """Check an end id, -1 for none. Raises InvalidArgument: it is not in the vocabulary."""
    if not -1 <= end_id < vocab_size:
        raise InvalidArgument("end_id", f"must be 0 to {vocab_size - 1}, or -1 for none, got {end_id}")
