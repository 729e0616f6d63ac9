"""What the engine model and its worker process say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from contract.generation import SamplingParams
from python_backends.cpu_engine.top_log_probs import TopLogProbs
from python_backends.ensemble.priority import NORMAL
from python_backends.ensemble.stream_state import StreamEvent


@dataclass(frozen=True)
class AddSequence:
    """Start a sequence. input_ids: int64[n]; id is unique for the life of the worker. priority: 0 to 1, 1 the first."""

    id: int
    input_ids: np.ndarray
    max_tokens: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    priority: float = NORMAL


@dataclass(frozen=True)
class EndSequence:
    """Stop a sequence and free its blocks; answered by its CANCELLED output, or by the end it had reached before."""

    id: int


@dataclass(frozen=True)
class Ready:
    """The pipeline is loaded and takes commands."""


@dataclass(frozen=True)
class Failed:
    """A step raised; the pipeline cannot be used again and this process ends."""

    reason: str


@dataclass(frozen=True)
class StepOutput:
    """New ids of one sequence; ``event`` is RUNNING or how it ended; ``top`` has one entry per id where asked;
    ``rejected`` says why it never ran."""

    id: int
    token_ids: list[int]
    log_probs: list[float]
    event: StreamEvent
    top: list[TopLogProbs] = field(default_factory=list)
    rejected: str = ""


@dataclass(frozen=True)
class StepReport:
    """One engine step. Times are CLOCK_MONOTONIC ns. scheduled: sequences in this step's batch; context: live
    sequences without a token yet, context_tokens: their prompts together. cache_usage: fraction of KV blocks held."""

    start_ns: int
    end_ns: int
    outputs: list[StepOutput] = field(default_factory=list)
    scheduled: int = 0
    context: int = 0
    context_tokens: int = 0
    cache_usage: float = 0.0
