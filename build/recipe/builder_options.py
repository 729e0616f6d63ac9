"""Checks of [build], [quantize] and [convert]: options that the programs accept and that cannot work here.

Sources: ``tensorrt_llm/commands/build.py``, ``plugin/plugin.py`` and the converters of TensorRT-LLM 1.x; the option
tables in ``build/trtllm/``; the inputs of ``build/trtllm/ensemble.pbtxt``.
"""

from build.recipe import commands
from build.recipe.case import Case, RuleBook, Severity

REFUSE = Severity.REFUSE
BUILDER_OPTIONS = RuleBook()
refuse = BUILDER_OPTIONS.rows(REFUSE)

LORA = ("lora_plugin", "dora_plugin", "lora_dir", "lora_ckpt_source", "lora_target_modules", "max_lora_rank")
PROMPT_TABLE = ("max_prompt_embedding_table_size", "max_multimodal_len")
OTHER_SOURCES = {
    "model_config": "trtllm-build ignores it beside --checkpoint_dir",
    **dict.fromkeys(("model_cls_file", "model_cls_name"), "it compiles another network than the one this plan checks"),
    "build_config": "trtllm-build takes every limit from that file and ignores those of the recipe",
}
# Plugins that compute in the model's own type. nccl_plugin also moves other types and is left alone.
TYPED_PLUGINS = ("gpt_attention_plugin", "gemm_plugin", "fp8_rowwise_gemm_plugin")
FP8_PLUGINS = ("gemm_swiglu_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin")
GEMM_FORMATS = ("fp8", "nvfp4")
# [convert] options that choose a format, and the precisions they belong to.
FORMAT_OPTIONS = {
    "use_weight_only": ("int8_wo", "int4_wo", "int4_awq"),
    **dict.fromkeys(("smoothquant", "sq", "per_channel", "per_token"), ("int8_sq",)),
    "use_fp8": ("fp8",),
    "use_nvfp4": ("nvfp4",),
    **dict.fromkeys(("use_fp8_rowwise", "use_meta_fp8_rowwise_recipe"), ("fp8_pc_pt",)),
    "use_qserve": (),
    "quant_ckpt_path": ("int4_awq",),
}
WEIGHT_ONLY = {"int8_wo": "int8", "int4_wo": "int4", "int4_awq": "int4_awq"}
AT_LEAST_ONE = "opt_num_tokens max_input_len workers calib_tp_size calib_pp_size tokenizer_max_seq_length".split()
# Above 0 and at most this.
SHARES = {"smoothquant": 1, "sq": 1, "auto_quantize_bits": 16}
# Options that describe a model which has no config.json, or take weights from elsewhere than the recipe's model.
OF_THE_MODEL = {
    "quantize": ("nemo_ckpt_path", "decoder_type"),
    "convert": (
        "meta_ckpt_dir save_config_only vocab_size n_positions n_layer n_head n_kv_head n_embd inter_size multiple_of "
        "ffn_dim_multiplier rms_norm_eps hidden_act rotary_base moe_num_experts moe_top_k moe_renorm_mode moe_tp_size "
        "moe_ep_size"
    ).split(),
}
OF_MEDUSA = ("num_medusa_layers", "medusa_hidden_act", "quant_medusa_head")


@BUILDER_OPTIONS.rule("O1", REFUSE)
def adapters_come_from_the_recipe(case: Case) -> str | None:
    given = [key for key in LORA if _is_set(case, key)]
    if given:
        return f"{' and '.join(given)} must be left out: [[adapters]] of the recipe decide them"
    given = [key for key in PROMPT_TABLE if _is_set(case, key)]
    unserved = f"{' and '.join(given)}: prompt tuning is not served: the ensemble has no prompt_embedding_table"
    return unserved if given else None


@BUILDER_OPTIONS.rule("O2", REFUSE)
def the_plan_is_the_only_source(case: Case) -> str | None:
    given = [key for key in OTHER_SOURCES if key in case.recipe.build]
    if given:
        return f"{given[0]} must be left out: {OTHER_SOURCES[given[0]]}"
    for table, keys in OF_THE_MODEL.items():
        given = [key for key in keys if key in getattr(case.recipe, table)]
        if given:
            return f"{table}.{given[0]} must be left out: the recipe's model and its config.json decide it"
    given = [key for key in OF_MEDUSA if key in case.recipe.quantize]
    if given and case.mode != "medusa":
        return f"quantize.{given[0]} must be left out: it belongs to speculative_decoding.mode medusa"
    return None


@BUILDER_OPTIONS.rule("O3", REFUSE)
def plugins_compute_in_the_models_type(case: Case) -> str | None:
    dtype = commands.dtype(case.recipe, case.shape)
    for key in TYPED_PLUGINS if case.is_trtllm else ():
        value = str(case.recipe.build.get(key, "auto")).lower()
        if key == "gemm_plugin" and value in GEMM_FORMATS:
            if case.recipe.precision != value:
                return f"gemm_plugin {value} is for {value.upper()} weights{_not_these(case)}"
        elif value not in ("auto", "disable", dtype):
            why = "the network is strongly typed, so a plugin computes in the type of the checkpoint or the build fails"
            return f"{key} must be auto, disable or {dtype}, got {value}: {why}"
    return None


@BUILDER_OPTIONS.rule("O4", REFUSE)
def fp8_plugins_need_fp8_weights(case: Case) -> str | None:
    wrong = [key for key in FP8_PLUGINS if _is_set(case, key) and case.recipe.precision != "fp8"]
    if wrong:
        return f"{' and '.join(wrong)} take FP8 weights with per-tensor scales{_not_these(case)}"
    if _is_set(case, "fp8_rowwise_gemm_plugin") and case.recipe.precision != "fp8_pc_pt":
        return f"fp8_rowwise_gemm_plugin takes fp8_pc_pt weights{_not_these(case)}"
    return None


@BUILDER_OPTIONS.rule("O5", REFUSE)
def counts_are_at_least_one(case: Case) -> str | None:
    for table in ("build", "quantize", "convert"):
        given = getattr(case.recipe, table)
        for key, most in SHARES.items():
            if key in given and not 0 < given[key] <= most:
                return f"{table}.{key} must be above 0 and at most {most}, got {given[key]}"
        for key in AT_LEAST_ONE:
            if isinstance(given.get(key), int) and given[key] < 1:
                return f"{table}.{key} must be at least 1, got {given[key]}"
    return None


refuse(
    lambda case: case.is_trtllm and case.recipe.adapters and _without_lora(case),
    "O9: [[adapters]] do not work with {found}, whose layers have no LoRA in TensorRT-LLM 1.2.1",
)
refuse(
    lambda case: case.recipe.build.get("strip_plan") is True,
    "O6: strip_plan leaves the weights out of the engine until trtllm-refit puts them back, which no stage does",
)


@BUILDER_OPTIONS.rule("O7", REFUSE)
def the_converter_makes_the_recipes_format(case: Case) -> str | None:
    recipe = case.recipe
    if not case.is_trtllm or case.quantizes:
        return None  # U1: [convert] has no effect then
    for key, precisions in FORMAT_OPTIONS.items():
        if recipe.convert.get(key) not in (None, False) and recipe.precision not in precisions:
            belongs = f"belongs to precision {' or '.join(precisions)}" if precisions else "makes a format of its own"
            return f"convert.{key} {belongs}{_not_these(case)}"
    requested = recipe.convert.get("weight_only_precision")
    if requested is not None and requested != WEIGHT_ONLY.get(recipe.precision):
        return f"convert.weight_only_precision {requested} does not make this recipe's precision, {recipe.precision}"
    for kv in ("int8", "fp8"):
        if recipe.convert.get(f"{kv}_kv_cache") is True and recipe.kv_cache_precision != kv:
            return f"convert.{kv}_kv_cache belongs to kv_cache_precision {kv}, got {recipe.kv_cache_precision}"
    return None


refuse(
    lambda case: case.is_trtllm and commands.dtype(case.recipe, case.shape) == "float32",
    "O8: dtype must be bfloat16 or float16, got float32: context attention and the memory plan are for 16-bit values",
)


def _without_lora(case: Case) -> list[str]:
    formats = ("fp8_pc_pt", "nvfp4") if case.quantizes else ("fp8_pc_pt", "nvfp4", "int8_sq")
    lacking = [f"precision {case.recipe.precision}"] * (case.recipe.precision in formats)
    return lacking + [key for key in FP8_PLUGINS if "swiglu" in key and case.on(key)]


def _not_these(case: Case) -> str:
    return f"; this recipe's precision is {case.recipe.precision}"


def _is_set(case: Case, key: str) -> bool:
    return case.recipe.build.get(key) not in (None, False, 0, "disable")
