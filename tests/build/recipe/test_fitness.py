import json

import pytest
from gpu_recipes import LLAMA_8B, LLAMA_70B, QWEN3_8B, QWEN_7B, case

from build.base import shape as shapes
from build.recipe import commands
from build.recipe import recipe as recipes
from build.recipe.case import Case
from build.recipe.fitness import CHECKS
from build.recipe.verdict import check, judge, refused

MODES = ("medusa", "eagle", "explicit_draft_tokens")
BF16 = {"precision": "bf16", "kv_cache_precision": "auto"}
AWQ = {"precision": "int4_awq", "kv_cache_precision": "auto"}


def reason(rule: str, **changes: object) -> str | None:
    return CHECKS[rule].reason(case(**changes))


@pytest.mark.parametrize("gpu", ["a100", "a10"])
def test_h1_fp8_weights_do_not_run_below_sm_89(gpu):
    assert "only on SM 89" in reason("H1", gpu=gpu)
    assert reason("H1", gpu=gpu, precision="int4_awq", kv_cache_precision="auto") is None


@pytest.mark.parametrize("precision", ["int4_awq", "int8_sq", "int8_wo", "int4_wo", "w4a8_awq"])
def test_h1_integer_weights_do_not_run_on_sm_120(precision):
    assert "SM 120 (Blackwell)" in reason("H1", gpu="rtx-5090", precision=precision, kv_cache_precision="auto")
    assert reason("H1", precision=precision, kv_cache_precision="auto") is None


def test_h1_nvfp4_needs_blackwell():
    assert reason("H1", precision="nvfp4")
    assert reason("H1", precision="nvfp4", gpu="b200") is None


def test_one_fault_is_refused_once():
    found = [f.rule for f in check(case(gpu="b200", precision="int4_awq", kv_cache_precision="auto"))]
    assert "R4" in found and "H1" not in found


def test_h2_int8_kv_does_not_run_on_sm_120():
    assert reason("H2", gpu="rtx-5090", kv_cache_precision="int8")
    assert reason("H2", gpu="rtx-5090") is None


def test_h3_the_swiglu_plugin_is_for_hopper():
    assert reason("H3", gpu="l40s", build={"gemm_swiglu_plugin": "fp8"})
    assert reason("H3", build={"gemm_swiglu_plugin": "fp8"}) is None
    assert reason("H3", gpu="l40s") is None


def test_h4_w4a8_is_not_listed_for_qwen3():
    assert reason("H4", model=QWEN3_8B, precision="w4a8_awq")
    assert reason("H4", model=QWEN_7B, precision="w4a8_awq") is None


def test_m1_weights_and_one_sequence_must_fit():
    assert "leave space for 0 KV tokens" in reason("M1", model=LLAMA_70B, gpu="l40s")
    assert reason("M1", model=LLAMA_70B, gpu="l40s", tp=4) is None
    assert "less than one sequence of 4096" in reason("M1", kv_cache_tokens=1024)
    spec = {"mode": "eagle", "max_draft_len": 256}
    assert reason("M1", kv_cache_tokens=4096) is None
    assert "4352" in reason("M1", kv_cache_tokens=4096, speculative_decoding=spec)


def test_s1_sequences_must_not_outgrow_the_model():
    assert "32768 tokens" in reason("S1", model=QWEN_7B, max_seq_len=32769)
    assert reason("S1", model=QWEN_7B, max_seq_len=32768) is None


def test_s2_ranks_must_divide_the_model():
    assert "num_attention_heads 28 evenly" in reason("S2", model=QWEN_7B, tp=8)
    assert reason("S2", model=QWEN_7B, pp=16) is None
    assert reason("S2", model=QWEN_7B, tp=4) is None
    shared = {"tp": 16, "kv_cache_precision": "auto"}
    assert "would share 8 KV head(s), which ModelOpt cannot" in reason("S2", precision="int8_sq", **shared)
    assert reason("S2", kind="llmapi", precision="fp8_pc_pt", **shared) is None, "the LLM API shares them itself"
    assert reason("S2", tp=16) is None


def test_s3_long_prompts_need_chunked_context():
    assert "prompts over max_num_tokens 2048" in reason("S3", max_num_tokens=2048, chunked_context=False)
    assert reason("S3", max_num_tokens=2048, precision="int4_awq", kv_cache_precision="fp8")
    assert reason("S3", max_num_tokens=2048) is None
    assert reason("S3", max_num_tokens=4096, chunked_context=False) is None


def test_s4_lookahead_has_limits():
    spec = {"mode": "lookahead_decoding", "window_size": 7, "ngram_size": 7, "verification_set_size": 7}
    assert "max_beam_width 1" in reason("S4", speculative_decoding=spec, max_beam_width=2)
    assert "drafts nothing" in reason("S4", speculative_decoding=spec | {"ngram_size": 1})
    assert reason("S4", speculative_decoding=spec) is None


def test_s5_the_network_must_have_a_place_for_every_bias(tmp_path):
    config = json.loads(shapes.TABLE.read_text())["Qwen/Qwen3-8B"]
    for biased, said in ((True, "a bias on o_proj, for which TensorRT-LLM's Qwen has no place"), (False, None)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": biased}))
        found = reason("S5", model=str(tmp_path))
        assert said in found if said else found is None
    assert reason("S5", model=QWEN_7B) is None


def test_c2_a_step_holds_a_token_of_each_running_sequence_of_a_gpu_engine_too():
    found = judge(case(max_batch_size=2048, max_num_tokens=64))
    assert found[0].rule == "C2" and "one token for each of 2048 sequences" in found[0].reason
    assert "64 sequences of 4 beams" in reason("C2", max_num_tokens=255, max_beam_width=4)
    assert reason("C2", max_num_tokens=256, max_beam_width=4) is None and reason("C2", max_num_tokens=64) is None


def test_an_fp8_kv_cache_on_ampere_is_allowed_by_the_matrix_the_warning_cites():
    found = judge(case(gpu="a100", precision="bf16", kv_cache_precision="fp8"))
    assert not refused(found)
    assert "NVIDIA's quantization hardware matrix lists it for Ampere" in " ".join(f.message for f in found)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("kv_cache_type", "continuous"),
        ("kv_cache_type", "DISABLED"),
        ("paged_kv_cache", "disable"),
        ("paged_kv_cache", "a/b"),
        ("remove_input_padding", "disable"),
        ("gpt_attention_plugin", "disable"),
    ],
)
def test_b1_requests_must_batch_in_flight(option, value):
    assert "in-flight batching" in reason("B1", build={option: value})
    assert f"without build.{option}" in judge(case(build={option: value}))[0].message
    assert reason("B1", build={"kv_cache_type": "PAGED", "remove_input_padding": "enable"}) is None


@pytest.mark.parametrize("tokens", [0, 48])
def test_b2_a_kv_block_must_be_found(tokens):
    assert f"tokens_per_block {tokens} is not a power of two" in reason("B2", build={"tokens_per_block": tokens})
    assert reason("B2", build={"tokens_per_block": 64}) is None and reason("B2") is None


@pytest.mark.parametrize("option", ["context_fmha", "use_paged_context_fmha"])
def test_b3_what_the_recipe_asks_for_must_not_be_switched_off(option):
    given = {"build": {option: "disable"}}
    assert f"{option} disable leaves no prefix reuse and no chunked context" in reason("B3", **given)
    assert "no prefix reuse, which" in reason("B3", chunked_context=False, **given)
    assert reason("B3", prefix_reuse=False, chunked_context=False, **given) is None and reason("B3") is None


def test_b4_the_image_must_hold_the_pinned_version():
    name = "registry.example:5000/tritonserver:{}-trtllm-python-py3"
    assert "is of an older TensorRT-LLM" in reason("B4", image=name.format("26.03"))
    assert "may have no engine builder" in reason("B4", image=name.format("26.08"))
    assert reason("B4", image=name.format("26.05")) is None and reason("B4", image="our/own:latest") is None
    assert 'nearest recipe that works: image = "' in judge(case(image=name.format("25.12")))[0].message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "nvfp4", "gpu": "b200"}, {"Q1": "does not make nvfp4"}),
        ({"precision": "bf16"}, {"Q1": "no fp8 KV cache"}),
        ({"calibration": {"dataset": "./nowhere"}}, {"Q2": "neither a local file or folder"}),
        ({"calibration": {"dataset": "wikitext"}}, {"Q2": "nor cnn_dailymail"}),
        (
            {"precision": "int4_awq", "group_size": 256},
            {"Q3": "attention.dense has 896 inputs on each of 1 rank(s), not a multiple of the block of 256"},
        ),
        ({"precision": "int4_awq"}, {}),
        ({"calibration": {"dataset": "cpython"}}, {}),
    ],
)
def test_a_checkpoint_for_the_llm_api_can_be_made(changes, said):
    given = case(kind="llmapi", model="Qwen/Qwen2.5-0.5B-Instruct", **changes).recipe
    found = [f for f in judge(Case(given, shapes.find(given.model))) if f.severity.value == "refuse"]
    assert {f.rule for f in found} == said.keys()
    assert all(said[f.rule] in f.reason and f.instead for f in found)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_seq_len": 4096}, {"C1": "the 1024 positions"}),
        ({"max_num_tokens": 4}, {"C2": "less than one token for each of 8 sequences"}),
        ({"chunked_context": False}, {"C3": "without chunked_context a prompt of max_seq_len 512"}),
        ({}, {}),
        ({"chunked_context": False, "max_num_tokens": 512}, {}),
        (
            {"max_seq_len": 200_000, "max_num_tokens": 1, "chunked_context": False, "kv_cache_tokens": 32},
            {"M1": "less than one sequence", "C1": "1024 positions", "C2": "one token for each", "C3": "must fit"},
        ),
    ],
)
def test_the_cpu_engines_limits_must_agree(tmp_path, changes, said):
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    table = {"kind": "cpu", "model": str(tmp_path), "precision": "int8", "kv_cache_tokens": 8192, "max_seq_len": 512}
    recipe = recipes.parse(table | {"max_batch_size": 8, "max_num_tokens": 256} | changes, "small.toml")
    found = judge(Case(recipe, shapes.find(recipe.model)))
    assert {f.rule for f in found} == said.keys()
    assert all(said[f.rule] in f.reason and f.instead for f in found)


def test_c4_only_four_bits_and_8_bit_activations_are_calibrated():
    table = {"kind": "cpu", "model": LLAMA_8B, "max_batch_size": 8, "max_num_tokens": 256, "max_seq_len": 512}
    table |= {"kv_cache_tokens": 8192, "calibration": {"size": 8}}
    for precision, rules in (("int8", ["C4"]), ("int4", []), ("int8_sq", [])):
        recipe = recipes.parse(table | {"precision": precision}, "mine.toml")
        found = judge(Case(recipe, shapes.find(LLAMA_8B)))
        assert [f.rule for f in found] == rules
    recipe = recipes.parse(table | {"precision": "int8"}, "mine.toml")
    assert "without [calibration]" in judge(Case(recipe, shapes.find(LLAMA_8B)))[0].message


def test_u1_a_table_without_effect_is_refused():
    assert "[convert] has no effect" in reason("U1", convert={"per_token": True})
    assert "[quantize] has no effect" in reason("U1", precision="bf16", kv_cache_precision="auto", quantize={"seed": 1})
    assert reason("U1", quantize={"seed": 1}) is None


def test_u2_draft_heads_of_other_converters_are_announced():
    said = reason("U2", speculative_decoding={"mode": "eagle", "max_draft_len": 4})
    assert "eagle" in said and "put its checkpoint into engines/engine-under-test/checkpoint before the build" in said
    assert reason("U2", speculative_decoding={"mode": "medusa", "max_draft_len": 4}) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pp": 2}, "pp 2"),
        ({"precision": "bf16", "kv_cache_precision": "auto", "pp": 2}, "pp 2"),
        ({"precision": "nvfp4", "gpu": "b200"}, "precision 'nvfp4'"),
        ({"quantize": {"quantize_lm_head": True}}, "quantize.quantize_lm_head True"),
        ({"quantize": {"autoq_format": "fp8,int4_awq", "auto_quantize_bits": 6.0}}, "quantize.autoq_format"),
        (
            {"precision": "int8_sq", "kv_cache_precision": "auto", "convert": {"smoothquant": 0.5}},
            "convert.smoothquant",
        ),
        ({"speculative_decoding": {"mode": "medusa", "max_draft_len": 4}}, "speculative_decoding.mode 'medusa'"),
    ],
)
def test_q4_what_verify_cannot_read_is_said_before_anything_runs(changes, said):
    (found,) = [finding for finding in judge(case(**changes)) if finding.rule == "Q4"]
    assert f"a recipe with {said}" in found.reason and "ACCEPT_QUALITY" in found.reason and found.instead


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tp": 2},
        {"kind": "llmapi"},
        {"precision": "int8_sq", "kv_cache_precision": "auto"},
        {"precision": "int4_awq", "kv_cache_precision": "auto", "quantize": {"quantize_lm_head": True}},  # R23
    ],
)
def test_q4_leaves_alone_what_verify_reads(changes):
    assert reason("Q4", **changes) is None


def spec(mode: str, **changes: object) -> dict[str, object]:
    return {"speculative_decoding": {"mode": mode, "max_draft_len": 4} | changes}


@pytest.mark.parametrize("mode", MODES)
def test_d1_drafting_excludes_beam_search(mode):
    assert "got 4: TensorRT-LLM's decodingLayer" in reason("D1", max_beam_width=4, **spec(mode))
    assert reason("D1", **spec(mode)) is None and reason("D1", max_beam_width=4) is None
    assert refused(judge(case(max_beam_width=4, **spec(mode))))


def test_d1_beam_search_is_answered_with_one_beam():
    found = {f.rule: f for f in judge(case(max_beam_width=4, **spec("explicit_draft_tokens")))}
    assert found["D1"].instead == "max_beam_width = 1"


def test_d3_eagle_is_for_llama_on_tensor_parallel_ranks():
    assert "Llama checkpoints only; this model is Qwen2ForCausalLM" in reason("D3", model=QWEN_7B, **spec("eagle"))
    assert "pp must be 1 with EAGLE, got 2" in reason("D3", pp=2, **spec("eagle"))
    assert reason("D3", tp=2, **spec("eagle")) is None and reason("D3", model=QWEN_7B, **spec("medusa")) is None


def test_d4_eagle_is_listed_for_16_bit_weights():
    assert "not fp8" in reason("D4", **spec("eagle"))
    assert reason("D4", precision="bf16", kv_cache_precision="auto", **spec("eagle")) is None


def test_d5_medusa_heads_must_be_there(tmp_path):
    assert "got 'no/such-heads'" in reason("D5", **spec("medusa", medusa_model="no/such-heads"))
    assert reason("D5", **spec("medusa", medusa_model=str(tmp_path))) is None and reason("D5", **spec("medusa")) is None


@pytest.mark.parametrize("choices", ["[[0], [0, 0]]", "{0}, {0, x}", "{}", "{0} {1}", "top 4"])
def test_d6_choices_must_parse(choices):
    assert f"got {choices!r}" in reason("D6", **spec("eagle", choices=choices))
    assert "D6" not in {f.rule for f in check(case(**spec("eagle", choices="{0}, {0, 0}, {1}")))}


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


def test_a_right_recipe_has_no_key_without_effect():
    assert all(rule.reason(case()) is None for name, rule in CHECKS.items() if name[0] == "U")
