"""The messages between the engine model and the process (or the LLM) that computes its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from contract.generation import Guide, SamplingParams
from contract.priority import NORMAL
from python_backends.ensemble.token_increment import StreamEvent, TopLogProbs


def last_line(exc: Exception) -> str:
    """Return a library's error without what it writes before its message, such as source paths of its build."""
    return (str(exc).strip().splitlines() or [repr(exc)])[-1]


@dataclass(frozen=True)
class AddSequence:
    """Start a sequence.

    id: unique for the lifetime of the worker.
    input_ids: int64[n], the prompt.
    max_tokens: 0 ends the sequence at its prompt.
    priority: 0 (last) to 1 (first).
    guide: what the output must match, in a form that the worker can compile; None for free text.
    cached_tokens: of the prompt, that the worker's prefix cache is estimated to hold.
    """

    id: int
    input_ids: np.ndarray
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    priority: float = NORMAL
    guide: Guide | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class EndSequence:
    """Stop a sequence and free its blocks. The worker answers with its last StepOutput."""

    id: int


@dataclass(frozen=True)
class Ready:
    """The model is loaded and the worker takes commands."""


@dataclass(frozen=True)
class Failed:
    """A step raised: the pipeline cannot be used again and the worker's process ends."""

    reason: str


@dataclass(frozen=True)
class StepOutput:
    """What one step added to one sequence.

    log_probs, top_log_probs: one per new id, or empty if not requested.
    event: RUNNING, or how the sequence ended.
    error: why it failed, with the event ERROR only.
    prompt_log_probs: one per prompt id, before the first new id and only if requested; the first id's is 0.
    prompt_top_log_probs: one entry per prompt id, or empty if not requested; the first id's has ids of -1.
    """

    id: int
    token_ids: list[int]
    log_probs: list[float]
    event: StreamEvent
    top_log_probs: list[TopLogProbs] = field(default_factory=list)
    error: str = ""
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_top_log_probs: list[TopLogProbs] = field(default_factory=list)


@dataclass(frozen=True)
class StepReport:
    """One engine step.

    start_ns, end_ns: CLOCK_MONOTONIC; both 0 in a report that no step made.
    scheduled: sequences in this step's batch.
    context, context_tokens: live sequences without a generated token, and the tokens of their prompts.
    cache_usage: fraction of KV blocks held, 0 to 1.
    drafting: sequences of the pipeline that drafts which got tokens after their first ones.
    accepted: draft tokens among those.
    begun: sequences of whose prompts the step was the first to read, and the tokens found in the prefix cache; a
        sequence may be in several reports.
    """

    start_ns: int
    end_ns: int
    outputs: list[StepOutput] = field(default_factory=list)
    scheduled: int = 0
    context: int = 0
    context_tokens: int = 0
    cache_usage: float = 0.0
    drafting: int = 0
    accepted: int = 0
    begun: dict[int, int] = field(default_factory=dict)
