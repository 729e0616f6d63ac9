"""The messages between the checker and its compiler process.

The answer to a Check is the Guide as the engine compiles it, or the InvalidArgument that refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.errors import InvalidArgument
from contract.generation import Guide

# What grammars are compiled with, in an engine's folder: a model without weights of a CPU engine
# (build/model/detokenizer.py), or the file that TensorRT-LLM loads (vocabulary.py).
GRAMMAR_CHECKER = "grammar_checker"
TOKENIZER_INFO = "xgrammar_tokenizer_info.json"
_COST_KEPT_S = 60.0


@dataclass(frozen=True)
class Check:
    """One guide to check.

    end_id: an id that ends the model's texts.
    stall_s: the longest time that compiling it, or one of its tokens, may hold up an engine.
    """

    guide: Guide
    end_id: int
    stall_s: float


def costly(problem: str) -> InvalidArgument:
    """Return the refusal of a guide for what it takes; checked again later, when this machine may be less busy."""
    error = InvalidArgument("guided_decoding_guide", problem)
    error.retry_after_s = _COST_KEPT_S
    return error
