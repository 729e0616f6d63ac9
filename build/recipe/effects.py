"""Checks for keys that are accepted and change nothing, so that a recipe never asks for what it does not get."""

from __future__ import annotations

from build.base.shape import local_folder
from build.recipe import commands
from build.recipe.case import Case, RuleBook, Severity
from build.recipe.schema import CPU, Calibration

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


def _options_of_other_networks(case: Case) -> str | None:
    recipe = case.recipe
    given = [key for key in OTHER_NETWORKS if key in recipe.build]
    if given:
        return f"{' and '.join(given)} has no effect on {case.arch.name}, a decoder without experts"
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


refuse = EFFECTS.rows(Severity.REFUSE)
refuse(
    lambda case: (
        case.recipe.precision not in GROUPED and ("group_size" in case.recipe.given or case.recipe.group_size != 128)
    ),
    "U3: group_size has no effect on {recipe.precision} weights: it belongs to int4, int4_awq and w4a8_awq",
)
refuse(
    lambda case: (
        case.recipe.kind != CPU  # C4 covers the CPU
        and ("calibration" in case.recipe.given or case.recipe.calibration != Calibration())
        and not commands.calibrates(case.recipe, case.shape)
    ),
    "U4: [calibration] has no effect on {recipe.precision} weights with a {recipe.kv_cache_precision} KV cache: "
    "nothing is measured",
)
refuse(
    lambda case: (
        case.is_trtllm
        and case.recipe.optimize_for == "latency"
        and (case.recipe.precision != "fp8" or case.recipe.sm >= 100)
    ),
    'U5: optimize_for = "latency" has no effect on {recipe.precision} weights on SM {recipe.sm}: it chooses the '
    "low-latency FP8 plugins, which exist below SM 100",
)
refuse(
    lambda case: case.recipe.revision is not None and local_folder(case.recipe.model) is not None,
    "U6: revision has no effect on the local folder {recipe.model}: it belongs to a hub model",
)
refuse(lambda case: case.is_trtllm and _options_of_other_networks(case), "U7: {found}")
