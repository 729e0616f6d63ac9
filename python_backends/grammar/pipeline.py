"""The pipeline in which a grammar is compiled before the engine does, with the engine's library and vocabulary.

Its model costs nothing, so what a step takes is what the grammar costs.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

from contract.generation import Guide
from python_backends.grammar.checker import Check
from python_backends.grammar.measured_compiler import COMPILING_CORES, MeasuredCompiler, Walk
from python_backends.grammar.structured_output import structured_output
from python_backends.grammar.vocabulary import special_tokens


class GrammarPipeline(MeasuredCompiler):
    """One pipeline; a grammar that the library refuses breaks it, and the next check opens another."""

    def __init__(self, folder: Path) -> None:
        """folder: the engine's grammar_checker/."""
        super().__init__(special_tokens(folder.parent / "tokenizer.json"))
        self._folder = folder
        self._pipeline: genai.ContinuousBatchingPipeline | None = None
        self._open()

    def _open(self) -> genai.ContinuousBatchingPipeline:
        if self._pipeline is None:
            scheduler = genai.SchedulerConfig()
            scheduler.num_kv_blocks = 8
            self._pipeline = genai.ContinuousBatchingPipeline(
                str(self._folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1}
            )
        return self._pipeline

    def walk(self, guide: Guide, requested: Check, tokens: int, most_s: float, again: bool) -> Walk:
        try:
            return self._walk(guide, requested, tokens, most_s, again)
        except (RuntimeError, UnicodeDecodeError):
            self._pipeline = None
            raise

    def _walk(self, guide: Guide, requested: Check, tokens: int, most_s: float, again: bool) -> Walk:
        pipeline = self._open()
        prefer = {"frequency_penalty": -2.0, "temperature": 0.1} if again else {}
        config = genai.GenerationConfig(max_new_tokens=tokens, do_sample=True, **prefer)
        config.set_eos_token_id(requested.end_id)
        config.stop_token_ids = {requested.end_id}
        config.structured_output_config = structured_output(guide)
        handle = pipeline.add_request(1, ov.Tensor(np.array([[requested.end_id]], np.int64)), config)
        # Time of the CPU, which does not depend on what else runs; compiling is spread over cores, a step is not.
        compiling_s = self._step(pipeline) / COMPILING_CORES
        steps: list[float] = []
        while pipeline.has_non_finished_requests() and sum(steps) < most_s and compiling_s <= requested.stall_s:
            steps.append(self._step(pipeline))
        if pipeline.has_non_finished_requests():
            handle.cancel()
            pipeline.step()
        return compiling_s, steps

    @staticmethod
    def _step(pipeline: genai.ContinuousBatchingPipeline) -> float:
        """Return the seconds of the CPU that a step takes."""
        begun_s = time.process_time()
        pipeline.step()
        return time.process_time() - begun_s
