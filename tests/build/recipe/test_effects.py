import pytest
from gpu_recipes import LLAMA_8B, case

from build.recipe import commands
from build.recipe.effects import EFFECTS
from build.recipe.verdict import judge

BF16 = {"precision": "bf16", "kv_cache_precision": "auto"}
AWQ = {"precision": "int4_awq", "kv_cache_precision": "auto"}


def reason(rule: str, **changes: object) -> str | None:
    return EFFECTS[rule].reason(case(**changes))


@pytest.mark.parametrize("size", [64, 128])
def test_u3_group_size_is_for_grouped_weights(size):
    found = judge(case(group_size=size, **BF16))
    assert found[0].rule == "U3" and found[0].instead == "without group_size"
    assert reason("U3", group_size=size) and reason("U3", group_size=size, **AWQ) is None
    assert reason("U3", **BF16) is None


def test_u4_calibration_is_for_what_is_measured():
    texts = {"calibration": {"size": 64}}
    found = judge(case(**texts, **BF16))
    assert found[0].rule == "U4" and found[0].instead == "without [calibration]"
    assert reason("U4", precision="int8_wo", kv_cache_precision="auto", **texts)
    assert reason("U4", **texts) is None and reason("U4", **texts, **AWQ) is None and reason("U4", **BF16) is None
    assert reason("U4", precision="bf16", kv_cache_precision="int8", **texts) is None  # the converter measures it


def test_u4_texts_for_the_converters_int8_kv_cache_are_passed_on():
    texts = {"calibration": {"dataset": "path/cnn_dailymail"}}
    drawn = case(precision="bf16", kv_cache_precision="int8", **texts)
    line = commands.line(commands.checkpoint(drawn.recipe, drawn.shape))
    assert "--int8_kv_cache" in line and "--calib_dataset path/cnn_dailymail" in line


def test_u5_latency_is_for_fp8_below_sm_100():
    found = judge(case(optimize_for="latency", **BF16))
    assert found[0].rule == "U5" and found[0].instead == 'optimize_for = "balanced"'
    assert reason("U5", optimize_for="latency", gpu="b200")
    assert reason("U5", optimize_for="latency") is None and reason("U5", optimize_for="throughput", **BF16) is None


def test_u6_a_revision_is_of_a_hub_model(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024,'
        '"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 8192}'
    )
    assert "has no effect on the local folder" in reason("U6", model=str(tmp_path), revision="main")
    assert reason("U6", model=LLAMA_8B, revision="main") is None and reason("U6", model=str(tmp_path)) is None


@pytest.mark.parametrize(
    ("build", "changes"),
    [
        ({"max_encoder_input_len": 512}, {}),
        ({"moe_plugin": "auto"}, {}),
        ({"paged_state": "disable"}, {}),
        ({"gemm_allreduce_plugin": "bfloat16"}, {}),
        ({"pp_reduce_scatter": "enable"}, {"tp": 2}),
        ({"fuse_fp4_quant": "enable"}, {}),
        ({"weight_streaming": True}, {}),
        ({"use_fp8_context_fmha": "enable"}, {"precision": "bf16", "kv_cache_precision": "auto"}),
        ({"use_fp8_context_fmha": "enable"}, {"precision": "w4a8_awq", "kv_cache_precision": "auto"}),
    ],
)
def test_u7_options_are_of_this_network(build, changes):
    assert f"{next(iter(build))} has no effect" in reason("U7", build=build, **changes)


def test_u7_options_with_an_effect_are_let_through():
    assert reason("U7", tp=2, build={"gemm_allreduce_plugin": "bfloat16"}) is None
    assert reason("U7", precision="w4a8_awq", build={"use_fp8_context_fmha": "enable"}) is None
    assert reason("U7", pp=2, build={"pp_reduce_scatter": "enable"}) is None
    assert reason("U7", gpu="b200", precision="nvfp4", build={"fuse_fp4_quant": "enable"}) is None


def test_a_right_recipe_earns_none_of_these():
    assert all(rule.reason(case()) is None for rule in EFFECTS.values())
