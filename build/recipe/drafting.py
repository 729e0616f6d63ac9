"""Checks of speculative decoding: can the mode draft for this model, and can the ensemble feed what it needs.

Sources: the TensorRT-LLM 1.x decoder (``cpp/tensorrt_llm/layers/decodingLayer.cpp``), the README of
``examples/eagle`` and the parameters of the ``tensorrtllm`` backend.
"""

from __future__ import annotations

import re

from build.base.shape import local_folder
from build.recipe.case import Case, RuleBook, Severity

REFUSE, WARN = Severity.REFUSE, Severity.WARN
DRAFTING = RuleBook()

CHOICES = re.compile(r"\s*\{\s*\d+(\s*,\s*\d+)*\s*\}(\s*,\s*\{\s*\d+(\s*,\s*\d+)*\s*\})*\s*")


@DRAFTING.rule("D1", REFUSE)
def drafting_excludes_beam_search(case: Case) -> str | None:
    spec, width = case.recipe.speculative_decoding, case.recipe.max_beam_width
    if spec is None or width == 1 or spec.mode == "lookahead_decoding":  # S4 covers lookahead
        return None
    return (
        f"max_beam_width must be 1 with speculative decoding, got {width}: TensorRT-LLM's decodingLayer throws for "
        f"mode {spec.mode} with any other beam width"
    )


@DRAFTING.rule("D2", REFUSE)
def the_ensemble_cannot_send_draft_tokens(case: Case) -> str | None:
    spec = case.recipe.speculative_decoding
    if spec is None or spec.mode != "draft_tokens_external":
        return None
    return (
        "mode draft_tokens_external takes its draft tokens from a second model through the input draft_input_ids, "
        "which no step of the ensemble produces, so the engine would never draft"
    )


@DRAFTING.rule("D3", REFUSE)
def eagle_is_for_llama_on_tensor_parallel_ranks(case: Case) -> str | None:
    spec = case.recipe.speculative_decoding
    if spec is None or spec.mode != "eagle":
        return None
    if not case.is_llama:
        return (
            f"TensorRT-LLM's EAGLE converter (examples/eagle) reads Llama checkpoints only; this model is "
            f"{case.shape.architecture.name}"
        )
    if case.recipe.pp > 1:
        return f"pp must be 1 with EAGLE, got {case.recipe.pp}: the README of examples/eagle excludes pipeline ranks"
    return None


@DRAFTING.rule("D4", WARN)
def eagle_is_listed_for_16_bit_weights(case: Case) -> str | None:
    spec = case.recipe.speculative_decoding
    if spec is None or spec.mode != "eagle" or case.recipe.precision == "bf16":
        return None
    return f"the README of examples/eagle lists FP16 and BF16 weights for EAGLE, not {case.recipe.precision}"


@DRAFTING.rule("D5", REFUSE)
def medusa_heads_must_be_there(case: Case) -> str | None:
    spec = case.recipe.speculative_decoding
    if spec is None or spec.mode != "medusa" or spec.medusa_model is None or local_folder(spec.medusa_model):
        return None
    return (
        f"speculative_decoding.medusa_model must be a local folder, got {spec.medusa_model!r}: no stage downloads the "
        "heads, fetch them first"
    )


@DRAFTING.rule("D6", REFUSE)
def choices_must_parse(case: Case) -> str | None:
    spec = case.recipe.speculative_decoding
    if spec is None or spec.choices is None or CHOICES.fullmatch(spec.choices):
        return None
    return (
        f"speculative_decoding.choices must be paths in braces as the backend's {spec.mode}_choices parameter wants "
        f"them, e.g. '{{0}}, {{0, 0}}, {{1}}', got {spec.choices!r}"
    )
