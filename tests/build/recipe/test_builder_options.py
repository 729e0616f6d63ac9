import numpy as np
import pytest
from gpu_recipes import QWEN_7B, case

from build.recipe.builder_options import BUILDER_OPTIONS
from build.recipe.verdict import check, judge, refused
from tests.fakes import adapters

INT8_SQ = {"precision": "int8_sq", "kv_cache_precision": "auto", "gpu": "a100-80gb"}
BF16 = {"precision": "bf16", "kv_cache_precision": "auto"}


def reason(rule: str, **changes: object) -> str | None:
    return BUILDER_OPTIONS[rule].reason(case(**changes))


@pytest.mark.parametrize(
    "build",
    [
        {"lora_plugin": "auto"},
        {"lora_plugin": "bfloat16", "lora_dir": ["adapters/none"], "lora_target_modules": ["attn_q"]},
        {"dora_plugin": "enable"},
        {"max_lora_rank": 8},
        {"lora_dir": ["adapters/none"]},
    ],
)
def test_o1_options_of_lora_are_refused_by_name(build):
    found = judge(case(build=build))
    assert found[0].rule == "O1" and "must be left out: [[adapters]] of the recipe decide" in found[0].message
    assert next(iter(build)) in found[0].reason and "without" in found[0].instead


def test_o1_prompt_tuning_is_refused_by_name():
    assert "prompt tuning is not served" in reason("O1", build={"max_prompt_embedding_table_size": 16})
    assert reason("O1", build={"lora_plugin": "disable", "max_prompt_embedding_table_size": 0}) is None


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("model_config", "ignores it beside --checkpoint_dir"),
        ("model_cls_file", "another network"),
        ("model_cls_name", "another network"),
        ("build_config", "ignores those of the recipe"),
    ],
)
def test_o2_the_plan_is_the_only_source(option, said):
    assert said in reason("O2", build={option: "nope.json"}) and f"{option} must be left out" in reason(
        "O2", build={option: "nope.json"}
    )
    assert reason("O2") is None


@pytest.mark.parametrize(
    ("table", "option", "value"),
    [
        ("quantize", "nemo_ckpt_path", "other.nemo"),
        ("convert", "meta_ckpt_dir", "other"),
        ("convert", "n_layer", 4),
        ("convert", "rotary_base", 1.0),
        ("convert", "save_config_only", True),
    ],
)
def test_o2_the_model_is_the_recipes(table, option, value):
    assert f"{table}.{option} must be left out: the recipe's model" in reason("O2", **{table: {option: value}})


def test_o2_options_of_medusa_heads_belong_to_medusa():
    assert "speculative_decoding.mode medusa" in reason("O2", quantize={"num_medusa_layers": 1})
    spec = {"mode": "medusa", "max_draft_len": 4}
    assert reason("O2", quantize={"num_medusa_layers": 1}, speculative_decoding=spec) is None


@pytest.mark.parametrize("option", ["gpt_attention_plugin", "gemm_plugin"])
@pytest.mark.parametrize("value", ["int32", "float32", "float16"])
def test_o3_plugins_compute_in_the_models_type(option, value):
    assert f"{option} must be auto, disable or bfloat16, got {value}" in reason("O3", build={option: value}, **BF16)
    for allowed in ("auto", "bfloat16"):
        assert reason("O3", build={option: allowed}, **BF16) is None


def test_o3_a_float16_checkpoint_takes_float16_plugins():
    half = {"convert": {"dtype": "float16"}, **BF16}
    assert reason("O3", build={"gemm_plugin": "float16"}, **half) is None
    assert "disable or float16, got bfloat16" in reason("O3", build={"gemm_plugin": "bfloat16"}, **half)


def test_o3_the_gemm_plugin_of_a_format_needs_its_weights():
    assert "is for FP8 weights; this recipe's precision is bf16" in reason("O3", build={"gemm_plugin": "fp8"}, **BF16)
    assert "is for NVFP4 weights" in reason("O3", build={"gemm_plugin": "nvfp4"})
    assert reason("O3", build={"gemm_plugin": "fp8"}) is None


@pytest.mark.parametrize("option", ["gemm_swiglu_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin"])
def test_o4_fp8_plugins_need_fp8_weights(option):
    assert "precision is bf16" in reason("O4", build={option: "fp8"}, **BF16)
    assert reason("O4", build={option: "fp8"}) is None and reason("O4", build={option: "disable"}, **BF16) is None


def test_o4_the_rowwise_plugin_needs_rowwise_weights():
    assert "takes fp8_pc_pt weights" in reason("O4", build={"fp8_rowwise_gemm_plugin": "auto"})
    assert reason("O4", precision="fp8_pc_pt", build={"fp8_rowwise_gemm_plugin": "auto"}) is None


@pytest.mark.parametrize("option", ["workers", "opt_num_tokens", "max_input_len"])
def test_o5_counts_are_at_least_one(option):
    assert f"build.{option} must be at least 1, got 0" in reason("O5", build={option: 0})
    assert refused(judge(case(build={option: 0}))) and reason("O5", build={option: 1}) is None


@pytest.mark.parametrize("value", [-0.5, 0.0, 1.5])
def test_o5_smoothquant_is_a_share(value):
    assert "convert.smoothquant must be above 0 and at most 1" in reason("O5", convert={"smoothquant": value})
    assert "convert.sq belongs to precision int8_sq" in reason("O7", convert={"sq": 0.5}, **BF16)


def test_o6_the_engine_must_hold_its_weights():
    assert "trtllm-refit" in reason("O6", build={"strip_plan": True})
    assert reason("O6", build={"strip_plan": False}) is None


@pytest.mark.parametrize(
    ("convert", "changes"),
    [
        ({"use_weight_only": True}, {}),
        ({"smoothquant": 0.5}, {}),
        ({"use_fp8": True}, {}),
        ({"use_qserve": True}, {}),
        ({"quant_ckpt_path": "awq.safetensors"}, {}),
        ({"weight_only_precision": "int4"}, {"precision": "int8_wo"}),
        ({"int8_kv_cache": True}, {}),
        ({"fp8_kv_cache": True}, {"kv_cache_precision": "int8"}),
    ],
)
def test_o7_the_converter_makes_the_recipes_format(convert, changes):
    assert f"convert.{next(iter(convert))} " in reason("O7", convert=convert, **(BF16 | changes))


def test_o7_a_converter_that_makes_the_format_is_let_through():
    smooth = {"precision": "int8_sq", "kv_cache_precision": "int8"}
    assert reason("O7", convert={"smoothquant": 0.8, "per_token": True, "int8_kv_cache": True}, **smooth) is None
    assert reason("O7", convert={"use_fp8": True}) is None
    assert (
        reason("O7", precision="int4_wo", kv_cache_precision="auto", convert={"weight_only_precision": "int4"}) is None
    )


def test_o8_weights_are_computed_in_16_bits():
    assert "got float32" in reason("O8", convert={"dtype": "float32"}, **BF16)
    assert "got float32" in reason("O8", model=QWEN_7B, quantize={"dtype": "float32"})
    assert reason("O8", convert={"dtype": "float16"}, **BF16) is None


def test_a_right_recipe_earns_none_of_these():
    assert not {f.rule for f in check(case())} & set(BUILDER_OPTIONS)


@pytest.fixture
def poet(tmp_path):
    matrix = {"model.layers.0.self_attn.q_proj.weight": np.ones((8, 8), np.float32)}
    adapters.write(tmp_path / "poet", matrix, rank=4)
    return {"adapters": [{"name": "poet", "path": str(tmp_path / "poet")}]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "fp8_pc_pt", "kv_cache_precision": "auto"}, "precision fp8_pc_pt"),
        (INT8_SQ | {"convert": {"smoothquant": 0.5}}, "precision int8_sq"),
        ({"build": {"gemm_swiglu_plugin": "fp8"}}, "gemm_swiglu_plugin"),
        (INT8_SQ, None),
        ({"precision": "int4_awq", "kv_cache_precision": "auto"}, None),
        ({}, None),
    ],
)
def test_o9_layers_without_lora_are_refused_by_name(poet, changes, said):
    found = reason("O9", **changes, **poet)
    assert found is None if said is None else said in found
    assert reason("O9", **changes) is None
