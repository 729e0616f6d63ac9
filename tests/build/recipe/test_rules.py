"""Every rule on both sides: what earns it, and the nearest thing that does not."""

import json

import pytest
from gpu_recipes import LLAMA_8B, LLAMA_70B, QWEN3_8B, QWEN_7B, case
from hypothesis import given
from hypothesis import strategies as st

from build.base import layout
from build.base import shape as shapes
from build.recipe import rules
from build.recipe.case import Severity
from build.recipe.rules import RULES

LOOKAHEAD = {"mode": "lookahead_decoding", "window_size": 7, "ngram_size": 7, "verification_set_size": 7}
B200 = {"gpu": "b200"}


def reason(rule: str, **changes: object) -> str | None:
    return RULES[rule].reason(case(**changes))


def test_there_are_the_rules_with_the_severities_of_the_fact_sheet():
    assert list(RULES) == [f"R{n}" for n in range(1, 38) if n not in (28, 29, 33)]  # which the recipe's reader has
    by_severity = {
        severity: {int(r.name[1:]) for r in RULES.values() if r.severity is severity} for severity in Severity
    }
    assert by_severity[Severity.WARN] == {1, 3, 8, 12, 25, 26, 27, 37}
    assert by_severity[Severity.INFORM] == {2, 6, 15, 18, 20, 22, 23, 31, 32}
    assert len(by_severity[Severity.REFUSE]) == 17


def test_r1_a_quantised_kv_cache_costs_prefix_reuse_unless_the_weights_are_fp8_w4a8_or_nvfp4():
    said = reason("R1", precision="int4_awq")
    assert "no prefix reuse and no chunked context" in said and "enables: prefix reuse and chunked context" in said
    assert "enables: prefix reuse" not in reason("R1", precision="int4_awq", prefix_reuse=False, chunked_context=False)
    for precision in ("bf16", "int8_sq", "int8_wo", "int4_wo", "fp8_pc_pt"):
        assert reason("R1", precision=precision)
    assert "INT8 KV cache" in reason("R1", kv_cache_precision="int8")
    for precision in ("fp8", "w4a8_awq", "nvfp4"):
        assert reason("R1", precision=precision) is None
    assert reason("R1", precision="int4_awq", kv_cache_precision="auto") is None


def test_r2_fp8_context_attention_follows_the_kv_cache():
    assert "switched off" in reason("R2", kv_cache_precision="auto")
    assert "forces use_fp8_context_fmha on" in reason("R2", build={"use_fp8_context_fmha": "disable"})
    assert reason("R2") is None
    assert reason("R2", precision="int4_awq", kv_cache_precision="auto") is None


def test_r3_fp8_attention_needs_sm_89():
    assert "paged context attention too" in reason("R3", gpu="a100", precision="int4_awq")
    assert "switched off" in reason("R3", gpu="a10", precision="fp8", kv_cache_precision="auto")
    assert reason("R3", gpu="l4") is None
    assert reason("R3", gpu="a100", precision="int4_awq", kv_cache_precision="auto") is None


@pytest.mark.parametrize("gpu", ["b200", "b300"])
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"precision": "int4_awq", "kv_cache_precision": "auto"}, "weight-only"),
        ({"precision": "int8_wo", "kv_cache_precision": "auto"}, "weight-only"),
        ({"precision": "int4_wo", "kv_cache_precision": "auto"}, "weight-only"),
        ({"precision": "int8_sq", "kv_cache_precision": "auto"}, "SmoothQuant"),
        ({"precision": "fp8_pc_pt"}, "per-channel"),
        ({"kv_cache_precision": "int8"}, "INT8 KV cache"),
    ],
)
def test_r4_integer_engines_fail_on_sm_100(gpu, changes, what):
    assert what in reason("R4", gpu=gpu, **changes)
    assert reason("R4", **changes) is None  # on Hopper
    assert reason("R4", gpu="rtx-5090", **changes) is None  # SM 120: the support matrix speaks, not this rule


def test_r4_leaves_fp8_and_bf16_alone():
    assert reason("R4", **B200) is None
    assert reason("R4", precision="bf16", kv_cache_precision="auto", **B200) is None


@pytest.mark.parametrize("option", rules.NOT_ON_SM100)
def test_r5_some_plugins_are_not_there_on_sm_100(option):
    value = "enable" if option == "bert_context_fmha_fp32_acc" else "auto" if "rowwise" in option else "fp8"
    assert option in reason("R5", build={option: value}, **B200)
    assert reason("R5", build={option: "disable"}, **B200) is None
    assert reason("R5", build={option: value}) is None


def test_r6_the_fused_mlp_is_off_for_other_weights():
    assert "W4A16_AWQ" in reason("R6", precision="int4_awq", kv_cache_precision="auto")
    assert reason("R6", precision="int4_awq", kv_cache_precision="auto", build={"use_fused_mlp": "disable"}) is None
    assert reason("R6") is None
    assert reason("R6", precision="bf16", kv_cache_precision="auto") is None


def test_r7_swiglu_plugins_need_the_fused_mlp():
    for option in rules.FUSED_SWIGLU:
        assert option in reason("R7", build={option: "fp8", "use_fused_mlp": "disable"})
        assert option in reason("R7", precision="w4a8_awq", build={option: "fp8"})
        assert reason("R7", build={option: "fp8"}) is None


def test_r8_reduce_fusion_is_for_llama_on_several_gpus():
    assert "tp is 1" in reason("R8", build={"reduce_fusion": "enable"})
    assert "Qwen2ForCausalLM" in reason("R8", model=QWEN_7B, tp=2, build={"reduce_fusion": "enable"})
    assert reason("R8", model=LLAMA_70B, tp=4) is None  # the plan switches it on by itself
    assert reason("R8", build={"reduce_fusion": "disable"}) is None
    medusa = {"mode": "medusa", "max_draft_len": 63}
    assert reason("R8", model=QWEN_7B, tp=2, speculative_decoding=medusa, build={"reduce_fusion": "enable"}) is None


def test_r9_user_buffer_needs_reduce_fusion_and_an_fp8_llama():
    on = {"user_buffer": "enable"}
    assert "reduce_fusion is off" in reason("R9", build=on)
    assert "precision is bf16" in reason("R9", precision="bf16", kv_cache_precision="auto", tp=2, build=on)
    both = on | {"reduce_fusion": "enable"}
    assert "Qwen2ForCausalLM" in reason("R9", model=QWEN_7B, tp=2, build=both)
    assert reason("R9", tp=2) is None


def test_r10_norm_quant_fusion_is_for_nvfp4_llama_without_reduce_fusion():
    on = {"norm_quant_fusion": "enable"}
    assert reason("R10", build=on)
    assert reason("R10", precision="nvfp4", model=QWEN_7B, build=on, **B200)
    assert reason("R10", precision="nvfp4", build=on | {"reduce_fusion": "enable"}, **B200)
    assert reason("R10", precision="nvfp4", build=on, **B200) is None
    assert reason("R10") is None


def test_r11_max_seq_len_must_be_set():
    assert "131072 tokens" in reason("R11", max_seq_len=None)
    assert reason("R11") is None


def test_r12_says_the_token_limit_the_engine_will_have():
    assert "lowered to 1024 (max_seq_len x max_batch_size = 512 x 2)" in reason(
        "R12", max_seq_len=512, max_batch_size=2
    )
    assert "raised to one KV block, 32" in reason("R12", max_num_tokens=16)
    assert "chunked_context is then needed" in reason("R12", max_num_tokens=16, chunked_context=False)
    assert "raised to one KV block, 64" in reason("R12", max_num_tokens=33, build={"tokens_per_block": 64})
    assert "above 16384" in reason("R12", max_num_tokens=16385)
    assert "opt_num_tokens 9000 is lowered to 4096" in reason("R12", build={"opt_num_tokens": 9000})
    assert "are ignored" in reason("R12", build={"remove_input_padding": "disable"})
    assert reason("R12", max_num_tokens=16384) is None
    assert reason("R12", max_num_tokens=32) is None


def test_r13_opt_num_tokens_excludes_multiple_profiles():
    assert "RuntimeError" in reason("R13", build={"opt_num_tokens": 512})
    assert reason("R13", build={"opt_num_tokens": 512}, multiple_profiles=False) is None
    assert reason("R13") is None


def test_r14_context_logits_exclude_drafting():
    assert "max_draft_len 83" in reason("R14", speculative_decoding=LOOKAHEAD, build={"gather_context_logits": True})
    assert reason("R14", speculative_decoding=LOOKAHEAD, build={"gather_all_token_logits": True})
    assert reason("R14", build={"gather_context_logits": True}) is None
    assert reason("R14", speculative_decoding=LOOKAHEAD) is None


def test_r15_drafting_lengthens_sequences():
    assert "4096 + 83 = 4179 tokens" in reason("R15", speculative_decoding=LOOKAHEAD)
    assert reason("R15") is None


@pytest.mark.parametrize(("batch", "draft", "fires"), [(512, 256, False), (513, 256, True), (512, 257, True)])
def test_r16_eagle_has_limits(batch, draft, fires):
    spec = {"mode": "eagle", "max_draft_len": draft}
    assert (reason("R16", max_batch_size=batch, speculative_decoding=spec) is not None) == fires
    other = {"mode": "explicit_draft_tokens", "max_draft_len": draft}
    assert reason("R16", max_batch_size=batch, speculative_decoding=other) is None


def test_r17_streamingllm_is_gone():
    assert reason("R17", build={"streamingllm": "enable"})
    assert reason("R17", build={"streamingllm": "disable"}) is None


def test_r18_max_input_len_is_ignored():
    assert "ignored" in reason("R18", build={"max_input_len": 2048})
    assert reason("R18", build={"max_input_len": 2048, "context_fmha": "disable"}) is None
    assert reason("R18") is None


def test_r19_quantize_needs_cuda():
    said = reason("R19", quantize={"device": "cpu"})
    assert "GPU is required for inference." in said and "build.quantise.quantize" in said
    assert reason("R19") is None
    bf16 = {"precision": "bf16", "kv_cache_precision": "auto"}
    assert reason("R19", quantize={"device": "cpu"}, **bf16) is None  # convert_checkpoint


def test_r20_awq_calibrates_on_32_texts():
    assert "32 texts" in reason("R20", precision="int4_awq", calibration={"size": 33})
    assert reason("R20", precision="w4a8_awq", calibration={"size": 512})
    assert reason("R20", precision="int4_awq", calibration={"size": 32}) is None
    assert reason("R20", calibration={"size": 512}) is None


def test_r21_only_known_calibration_data_loads(tmp_path):
    assert "NotImplementedError" in reason("R21", calibration={"dataset": "pileval"})
    assert reason("R21", calibration={"dataset": "abisee/cnn_dailymail"}) is None
    assert reason("R21", calibration={"dataset": "pileval"}, precision="bf16", kv_cache_precision="auto") is None
    texts = tmp_path / "texts"
    texts.mkdir()
    assert "with a split 'train', got" in reason("R21", calibration={"dataset": str(texts)})
    (texts / "test.jsonl").write_text('{"text": "held out"}\n')
    assert "with a split 'train', got" in reason("R21", calibration={"dataset": str(texts)})
    (texts / "train.jsonl").write_text('{"content": "a"}\n')
    assert "no column 'text' (train.jsonl has content)" in reason("R21", calibration={"dataset": str(texts)})
    (texts / "train.jsonl").write_text('\n{"text": "a"}\n')
    assert reason("R21", calibration={"dataset": str(texts)}) is None


def test_r21_lets_our_own_stage_read_the_standard_library_where_it_can_quantise():
    ours = {"dataset": "cpython"}
    assert reason("R21", calibration=ours) is None
    assert reason("R19", quantize={"device": "cpu"}, calibration=ours) is None
    assert "splits by tensor only, not over 2 pipeline ranks" in reason("R21", calibration=ours, pp=2)
    assert "does not make nvfp4" in reason("R21", calibration=ours, precision="nvfp4", gpu="b200")
    assert "has no option calib_tp_size" in reason("R21", calibration=ours, quantize={"calib_tp_size": 2})


@pytest.mark.parametrize(
    ("name", "head", "good"), [("a.csv", "id,text\n", True), ("a.csv", "id,body\n", False), ("a.txt", "x", True)]
)
def test_r21_looks_into_csv_and_text_files(tmp_path, name, head, good):
    (tmp_path / name).write_text(head)
    assert (reason("R21", calibration={"dataset": str(tmp_path)}) is None) == good


def test_r21_takes_a_path_with_cnn_dailymail_in_it_for_that_data_set(tmp_path):
    folder = tmp_path / "my_cnn_dailymail"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    assert "no column 'article'" in reason("R21", calibration={"dataset": str(folder)})
    (folder / "train.jsonl").write_text('{"article": "a"}\n')
    assert reason("R21", calibration={"dataset": str(folder)}) is None


def test_r22_quantize_writes_weight_only_formats_unquantised():
    # Qwen's converter has no FP8 KV cache, so this one goes through quantize.py.
    assert "W8A16" in reason("R22", model=QWEN_7B, precision="int8_wo")
    assert reason("R22", precision="int8_wo", kv_cache_precision="auto") is None


def test_r23_lm_head_stays_in_16_bits():
    assert "16 bits" in reason("R23")
    assert reason("R23", quantize={"quantize_lm_head": True}) is None
    said = reason("R23", precision="int4_awq", kv_cache_precision="auto", quantize={"quantize_lm_head": True})
    assert "for fp8 only and left out" in said
    assert reason("R23", precision="bf16", kv_cache_precision="auto") is None


def test_r24_logits_must_be_float32():
    assert "TYPE_FP32" in reason("R24", build={"logits_dtype": "float16"})
    assert reason("R24", build={"logits_dtype": "float32"}) is None
    assert reason("R24") is None


def test_r25_more_workers_than_ranks_have_nothing_to_do():
    assert reason("R25", build={"workers": 2}) == "workers 2 is more than the 1 ranks there are to build"
    assert reason("R25", build={"workers": 0}) is None  # O5 refuses it
    assert reason("R25", model=LLAMA_70B, tp=4, build={"workers": 4}) is None
    assert reason("R25") is None


def test_r26_dtype_auto_makes_float16():
    assert "set bfloat16" in reason("R26", quantize={"dtype": "auto"})
    assert reason("R26", precision="bf16", kv_cache_precision="auto", convert={"dtype": "auto"})
    assert reason("R26", quantize={"dtype": "bfloat16"}) is None
    assert reason("R26") is None


def test_r27_some_options_are_deprecated():
    assert "kv_cache_type paged" in reason("R27", build={"paged_kv_cache": "enable"})
    assert "harmless" in reason("R27", build={"gather_generation_logits": True})
    assert reason("R27", build={"gather_generation_logits": False}) is None
    assert reason("R27") is None


def test_r30_the_builder_needs_a_gpu_even_to_dry_run():
    assert "--dry_run" in reason("R30", build={"dry_run": True})
    assert reason("R30") is None


def test_r31_fp8_alone_leaves_the_kv_cache():
    assert "null" in reason("R31", kv_cache_precision="auto")
    assert reason("R31", precision="nvfp4", kv_cache_precision="auto", **B200)
    assert reason("R31") is None
    assert reason("R31", precision="int4_awq", kv_cache_precision="auto") is None


def test_r32_autoq_needs_its_bits():
    assert "clamped" in reason("R32", quantize={"autoq_format": "fp8,int4_awq"})
    assert reason("R32", quantize={"autoq_format": "fp8,int4_awq", "auto_quantize_bits": 6.0}) is None
    assert reason("R32") is None


@pytest.mark.parametrize("model", [QWEN_7B, QWEN3_8B])
def test_r34_qwen_converts_less(model):
    for convert in ({"use_fp8": True}, {"fp8_kv_cache": True}, {"weight_only_precision": "int4_awq"}):
        assert "go through quantize.py" in reason("R34", model=model, convert=convert)
        assert reason("R34", model=LLAMA_8B, convert=convert) is None
    assert "--fp8_kv_cache" in reason("R34", model=model, precision="bf16", kv_cache_precision="fp8")
    assert reason("R34", model=model, precision="bf16", kv_cache_precision="int8") is None
    assert reason("R34", model=model, precision="int4_wo", kv_cache_precision="auto") is None
    assert reason("R34", model=model) is None


def test_r35_warnings_must_not_be_errors():
    assert "FutureWarning" in reason("R35", environment={"PYTHONWARNINGS": "error"})
    assert reason("R35", environment={"PYTHONWARNINGS": "default,error::DeprecationWarning"})
    assert reason("R35", environment={"PYTHONWARNINGS": "ignore"}) is None
    assert reason("R35") is None


def test_r36_awq_blocks_must_divide_each_shard(tmp_path):
    awq = {"precision": "w4a8_awq", "model": QWEN_7B}
    assert reason("R36", tp=4, **awq) is None  # 3584 / 4 = 7 x 128, 18944 / 4 = 37 x 128
    # 1536 / 4 = 3 x 128, but 8960 / 4 = 2240 is no multiple of 128.
    assert "mlp.proj has 2240 inputs on each of 4 rank(s), not" in reason(
        "R36", tp=4, **awq | {"model": "Qwen/Qwen2.5-1.5B-Instruct"}
    )
    small = {"precision": "int4_awq", "kv_cache_precision": "auto", "model": "Qwen/Qwen2.5-0.5B-Instruct"}
    assert "attention.dense" in reason("R36", tp=2, **small)  # 896 / 2 = 448
    assert reason("R36", tp=2, group_size=64, **small) is None
    assert reason("R36", tp=1, **small) is None
    assert reason("R36", tp=2, precision="int8_sq", model=small["model"]) is None
    wide = json.loads(shapes.TABLE.read_text())["Qwen/Qwen3-8B"] | {"hidden_size": 384, "intermediate_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(wide | {"num_attention_heads": 4, "num_key_value_heads": 4}))
    small |= {"model": str(tmp_path), "group_size": 128}  # heads of 128 on 384
    assert reason("R36", tp=1, **small) is None
    assert "attention.qkv, mlp.fc and mlp.gate has 192 inputs on each of 2 rank(s)" in reason("R36", tp=2, **small)


def test_r37_awq_pads_the_vocabulary(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    odd = {"model": str(tmp_path), "precision": "int4_awq", "kv_cache_precision": "auto"}
    assert "pads the vocabulary of 1000 to 1024" in reason("R37", **odd)
    assert reason("R37", **odd | {"precision": "fp8"}) is None
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 1024}))
    assert reason("R37", **odd) is None


@given(st.sampled_from(sorted(path.stem for path in layout.RECIPES.glob("llama*.toml"))))
def test_no_shipped_recipe_earns_a_refusal_or_a_warning(name):
    from build.base import shape
    from build.recipe import recipe
    from build.recipe.case import Case

    loaded = recipe.load(layout.RECIPES / f"{name}.toml")
    found = RULES.check(Case(loaded, shape.find(loaded.model)))
    assert [f.rule for f in found if f.severity is not Severity.INFORM] == []


def test_reasons_are_one_sentence_each():
    worst = case(precision="int8_sq", kv_cache_precision="int8", build={"streamingllm": "enable"}, **B200)
    for finding in RULES.check(worst):
        assert "\n" not in finding.reason and not finding.reason.endswith(".")


def test_r21_reads_a_csv_with_a_byte_order_mark_and_one_whose_first_line_is_long(tmp_path):
    given = {"calibration": {"dataset": str(tmp_path)}}
    (tmp_path / "a.csv").write_bytes("\ufefftext,id\n".encode())
    assert reason("R21", **given) is None
    (tmp_path / "a.csv").write_text(f"{'x' * 140_000},text\n")
    assert reason("R21", **given) is None


def test_r21_our_own_stage_writes_no_draft_heads():
    medusa = {"mode": "medusa", "max_draft_len": 4}
    said = reason("R21", calibration={"dataset": "cpython"}, speculative_decoding=medusa)
    assert "build.quantise.quantize only, which writes no draft heads of mode 'medusa'" in said
