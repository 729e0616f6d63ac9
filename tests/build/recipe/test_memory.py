"""The formulas against what TensorRT-LLM itself printed, in logs it publishes and in its issues."""

import dataclasses

import pytest
from gpu_recipes import LLAMA_8B, LLAMA_70B, QWEN_7B, accepted, make
from hypothesis import given

from build.base import shape as shapes
from build.recipe import memory, schema
from build.recipe import recipe as recipes
from build.recipe.memory import GIB

MIB = 1024**2
LLAMA2_7B = shapes.from_config(
    "llama-2-7b",
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "test",
).architecture
LLAMA_31_8B = shapes.find(LLAMA_8B).architecture
QWEN_05B = shapes.find("Qwen/Qwen2.5-0.5B-Instruct").architecture


def bf16(**changes: object) -> recipes.Recipe:
    return make(**{"precision": "bf16", "kv_cache_precision": "auto"} | changes)


def int8(**changes: object) -> recipes.Recipe:
    return make(**{"precision": "int8_wo", "kv_cache_precision": "auto", "gpu": "l40s"} | changes)


@pytest.mark.parametrize(
    ("recipe", "arch", "engine_mib"),
    [
        (make(), LLAMA2_7B, 6695),  # TensorRT-LLM docs, Memory Usage
        (bf16(), LLAMA_31_8B, 15388),  # issue 3636, fp16
        (int8(), QWEN_05B, 875),  # issue 1188, tied embeddings
    ],
)
def test_weights_are_the_engine_size_tensorrt_llm_logs(recipe, arch, engine_mib):
    assert memory.weight_bytes(recipe, arch) / MIB == pytest.approx(engine_mib, rel=0.02)


@pytest.mark.parametrize(
    ("recipe", "arch", "bytes_per_token"),
    [
        (make(), LLAMA2_7B, 63.44 * GIB / 259840),  # docs, Memory Usage: FP8 KV
        (int8(), QWEN_05B, 4.53 * GIB / 395776),  # issue 1188: 16-bit KV, 2 KV heads
    ],
)
def test_kv_cache_per_token_is_what_the_logs_divide_to(recipe, arch, bytes_per_token):
    assert memory.kv_bytes_per_token(recipe, arch) == pytest.approx(bytes_per_token, rel=0.001)


@pytest.mark.parametrize(
    ("recipe", "arch", "logged_mib"),
    [
        (int8(max_batch_size=2048, max_num_tokens=8192, max_seq_len=32768), QWEN_05B, 773.51),  # issue 1188
        (int8(max_batch_size=1, max_num_tokens=512), QWEN_05B, 43.26),  # the same engine, smaller
        (
            bf16(max_batch_size=64, max_num_tokens=128_000, max_seq_len=131_072, build={"gather_context_logits": True}),
            LLAMA_31_8B,
            37812.51,  # issue 3636: with context logits of every token
        ),
        (make(max_batch_size=4096, max_num_tokens=8192), LLAMA2_7B, 928.77),  # a trtllm-bench log, FP8
    ],
)
def test_activations_are_the_execution_context_memory_of_the_logs_or_a_little_more(recipe, arch, logged_mib):
    ours = memory.activation_bytes(recipe, arch) / MIB
    assert logged_mib <= ours <= 1.1 * logged_mib


@pytest.mark.parametrize(
    ("recipe", "arch", "logged_gib"),
    [
        (int8(max_batch_size=2048, max_num_tokens=8192, max_seq_len=32768), QWEN_05B, 2.66 + 5.76),
        (make(max_batch_size=4096, max_num_tokens=8192), LLAMA2_7B, 1.14 + 4.35),
    ],
)
def test_buffers_are_the_runtime_and_decoder_memory_of_the_logs(recipe, arch, logged_gib):
    assert memory.buffer_bytes(recipe, arch) / GIB == pytest.approx(logged_gib, rel=0.02)


def test_the_pool_of_the_documentations_example_is_reproduced():
    # Its max_batch_size and max_num_tokens are not printed; 160 and 8192 give its decoder and context memory.
    foot = memory.footprint(make(max_batch_size=160, max_num_tokens=8192), LLAMA2_7B)
    assert foot.pool_tokens == pytest.approx(259_840, rel=0.01)


def test_tensor_parallelism_divides_weights_and_kv_and_copies_kv_heads_beyond_their_number():
    arch, one = shapes.find(LLAMA_70B).architecture, make(model=LLAMA_70B)
    for tp in (2, 4, 8):
        many = make(model=LLAMA_70B, tp=tp)
        assert memory.weight_bytes(many, arch) == pytest.approx(memory.weight_bytes(one, arch) / tp, rel=0.01)
        assert memory.kv_bytes_per_token(many, arch) == memory.kv_bytes_per_token(one, arch) / tp
    qwen = shapes.find(QWEN_7B).architecture  # 4 KV heads
    assert memory.kv_heads_per_rank(make(model=QWEN_7B, tp=4), qwen) == 1
    assert memory.kv_heads_per_rank(make(model=QWEN_7B, tp=8), qwen) == 1


def test_pipeline_stages_add_up_to_the_whole_and_the_fullest_counts():
    arch, whole = LLAMA_31_8B, make()
    split = make(pp=4)
    parts = [memory.rank_weight_bytes(split, arch, stage) for stage in range(4)]
    assert sum(parts) == pytest.approx(memory.weight_bytes(whole, arch), rel=1e-6)
    assert memory.weight_bytes(split, arch) == max(parts) > min(parts)


def test_fewer_bits_take_less():
    sizes = [
        memory.weight_bytes(make(precision=p, kv_cache_precision="auto"), LLAMA_31_8B)
        for p in ("bf16", "fp8", "int4_awq")
    ]
    assert sizes == sorted(sizes, reverse=True)
    # 0.5 bytes and a 16-bit scale per 128 columns
    body = LLAMA_31_8B.num_parameters() - 2 * LLAMA_31_8B.vocab_size * LLAMA_31_8B.hidden_size
    expected = body * (0.5 + 2 / 128) + 4 * LLAMA_31_8B.vocab_size * LLAMA_31_8B.hidden_size
    assert sizes[-1] == pytest.approx(expected, rel=0.002)


def test_a_tied_head_is_stored_apart_on_a_gpu_and_shared_on_the_cpu():
    gpu = memory.weight_bytes(bf16(model="Qwen/Qwen2.5-0.5B-Instruct"), QWEN_05B)
    assert gpu == pytest.approx(2 * (QWEN_05B.num_parameters() + QWEN_05B.vocab_size * QWEN_05B.hidden_size), rel=0.001)
    cpu = cpu_recipe("bf16", "bf16")
    assert memory.weight_bytes(cpu, QWEN_05B) == pytest.approx(2 * QWEN_05B.num_parameters(), rel=0.001)


def cpu_recipe(precision: str, kv: str) -> recipes.Recipe:
    table = {"kind": "cpu", "model": "m", "precision": precision, "kv_cache_precision": kv, "kv_cache_tokens": 4096}
    return recipes.parse(table | {"max_batch_size": 8, "max_num_tokens": 256, "max_seq_len": 512}, "cpu.toml")


def test_the_cpu_pool_is_the_recipes():
    foot = memory.footprint(cpu_recipe("int8", "u8"), QWEN_05B)
    assert foot.pool_tokens == 4096 and foot.available_bytes is None
    assert foot.kv_bytes_per_token == 2 * 24 * 2 * (64 + 8)
    assert foot.sequences(512) == 8


def test_adapters_take_their_files_and_one_more_attention_head(tmp_path):
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(bytes(1000))
    adapted = dataclasses.replace(
        cpu_recipe("int8", "u8"), adapters=(schema.AdapterFolder("a", str(tmp_path)), schema.AdapterFolder("b", "gone"))
    )
    plain, more = (memory.footprint(made, QWEN_05B) for made in (cpu_recipe("int8", "u8"), adapted))
    assert more.weight_bytes == plain.weight_bytes + 1000 + 2 * 896 * 4
    assert more.kv_bytes_per_token == plain.kv_bytes_per_token + 2 * (64 + 8)


def test_a_sequence_takes_whole_blocks():
    foot = memory.footprint(cpu_recipe("int8", "u8"), QWEN_05B)
    assert foot.sequences(32) == 128
    assert foot.sequences(33) == 64


def test_an_upper_bound_of_tokens_bounds_the_pool():
    assert memory.footprint(make(kv_cache_tokens=10_000), LLAMA_31_8B).pool_tokens == 9984


def test_every_precision_a_recipe_may_name_has_a_size():
    assert {p for allowed in schema.PRECISIONS.values() for p in allowed} == set(memory.WEIGHT_BYTES)
    assert {p for allowed in schema.KV_CACHE_PRECISIONS.values() for p in allowed} == set(memory.KV_BYTES)


@pytest.mark.slow
@given(accepted())
def test_everything_fits_on_the_card_of_an_accepted_recipe(drawn):
    foot = memory.footprint(drawn.recipe, drawn.shape.architecture)
    assert foot.fixed_bytes + foot.pool_bytes <= foot.available_bytes
    assert min(foot.weight_bytes, foot.activation_bytes, foot.buffer_bytes, foot.pool_tokens) > 0
    assert foot.sequences(drawn.recipe.max_seq_len) >= 1


def test_an_engine_that_drafts_has_its_weights_twice_and_a_second_kv_cache():
    plain, table = cpu_recipe("int8", "u8"), {"mode": "prompt_lookup", "max_draft_len": 8, "ngram_size": 3}
    drafting = dataclasses.replace(plain, speculative_decoding=recipes.SpeculativeDecoding(**table))
    without, with_drafts = (memory.footprint(recipe, QWEN_05B) for recipe in (plain, drafting))
    model = without.weight_bytes + without.activation_bytes
    assert with_drafts.buffer_bytes == model + 1024 * without.kv_bytes_per_token  # a quarter of 4096
    assert without.buffer_bytes == 0 and with_drafts.sequences(512) == without.sequences(512)
