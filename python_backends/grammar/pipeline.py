"""The pipeline in which a grammar is compiled before the engine does, with the engine's library and vocabulary.

Its model costs nothing, so what a step takes is what the grammar costs. A grammar that would hold up the batch is
refused by what was measured.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

from contract.errors import InvalidArgument
from contract.generation import Guide
from python_backends.grammar.messages import Check, Checked
from python_backends.grammar.translation import translated
from python_backends.grammar.vocabulary import special_tokens

_WALK_TOKENS = 48
_WALK_S = 0.5
_STEPS_A_STALL = 4  # every token of a grammar may cost only a part of what compiling it once may
_SEVERAL_CORES = 4  # that the library's compiler makes use of
_FIELDS = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tags_config",
}


class GrammarPipeline:
    """One pipeline; a grammar that the library refuses breaks it, and the next check opens another."""

    def __init__(self, folder: Path) -> None:
        """folder: the engine's grammar_checker/."""
        self._folder = folder
        self._special = special_tokens(folder.parent / "tokenizer.json")
        self._pipeline: genai.ContinuousBatchingPipeline | None = None
        self._open()

    def check(self, requested: Check) -> Checked:
        """Translate and compile a guide, and walk through it at random."""
        checked = translated(requested, self._special)
        if checked.guide is None:
            return checked
        try:
            self._walk(checked.guide, requested)
        except InvalidArgument as exc:
            return Checked(field=exc.field, problem=exc.problem)
        except RuntimeError as exc:
            self._pipeline = None
            reason = " ".join(str(exc).strip().splitlines()[-1].split("] ")[-1].split(": ", 1)[-1].split())
            return Checked(field="guided_decoding_guide", problem=f"must be a grammar that compiles: {reason[:300]}")
        return checked

    def _open(self) -> genai.ContinuousBatchingPipeline:
        if self._pipeline is None:
            scheduler = genai.SchedulerConfig()
            scheduler.num_kv_blocks = 4
            self._pipeline = genai.ContinuousBatchingPipeline(
                str(self._folder), scheduler, "CPU", {"INFERENCE_NUM_THREADS": 1}
            )
        return self._pipeline

    def _walk(self, guide: Guide, requested: Check) -> None:
        pipeline = self._open()
        config = genai.GenerationConfig()
        config.max_new_tokens = _WALK_TOKENS
        config.set_eos_token_id(requested.end_id)
        config.stop_token_ids = {requested.end_id}
        config.do_sample = True
        config.structured_output_config = structured_output(guide)
        handle = pipeline.add_request(1, ov.Tensor(np.array([[requested.end_id]], np.int64)), config)
        # Time of the CPU, which does not depend on what else runs; compiling is spread over cores, a step is not.
        compiling_s = self._step(pipeline) / min(_SEVERAL_CORES, os.cpu_count() or 1)
        steps: list[float] = []
        while pipeline.has_non_finished_requests() and sum(steps) < _WALK_S and compiling_s <= requested.stall_s:
            steps.append(self._step(pipeline))
        mean_s = sum(steps) / max(1, len(steps))
        if pipeline.has_non_finished_requests():
            handle.cancel()
            pipeline.step()
        limit_s = requested.stall_s
        for what, held_s, most_s in (
            ("compiling it", compiling_s, limit_s),
            ("a token", mean_s, limit_s / _STEPS_A_STALL),
        ):
            if held_s > most_s:
                cost = f"must not hold up other requests: {what} takes {held_s:.2g} s, the limit is {most_s:.2g} s"
                hint = "; what costs most is repetition with a large limit, many optional properties, and ambiguity"
                raise InvalidArgument("guided_decoding_guide", cost + hint)

    @staticmethod
    def _step(pipeline: genai.ContinuousBatchingPipeline) -> float:
        """Return the seconds of the CPU that a step takes."""
        begun_s = time.process_time()
        pipeline.step()
        return time.process_time() - begun_s


def structured_output(guide: Guide) -> genai.StructuredOutputConfig:
    """Return the form that a GenerationConfig holds."""
    if guide.kind == "json":
        return genai.StructuredOutputConfig(json_schema='{"type": "object"}')
    return genai.StructuredOutputConfig(**{_FIELDS[guide.kind]: guide.text})
