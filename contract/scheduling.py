"""The rules by which the CPU engine fills a step, which its scheduler, the calibration, planner and simulator share."""

BLOCK_TOKENS = 32  # of a KV cache block: OpenVINO's CPU plugin and TensorRT-LLM (tokens_per_block)

# Prompts beside running sequences (decision 0034).
MAX_SLOWDOWN = 1.7  # a step that reads prompts may take so many times one that does not; 2 with what steps vary by
WHOLE_PROMPT_TOKENS = 256  # prompts up to this length are read whole: pieces of them cost more than they save

# Speculative decoding (decision 0027).
UNDRAFTED_FROM = 4  # running sequences from which on none is drafted for
SHARED_DRAFT = 3  # draft tokens of a sequence beside others, at most
RESUME_UP_TO = 2  # running sequences up to which those that decode plainly are drafted for again
RESUME_TOKENS = 32  # tokens that each of them has left: it is read again, which takes as long as some steps
# Accepted tokens per step, less the draft model's share of the time, below which drafts are not worth verifying.
LEAST_GAIN = 0.2
RETRY_AFTER = 16  # requests after which drafts are tried again


def drafts_beside(most: int, others: int) -> int:
    """Return the draft tokens per step of a sequence beside so many others. most: of one alone."""
    return min(SHARED_DRAFT, most) if others else most
