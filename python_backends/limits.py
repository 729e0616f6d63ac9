"""What an engine was built and sized for, and whether a request fits it. The tokenizer asks first, the engine again."""

from __future__ import annotations

from dataclasses import dataclass

from contract.errors import PromptTooLong
from contract.manifest import EngineManifest

BLOCK_TOKENS = 32  # OpenVINO's CPU plugin and TensorRT-LLM (tokens_per_block) both page the KV cache by 32 tokens


@dataclass(frozen=True)
class EngineLimits:
    """What the engine was built and sized for. Token counts; KV cache in blocks of ``block_tokens``."""

    vocab_size: int
    max_seq_len: int
    max_batch_size: int
    kv_cache_blocks: int
    block_tokens: int = BLOCK_TOKENS

    @classmethod
    def from_manifest(cls, manifest: EngineManifest) -> EngineLimits:
        if manifest.kv_cache_tokens is not None:
            blocks = manifest.kv_cache_tokens // BLOCK_TOKENS
        else:  # an engine that sizes its pool when it loads can hold what its batch may need
            blocks = manifest.max_batch_size * -(-manifest.max_seq_len // BLOCK_TOKENS)
        return cls(manifest.vocab_size, manifest.max_seq_len, manifest.max_batch_size, blocks)


def check_fits(
    prompt_tokens: int, max_tokens: int, limits: EngineLimits, prompt: str = "text_input", output: str = "max_tokens"
) -> None:
    """PromptTooLong with the numbers, when prompt + max_tokens exceed the engine's length or its whole KV cache.

    prompt, output: the two fields as this door calls them.
    """
    total = prompt_tokens + max_tokens
    if prompt_tokens >= limits.max_seq_len:
        raise PromptTooLong(
            prompt,
            f"the prompt has {prompt_tokens} tokens; allowed are {limits.max_seq_len - 1}, because prompt and output "
            f"together may have {limits.max_seq_len} (max_seq_len)",
        )
    if total > limits.max_seq_len:
        raise PromptTooLong(
            output,
            f"the prompt has {prompt_tokens} tokens and {max_tokens} are asked for, {total} together; allowed are "
            f"{limits.max_seq_len} (max_seq_len), so {output} may be at most {limits.max_seq_len - prompt_tokens}",
        )
    blocks = -(-total // limits.block_tokens)
    if blocks > limits.kv_cache_blocks:
        raise PromptTooLong(
            output,
            f"{total} tokens need {blocks} KV cache blocks of {limits.block_tokens}; the whole cache has "
            f"{limits.kv_cache_blocks}",
        )
