"""What is refused, and what is said, before anything runs."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build.base import architecture
from build.recipe.quantization import Quantization, check
from contract.errors import InvalidArgument
from tests.fakes.quantisable_models import LLAMA


def arch_of(**changes):
    return architecture.from_config(LLAMA | {"rope_scaling": None} | changes)


def job_of(**changes):
    return replace(Quantization(Path("model"), Path("out")), **changes)


@pytest.mark.parametrize(
    ("changes", "arch", "field", "message"),
    [
        ({"qformat": "int4"}, {}, "qformat", "must be one of full_prec, fp8"),
        ({"checkpoint_format": "onnx"}, {}, "checkpoint_format", "must be one of trtllm, hf, got 'onnx'"),
        ({"checkpoint_format": "hf", "qformat": "int8_sq"}, {}, "qformat", "the LLM API loads no int8_sq; it loads"),
        ({"kv_cache_dtype": "nvfp4"}, {}, "kv_cache_dtype", "must be one of none, fp8, int8, got 'nvfp4'"),
        ({"dtype": "float32"}, {}, "dtype", "must be one of bfloat16, float16"),
        ({"device": "tpu"}, {}, "device", "must be one of auto, cpu, cuda"),
        ({"tp_size": 0}, {}, "tp_size", "must be a positive integer, got 0"),
        ({"calib_size": -1}, {}, "calib_size", "must be a positive integer, got -1"),
        ({"qformat": "int8_wo", "kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype", "int8_wo measures no activations"),
        ({"tp_size": 8}, {}, "tp_size", "8 ranks cannot share the model's num_attention_heads 4 evenly"),
        ({"tp_size": 2}, {"intermediate_size": 511}, "tp_size", "2 ranks cannot share .* intermediate_size 511"),
        (
            {"tp_size": 4}, {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 768}, "tp_size",
            "4 ranks and 6 KV heads: one must be a multiple of the other",
        ),
        (
            {"tp_size": 4, "qformat": "int8_sq"}, {}, "tp_size",
            r"4 ranks would share 2 KV head\(s\), which ModelOpt cannot do with one scale per output row \(int8_sq\); "
            "use at most tp_size 2",
        ),
        (
            {"tp_size": 4, "qformat": "int4_awq"}, {}, "awq_block_size",
            r"attention.dense has 64 inputs on each of 4 rank\(s\), not a multiple of the block of 128 columns that "
            r"share a scale \(rule R36\); use awq_block_size 64, a smaller tp_size, fp8 or int8_sq",
        ),
        (
            {"qformat": "w4a8_awq"}, {"intermediate_size": 500}, "awq_block_size",
            r"mlp.proj has 500 inputs on each of 1 rank\(s\), .* \(rule R36\); use fp8 or int8_sq",
        ),
        ({"qformat": "int4_awq"}, {"hidden_size": 192}, "awq_block_size", "attention.qkv, mlp.fc and mlp.gate has 192"),
        (
            {"qformat": "int4_awq", "tp_size": 2}, {"hidden_size": 384, "head_dim": 128}, "awq_block_size",
            "attention.qkv, mlp.fc and mlp.gate has 192 inputs",
        ),
        (
            {}, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": True}, "model",
            "puts a bias on o_proj, for which TensorRT-LLM's Qwen has no place; kind llmapi has one",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_option_and_a_way_out(changes, arch, field, message):
    with pytest.raises(InvalidArgument, match=f"^{field}: .*{message}"):
        check(job_of(**changes), arch_of(**arch))


@given(
    st.sampled_from(["int4_awq", "w4a8_awq"]), st.sampled_from([1, 2, 4]), st.sampled_from([32, 64, 128, 256]),
    st.integers(1, 40), st.integers(1, 8),
)  # fmt: skip
def test_awq_is_accepted_exactly_when_every_rank_has_whole_blocks(qformat, tp, block, ffn_units, heads):
    ffn, heads = 32 * ffn_units, 4 * heads
    arch = arch_of(
        num_attention_heads=heads, num_key_value_heads=4, head_dim=64, hidden_size=256, intermediate_size=ffn
    )
    whole = all(columns // tp % block == 0 for columns in (256, heads * 64, ffn)) and ffn % tp == 0
    job = job_of(qformat=qformat, tp_size=tp, awq_block_size=block)
    if whole:
        check(job, arch)
    else:
        with pytest.raises(InvalidArgument, match="tp_size|awq_block_size"):
            check(job, arch)


def test_what_only_concerns_compiled_engines_does_not_stop_the_llm_api():
    job = job_of(qformat="int4_awq", calib_size=8, kv_cache_dtype="fp8", checkpoint_format="hf", tp_size=2)
    check(job, arch_of(vocab_size=1000))
    check(job_of(qformat="fp8_pc_pt", tp_size=4, checkpoint_format="hf"), arch_of())  # it shares KV heads itself
    check(replace(job, awq_block_size=128), arch_of(hidden_size=384, head_dim=128))
    biased = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": True}
    check(job, arch_of(**biased))
