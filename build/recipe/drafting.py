"""Checks of speculative decoding: can the mode draft for this model, and can the ensemble feed what it needs.

Sources: the TensorRT-LLM 1.x decoder (``cpp/tensorrt_llm/layers/decodingLayer.cpp``), the README of
``examples/eagle`` and the parameters of the ``tensorrtllm`` backend.
"""

from __future__ import annotations

import re

from build.base.shape import local_folder
from build.recipe.case import Case, RuleBook, Severity

REFUSE = Severity.REFUSE
DRAFTING = RuleBook()
refuse = DRAFTING.rows(REFUSE)

CHOICES = re.compile(r"\s*\{\s*\d+(\s*,\s*\d+)*\s*\}(\s*,\s*\{\s*\d+(\s*,\s*\d+)*\s*\})*\s*")


refuse(
    lambda case: case.spec and case.recipe.max_beam_width > 1 and case.mode != "lookahead_decoding",  # S4 covers that
    "D1: max_beam_width must be 1 with speculative decoding, got {recipe.max_beam_width}: TensorRT-LLM's decodingLayer "
    "throws for mode {spec.mode} with any other beam width",
)


@DRAFTING.rule("D3", REFUSE)
def eagle_is_for_llama_on_tensor_parallel_ranks(case: Case) -> str | None:
    if case.mode != "eagle":
        return None
    if not case.is_llama:
        reads = "TensorRT-LLM's EAGLE converter (examples/eagle) reads Llama checkpoints only"
        return f"{reads}; this model is {case.arch.name}"
    if case.recipe.pp > 1:
        return f"pp must be 1 with EAGLE, got {case.recipe.pp}: the README of examples/eagle excludes pipeline ranks"
    return None


DRAFTING.rows(Severity.WARN)(
    lambda case: case.mode == "eagle" and case.recipe.precision != "bf16",
    "D4: the README of examples/eagle lists FP16 and BF16 weights for EAGLE, not {recipe.precision}",
)
refuse(
    lambda case: (
        case.mode == "medusa" and case.spec and case.spec.medusa_model and not local_folder(case.spec.medusa_model)
    ),
    "D5: speculative_decoding.medusa_model must be a local folder, got {spec.medusa_model!r}: no stage downloads the "
    "heads, fetch them first",
)
refuse(
    lambda case: case.spec and case.spec.choices is not None and not CHOICES.fullmatch(case.spec.choices),
    "D6: speculative_decoding.choices must be paths in braces as the backend's {spec.mode}_choices parameter wants "
    "them, e.g. '{{0}}, {{0, 0}}, {{1}}', got {spec.choices!r}",
)
