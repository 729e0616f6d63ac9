"""Reading TensorRT-LLM checkpoints, on files written here byte by byte: no torch, no exporter.

``tests/build/quantise/test_quantize.py`` holds the same reader to what ModelOpt really writes.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from build.base import numerics
from build.quantise import quantised_linear
from build.quantise.quantised_linear import ARRAY_DTYPES, BadCheckpoint
from build.quantise.trtllm_checkpoint import check_values, expected_tensors, read
from tests.fakes import numpy_llama

OBSERVED = json.loads(Path(__file__).with_name("checkpoint_tensors_observed.json").read_text())
SAFETENSORS_NAME = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "int8": "I8"}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config_of(
    algo=None, kv=None, *, family="llama", tp=1, vocab=96, hidden=16, ffn=24, heads=4, kv_heads=2, head=4, layers=1,
    group=4, **more,
):  # fmt: skip
    quantization = {"quant_algo": algo, "kv_cache_quant_algo": kv}
    if algo in quantised_linear.AWQ:
        quantization |= {"group_size": group, "has_zero_point": False, "pre_quant_scale": True}
    return {
        "architecture": ARCHITECTURES[family], "dtype": "bfloat16", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_size": head, "norm_epsilon": 1e-5, "max_position_embeddings": 64,
        "rotary_base": 10000.0, "rotary_scaling": None, "share_embedding_table": False,
        "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1}, "quantization": quantization,
        **({"qwen_type": family} if family != "llama" else {}), **more,
    }  # fmt: skip


def save(path, tensors):
    """tensors: name -> (safetensors dtype, array in its stored form)."""
    header, body = {}, b""
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def write(folder, config, ranks):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for rank, tensors in enumerate(ranks):
        save(folder / f"rank{rank}.safetensors", tensors)
    return folder


def random_tensors(config, seed=0):
    """Stored tensors of a one-rank checkpoint: any weights, positive scales near those of a real export."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (dtype, shape) in expected_tensors(config).items():
        if "scal" in name:
            values = random.uniform(0.5, 1.5, shape).astype(np.float32) * (1 if "prequant" in name else 0.05)
            array = numerics.f32_to_bf16(values) if dtype == "BF16" else values
        elif dtype == "BF16":
            spread = 1 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.1
            array = numerics.f32_to_bf16(random.standard_normal(shape).astype(np.float32) * spread + (len(shape) == 1))
        elif dtype == "F8_E4M3":
            array = random.integers(0, 0x70, shape).astype(np.uint8) | (random.integers(0, 2, shape) << 7).astype(
                np.uint8
            )
        else:
            array = random.integers(-128, 128, shape).astype(np.int8)
        tensors[name] = (dtype, array)
    return tensors


def split_for_tp(config, tensors, tp):
    """The rules of the fact sheet, written down once more: which rows and columns each rank gets."""
    heads, kv_heads, head = config["num_attention_heads"], config["num_key_value_heads"], config["head_size"]
    ranks = []
    for rank in range(tp):
        mine = {}
        for name, (dtype, array) in tensors.items():
            packed = 2 if dtype == "I8" and config["quantization"]["quant_algo"] in quantised_linear.AWQ else 1
            if "embedding" in name or "lm_head" in name:
                rows = math.ceil(len(array) / tp)
                padded = np.zeros((rows * tp, array.shape[1]), array.dtype)
                padded[: len(array)] = array
                array = padded[rank * rows : (rank + 1) * rows]
            elif "qkv" in name and "prequant" not in name and array.size > 1:
                q_heads = range(rank * heads // tp, (rank + 1) * heads // tp)
                if kv_heads >= tp:
                    k_heads = range(rank * kv_heads // tp, (rank + 1) * kv_heads // tp)
                else:
                    k_heads = [rank * kv_heads // tp]
                wanted = [*q_heads, *(heads + k for k in k_heads), *(heads + kv_heads + k for k in k_heads)]
                unit = head // packed
                array = np.concatenate([array[h * unit : (h + 1) * unit] for h in wanted])
            elif (".fc." in name or ".gate." in name) and "prequant" not in name and array.size > 1:
                array = np.split(array, tp)[rank]
            elif (".dense." in name or ".proj." in name) and (array.ndim == 2 or "prequant" in name):
                array = np.split(array, tp, axis=array.ndim - 1)[rank]
            mine[name] = (dtype, array)
        ranks.append(mine)
    return ranks


ALGOS = list(quantised_linear.QUANT_ALGOS)


@st.composite
def checkpoints_on_ranks(draw):
    tp = draw(st.sampled_from([1, 2, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    config = config_of(
        draw(st.sampled_from(ALGOS)),
        draw(st.sampled_from([None, "FP8", "INT8"])),
        family=draw(st.sampled_from(list(ARCHITECTURES))),
        heads=kv_heads * draw(st.sampled_from([1, 2])) * (4 // kv_heads),
        kv_heads=kv_heads,
        head=draw(st.sampled_from([4, 8])),
        ffn=draw(st.sampled_from([16, 48])),
        vocab=draw(st.sampled_from([8, 13, 101])),
        attn_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )
    return config, tp


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(checkpoints_on_ranks())
def test_ranks_join_bit_for_bit_to_the_whole(tmp_path, drawn):
    config, tp = drawn
    whole = random_tensors(config)
    on_ranks = config | {"mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1}}
    joined = read(write(tmp_path / "c", on_ranks, split_for_tp(config, whole, tp)))
    for name, (_, array) in whole.items():
        result = joined.tensor(name)
        assert result.dtype == array.dtype and np.array_equal(result, array), name
    check_values(joined.stored())


@pytest.mark.parametrize("variant", OBSERVED["tensors_layer0_and_globals"])
def test_expected_tensors_are_those_observed_of_the_exporter(variant):
    family, _, _, tp = variant.split("-")
    size = OBSERVED["geometry"]
    block = OBSERVED["quantization_blocks"][variant]
    config = config_of(
        family=family, tp=int(tp[2:]), vocab=size["vocab"], hidden=size["hidden"], ffn=size["intermediate"],
        heads=size["heads"], kv_heads=size["kv_heads"], head=size["head_dim"], layers=size["layers"],
    ) | {"quantization": block}  # fmt: skip
    observed = {
        name: (SAFETENSORS_NAME[tensor["dtype"]], tuple(tensor["shape"]))
        for name, tensor in OBSERVED["tensors_layer0_and_globals"][variant].items()
    }
    expected = expected_tensors(config)
    assert {name: entry for name, entry in expected.items() if ".layers.1." not in name} == observed
    second = {name.replace(".1.", ".0."): entry for name, entry in expected.items() if ".layers.1." in name}
    assert second == {name: entry for name, entry in observed.items() if ".layers.0." in name}


@pytest.fixture
def one(tmp_path):
    """A sound FP8 checkpoint on two ranks, as (folder, config, ranks)."""
    config = config_of("FP8", "FP8")
    ranks = split_for_tp(config, random_tensors(config), 2)
    config["mapping"] = {"world_size": 2, "tp_size": 2, "pp_size": 1}
    return write(tmp_path / "one", config, ranks), config, ranks


DENSE = "transformer.layers.0.attention.dense"


def broken_tensors(ranks, change):
    ranks = [dict(rank) for rank in ranks]
    change(ranks)
    return ranks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: r[1].pop(f"{DENSE}.weight"),
            r"rank1.safetensors: lacks transformer.layers.0.attention.dense.weight",
        ),
        (
            lambda r: r[0].update({f"{DENSE}.bias": ("BF16", np.zeros(16, np.uint16))}),
            "rank0.safetensors: holds transformer.layers.0.attention.dense.bias, for which config.json leaves no place",
        ),
        (
            lambda r: r[0].update({f"{DENSE}.weight": ("F8_E4M3", np.zeros((16, 16), np.uint8))}),
            r"dense.weight is F8_E4M3 \[16, 16\]; config.json asks for F8_E4M3 \[16, 8\]",
        ),
        (
            lambda r: r[0].update({f"{DENSE}.weight": ("I8", np.zeros((16, 8), np.int8))}),
            r"dense.weight is I8 \[16, 8\]; config.json asks for F8_E4M3 \[16, 8\]",
        ),
        (lambda r: r.pop(), "tp_size 2, so rank0.safetensors, rank1.safetensors belong here; found rank0.safetensors"),
        (lambda r: r.append(r[0]), "found rank0.safetensors, rank1.safetensors, rank2.safetensors"),
    ],
)
def test_tensors_that_do_not_fit_config_json_are_refused(one, change, message):
    folder, config, ranks = one
    with pytest.raises(BadCheckpoint, match=message):
        read(write(folder, config, broken_tensors(ranks, change)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks a valid hidden_size"),
        ({"dtype": "int4"}, "dtype must be one of bfloat16, float16, float32, got 'int4'"),
        ({"mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2}}, r"only tensor parallelism is read \(pp_size 1\)"),
        ({"quantization": {"quant_algo": "NVFP4"}}, "quant_algo is 'NVFP4'; read are None, FP8"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}, "kv_cache_quant_algo is 'NVFP4'"),
        ({"quantization": {"quant_algo": "W4A16_AWQ"}}, "group_size is missing"),
        ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*.fc"]}}, "only lm_head is read"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused(one, change, message):
    folder, config, ranks = one
    with pytest.raises(BadCheckpoint, match=f"config.json: .*{message}"):
        read(write(folder, config | change, ranks))


def test_a_folder_without_config_and_a_damaged_config_are_refused(one, tmp_path):
    with pytest.raises(
        BadCheckpoint, match="config.json: does not exist; is this the folder of a TensorRT-LLM checkpoint"
    ):
        read(tmp_path)
    for content in ("{", "[]", "[" * 100_000):
        (one[0] / "config.json").write_text(content)
        with pytest.raises(BadCheckpoint, match="config.json: is not JSON"):
            read(one[0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.floats(0, 0.999))
def test_a_file_cut_anywhere_is_refused(one, share):
    folder, config, ranks = one
    write(folder, config, ranks)
    path = folder / "rank1.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(BadCheckpoint, match="rank1.safetensors"):
        read(folder)


def test_copies_that_differ_between_ranks_are_refused_when_joined(one):
    folder, config, ranks = one
    dtype, array = ranks[1]["transformer.layers.0.input_layernorm.weight"]
    ranks[1]["transformer.layers.0.input_layernorm.weight"] = (dtype, array ^ 1)
    checkpoint = read(write(folder, config, ranks))
    with pytest.raises(BadCheckpoint, match="rank1.*input_layernorm.weight differs from rank 0's copy"):
        checkpoint.tensor("transformer.layers.0.input_layernorm.weight")


def test_shared_kv_heads_that_differ_between_ranks_are_refused_when_joined(tmp_path):
    config = config_of(kv_heads=1)
    ranks = split_for_tp(config, random_tensors(config), 2)
    dtype, array = ranks[1]["transformer.layers.0.attention.qkv.weight"]
    ranks[1]["transformer.layers.0.attention.qkv.weight"] = (dtype, array ^ 1)
    config["mapping"] = {"world_size": 2, "tp_size": 2, "pp_size": 1}
    with pytest.raises(
        BadCheckpoint, match="the KV rows of transformer.layers.0.attention.qkv.weight are not rank 0's"
    ):
        read(write(tmp_path / "c", config, ranks)).tensor("transformer.layers.0.attention.qkv.weight")


@pytest.mark.parametrize(
    ("name", "bits", "message"),
    [
        ("transformer.ln_f.weight", 0x7F80, "ln_f.weight has 1 values that are not finite"),
        (f"{DENSE}.weight", 0x7F, "dense.weight has 1 values that are not finite"),
        (f"{DENSE}.weights_scaling_factor", np.nan, "weights_scaling_factor has 1 values that are not finite"),
        (f"{DENSE}.activation_scaling_factor", 0, "activation_scaling_factor has a scale that is not positive"),
        (f"{DENSE}.weights_scaling_factor", -0.5, "weights_scaling_factor has a scale that is not positive"),
    ],
)
def test_values_that_no_engine_can_use_are_refused(one, name, bits, message):
    folder, config, ranks = one
    dtype, array = ranks[1][name]
    array = array.copy()
    array.flat[0] = bits
    ranks[1][name] = (dtype, array)
    with pytest.raises(BadCheckpoint, match=f"rank1.safetensors: .*{message}"):
        check_values(read(write(folder, config, ranks)).stored())


def hugging_face(checkpoint):
    """(config, f32 weights) of the Hugging Face model that a checkpoint's dequantised weights amount to."""
    config, size = checkpoint.config, checkpoint.config["head_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    weights = {
        "model.embed_tokens.weight": checkpoint.f32("transformer.vocab_embedding.weight"),
        "model.norm.weight": checkpoint.f32("transformer.ln_f.weight"),
        "lm_head.weight": checkpoint.f32("lm_head.weight"),
    }
    for layer in range(config["num_hidden_layers"]):
        at, to = f"transformer.layers.{layer}", f"model.layers.{layer}"
        weights[f"{to}.input_layernorm.weight"] = checkpoint.f32(f"{at}.input_layernorm.weight")
        weights[f"{to}.post_attention_layernorm.weight"] = checkpoint.f32(f"{at}.post_layernorm.weight")
        if config.get("qwen_type") == "qwen3":
            weights[f"{to}.self_attn.q_norm.weight"] = checkpoint.f32(f"{at}.attention.q_layernorm.weight")
            weights[f"{to}.self_attn.k_norm.weight"] = checkpoint.f32(f"{at}.attention.k_layernorm.weight")
        names = {"attention.dense": "self_attn.o_proj", "mlp.fc": "mlp.gate_proj", "mlp.gate": "mlp.up_proj",
                 "mlp.proj": "mlp.down_proj"}  # fmt: skip
        for ours, theirs in names.items():
            linear = checkpoint.linear(f"{at}.{ours}")
            weights[f"{to}.{theirs}.weight"] = linear.weight * (1 if linear.prequant is None else linear.prequant)
            if linear.bias is not None:
                weights[f"{to}.{theirs}.bias"] = linear.bias
        linear = checkpoint.linear(f"{at}.attention.qkv")
        whole = linear.weight * (1 if linear.prequant is None else linear.prequant)
        cuts = [heads * size, (heads + kv_heads) * size]
        for side, rows in zip("qkv", np.split(whole, cuts), strict=True):
            weights[f"{to}.self_attn.{side}_proj.weight"] = rows
        if linear.bias is not None:
            for side, rows in zip("qkv", np.split(linear.bias, cuts), strict=True):
                weights[f"{to}.self_attn.{side}_proj.bias"] = rows
    return {
        "num_hidden_layers": config["num_hidden_layers"], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": size, "hidden_size": config["hidden_size"], "rms_norm_eps": config["norm_epsilon"],
        "rope_theta": config["rotary_base"],
    }, weights  # fmt: skip


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("algo", [None, "W4A16_AWQ", "W8A16", "W4A16"])
def test_with_whole_activations_the_decoder_is_the_dequantised_model(tmp_path, family, algo):
    """Weight formats round no activation: the independent forward pass on dequantised weights gives the same logits."""
    config = config_of(algo, family=family, layers=2, mlp_bias=family == "llama", attn_bias=family != "qwen3")
    checkpoint = read(write(tmp_path / "c", config, [random_tensors(config)]))
    ids = np.arange(9)
    logits = next(checkpoint.decoder().logits(ids[None]))
    expected = numpy_llama.logits(*hugging_face(checkpoint), ids.tolist())
    np.testing.assert_allclose(logits, expected, atol=3e-4 * np.abs(expected).max())


def scalar(value):
    return np.array([value], dtype=np.float32)


@pytest.mark.parametrize("kv", ["FP8", "INT8"])
def test_a_quantised_kv_cache_changes_what_attention_sees(tmp_path, kv):
    config = config_of(None, kv, layers=2)
    tensors = random_tensors(config)
    ids = np.arange(12)[None]
    logits = []
    for scale in (1e-4, 0.02):  # saturating at once, and fitting
        for name in tensors:
            if name.endswith("cache_scaling_factor"):
                tensors[name] = ("F32", scalar(scale))
        logits.append(next(read(write(tmp_path / "c", config, [tensors])).decoder().logits(ids)))
    whole = {name: entry for name, entry in tensors.items() if "cache_scaling" not in name}
    exact = next(read(write(tmp_path / "c", config_of(layers=2), [whole])).decoder().logits(ids))
    error = [np.abs(candidate - exact).max() / np.abs(exact).max() for candidate in logits]
    assert 0 < error[1] < 0.1 < error[0]


def test_every_stored_dtype_has_a_numpy_form():
    assert set(SAFETENSORS_NAME.values()) | {"F16", "U8"} == set(ARRAY_DTYPES)
