"""The library xgrammar as TensorRT-LLM uses it, with the file of the vocabulary that its engine loads."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from contract.generation import Guide
from python_backends.grammar.checker import Check
from python_backends.grammar.measured_compiler import COMPILING_CORES, MeasuredCompiler, Walk
from python_backends.grammar.vocabulary import SPECIAL_MARK, encoded, special_tokens


class XGrammarCompiler(MeasuredCompiler):
    """Needs the packages xgrammar and torch, which TensorRT-LLM's image has."""

    def __init__(self, info: Path) -> None:
        """info: the engine's xgrammar_tokenizer_info.json (vocabulary.py)."""
        import xgrammar

        found = json.loads(info.read_text("utf-8"))
        mark = encoded(SPECIAL_MARK.encode())
        marked = any(token.startswith(mark) for token in found["encoded_vocab"])
        super().__init__(special_tokens(info.parent / "tokenizer.json") if marked else ())
        self._library = xgrammar
        self._tokenizer = xgrammar.TokenizerInfo(
            found["encoded_vocab"], xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=found["stop_token_ids"]
        )
        self._compiler = xgrammar.GrammarCompiler(self._tokenizer, cache_enabled=False)
        self._matcher: Any = None

    def walk(self, guide: Guide, requested: Check, tokens: int, most_s: float, again: bool) -> Walk:
        begun_s = time.process_time()
        if again:
            self._matcher.reset()
        else:
            tagged = guide.kind == "structural_tag"
            compile_guide = self._compiler.compile_structural_tag if tagged else self._compiler.compile_grammar
            self._matcher = self._library.GrammarMatcher(compile_guide(guide.text))
        matcher, compiling_s = self._matcher, (time.process_time() - begun_s) / COMPILING_CORES
        if compiling_s > requested.stall_s:
            return compiling_s, []
        mask = self._library.allocate_token_bitmask(1, self._tokenizer.vocab_size)
        steps: list[float] = []
        had: set[int] = set()
        while len(steps) < tokens and sum(steps) < most_s and not matcher.is_terminated():
            begun_s = time.process_time()
            matcher.fill_next_token_bitmask(mask)
            filling_s = time.process_time() - begun_s
            allowed = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            choices = [id for id in had if allowed[id]] if again else []
            chosen = random.choice(choices or np.flatnonzero(allowed).tolist())
            begun_s = time.process_time()
            matcher.accept_token(chosen)
            steps.append(filling_s + time.process_time() - begun_s)
            if chosen not in self._tokenizer.stop_token_ids:
                had.add(chosen)
        return compiling_s, steps
