"""Checks for keys that are accepted and change nothing, so that a recipe never asks for what it does not get."""

from __future__ import annotations

from build.base.shape import local_folder
from build.recipe import commands
from build.recipe.case import Case, RuleBook, Severity
from build.recipe.schema import CPU, TRTLLM, Calibration

EFFECTS = RuleBook()

GROUPED = ("int4", "int4_awq", "w4a8_awq")  # precisions with one scale per group of input columns
# Options of networks that a Llama or Qwen decoder does not have.
OTHER_NETWORKS = (
    "max_encoder_input_len",
    "bert_attention_plugin",
    "bert_context_fmha_fp32_acc",
    "moe_plugin",
    "mamba_conv1d_plugin",
    "paged_state",
)


@EFFECTS.rule("U3", Severity.REFUSE)
def group_size_is_for_grouped_weights(case: Case) -> str | None:
    recipe = case.recipe
    if recipe.precision in GROUPED or ("group_size" not in recipe.given and recipe.group_size == 128):
        return None
    return f"group_size has no effect on {recipe.precision} weights: it belongs to int4, int4_awq and w4a8_awq"


@EFFECTS.rule("U4", Severity.REFUSE)
def calibration_is_for_what_is_measured(case: Case) -> str | None:
    recipe = case.recipe
    if recipe.kind == CPU or ("calibration" not in recipe.given and recipe.calibration == Calibration()):
        return None  # C4 covers the CPU
    if commands.calibrates(recipe, case.shape):
        return None
    return (
        f"[calibration] has no effect on {recipe.precision} weights with a {recipe.kv_cache_precision} KV cache: "
        "nothing is measured"
    )


@EFFECTS.rule("U5", Severity.REFUSE)
def latency_is_for_fp8_below_sm_100(case: Case) -> str | None:
    recipe = case.recipe
    if recipe.kind != TRTLLM or recipe.optimize_for != "latency" or (recipe.precision == "fp8" and recipe.sm < 100):
        return None
    return (
        f'optimize_for = "latency" has no effect on {recipe.precision} weights on SM {recipe.sm}: it chooses the '
        "low-latency FP8 plugins, which exist below SM 100"
    )


@EFFECTS.rule("U6", Severity.REFUSE)
def a_revision_is_of_a_hub_model(case: Case) -> str | None:
    if case.recipe.revision is None or local_folder(case.recipe.model) is None:
        return None
    return f"revision has no effect on the local folder {case.recipe.model}: it belongs to a hub model"


@EFFECTS.rule("U7", Severity.REFUSE)
def options_are_of_this_network(case: Case) -> str | None:
    if case.recipe.kind != TRTLLM:
        return None
    given = [key for key in OTHER_NETWORKS if key in case.recipe.build]
    if given:
        return f"{' and '.join(given)} has no effect on {case.shape.architecture.name}, a decoder without experts"
    recipe = case.recipe
    for key, ranks in (("gemm_allreduce_plugin", recipe.tp), ("pp_reduce_scatter", recipe.pp)):
        if recipe.build.get(key, "disable") != "disable" and ranks == 1:
            return f"{key} has no effect on one {'tensor' if key[0] == 'g' else 'pipeline'}-parallel rank"
    asks = recipe.build.get("use_fp8_context_fmha") == "enable"
    if asks and not commands.fp8_context_fmha(recipe) and recipe.precision != "fp8" and recipe.sm >= 89:  # R2, R3
        return (
            f"use_fp8_context_fmha has no effect on {recipe.precision} weights with a {recipe.kv_cache_precision} KV "
            "cache: it needs fp8, w4a8_awq or nvfp4 weights and an fp8 KV cache"
        )
    if recipe.build.get("weight_streaming") is True:
        return "weight_streaming has no effect: gpu_weights_percent is not set, so all weights stay on the GPU"
    if recipe.build.get("fuse_fp4_quant") == "enable" and recipe.precision != "nvfp4":
        return f"fuse_fp4_quant has no effect on {recipe.precision} weights: it belongs to nvfp4"
    return None
