"""The messages between the checker and its compiler process."""

from __future__ import annotations

from dataclasses import dataclass

from contract.generation import Guide

# What grammars are compiled with, in an engine's folder: a model without weights of a CPU engine
# (build/model/detokenizer.py), or the file that TensorRT-LLM loads (vocabulary.py).
GRAMMAR_CHECKER = "grammar_checker"
TOKENIZER_INFO = "xgrammar_tokenizer_info.json"


@dataclass(frozen=True)
class Check:
    """One guide to check.

    end_id: an id that ends the model's texts.
    stall_s: the longest time that compiling it, or one of its tokens, may hold up an engine.
    """

    guide: Guide
    end_id: int
    stall_s: float


@dataclass(frozen=True)
class Checked:
    """The guide as the engine compiles it, or the problem with it, in the words of an error of ``field``.

    costly: the problem is what it takes, measured on this machine.
    """

    guide: Guide | None = None
    field: str = ""
    problem: str = ""
    costly: bool = False
