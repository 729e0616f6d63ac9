"""The rules by which the CPU engine fills steps and sends tokens; calibration, planner and simulator share them."""

BLOCK_TOKENS = 32  # of a KV cache block: OpenVINO's CPU plugin and TensorRT-LLM (tokens_per_block)

# Prompts beside running sequences (decision 0034).
MAX_SLOWDOWN = 1.7  # a step that reads prompts may take so many times one that does not; 2 with what steps vary by
WHOLE_PROMPT_TOKENS = 256  # prompts up to this length are read whole: pieces of them cost more than they save

# Speculative decoding (decision 0027).
UNDRAFTED_FROM = 8  # running sequences from which on none is drafted for
LONG_UNDRAFTED_FROM = 4  # for a prompt that is not read whole beside streams: only the plain pipeline reads in pieces
SHARED_DRAFT = 3  # draft tokens of a sequence beside others, at most
RESUME_UP_TO = 2  # running sequences up to which those that decode plainly are drafted for again
RESUME_TOKENS = 32  # tokens that each of them has left: it is read again, which takes as long as some steps
LEAST_SPEEDUP = 1.2  # tokens per second with drafts, over those without, below which drafts are not worth it
RETRY_AFTER = 16  # requests after which drafts are tried again

# Sending (coalescing_window.py): tokens of all streams wait to be sent together. Of the CPU that is there, what
# responses are to take; where tokens would wait too long for it, they take more.
SENDING_SHARE = 0.15
# Longest wait, and up to how many streams. The ticker, and the burst itself, take some milliseconds more.
FEW_STREAMS, WAIT_OF_FEW_S, WAIT_OF_MANY_S = 32, 0.018, 0.044


def window_s(streams: float, response_cpu_s: float, cores: float) -> float:
    """Return how long a token may wait. response_cpu_s: what a response takes of one of the cores."""
    wait_s = WAIT_OF_FEW_S if streams <= FEW_STREAMS else WAIT_OF_MANY_S
    return min(wait_s, streams * response_cpu_s / (SENDING_SHARE * cores))


def undrafted_from(prompt_tokens: int) -> int:
    """Return beside how many running sequences one with such a prompt is not drafted for."""
    return UNDRAFTED_FROM if prompt_tokens <= WHOLE_PROMPT_TOKENS else LONG_UNDRAFTED_FROM


def drafts_beside(most: int, others: int) -> int:
    """Return the draft tokens per step of a sequence beside so many others. most: of one alone."""
    return min(SHARED_DRAFT, most) if others else most


def step_draft_tokens(most: int, sequences: int) -> int:
    """Return the draft tokens of a step of so many sequences. most: of one alone."""
    return sum(drafts_beside(most, others) for others in range(sequences))
