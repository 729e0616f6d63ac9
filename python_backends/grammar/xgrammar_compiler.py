"""The library xgrammar as TensorRT-LLM uses it, with the file of the vocabulary that its engine loads."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import numpy as np

from contract.generation import Guide
from python_backends.grammar.measured_compiler import SEVERAL_CORES, WALK_S, WALK_TOKENS, MeasuredCompiler
from python_backends.grammar.messages import Check
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

    def walk(self, guide: Guide, requested: Check) -> tuple[float, float]:
        begun_s = time.process_time()
        tagged = guide.kind == "structural_tag"
        compile_guide = self._compiler.compile_structural_tag if tagged else self._compiler.compile_grammar
        matcher = self._library.GrammarMatcher(compile_guide(guide.text))
        compiling_s = (time.process_time() - begun_s) / min(SEVERAL_CORES, os.cpu_count() or 1)
        mask = self._library.allocate_token_bitmask(1, self._tokenizer.vocab_size)
        steps: list[float] = []
        while len(steps) < WALK_TOKENS and sum(steps) < WALK_S and not matcher.is_terminated():
            begun_s = time.process_time()
            matcher.fill_next_token_bitmask(mask)
            steps.append(time.process_time() - begun_s)
            allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little"))
            if not allowed.size or not matcher.accept_token(int(random.choice(allowed))):
                break
        return compiling_s, sum(steps) / max(1, len(steps))
