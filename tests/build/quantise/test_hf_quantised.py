"""Quantised Hugging Face checkpoints for the LLM API: what ModelOpt writes, read back."""

import json
import shutil

import numpy as np
import pytest

from build.base import checkpoint as hf_checkpoint
from build.model import decoder
from build.quality import comparison
from build.quantise import hf_quantised, quantize, trtllm_checkpoint
from build.quantise.trtllm_checkpoint import BadCheckpoint
from contract.errors import InvalidArgument
from tests.fakes import checkpoints
from tests.fakes.quantisable_models import HELD_OUT

# Relative error of the logits, as in test_quantize.py.
BOUNDS = {"fp8": 0.22, "fp8_pc_pt": 0.20, "int4_awq": 0.60, "w4a8_awq": 0.60}
CASES = [
    (model, qformat, kv)
    for model in ("llama_bias", "llama_tied_odd_vocab", "qwen2", "qwen3_wide_heads")
    for qformat, kv in (("fp8", "fp8"), ("fp8_pc_pt", None), ("int4_awq", None), ("w4a8_awq", "fp8"))
]


def logits(model):
    return np.stack(list(model.logits(HELD_OUT)))


def relative_error(candidate, expected):
    return np.linalg.norm(candidate - expected) / np.linalg.norm(expected)


@pytest.mark.build_env
@pytest.mark.parametrize(("model", "qformat", "kv"), CASES)
def test_the_logits_of_the_model_are_reproduced(stage, model, qformat, kv):
    exact = decoder.from_checkpoint(hf_checkpoint.open_checkpoint(stage.model(model)))
    quantised = hf_quantised.read(stage(model, qformat, kv, checkpoint_format="hf"))
    error = relative_error(logits(quantised.decoder()), logits(exact))
    assert BOUNDS[qformat] / 5 < error < BOUNDS[qformat]
    assert quantised.kv_cache_quant_algo == (kv and "FP8")


@pytest.mark.build_env
@pytest.mark.parametrize(("qformat", "kv"), [("fp8_pc_pt", None), ("int4_awq", None), ("w4a8_awq", "fp8")])
def test_the_two_formats_hold_the_same_weights_where_nothing_is_merged(stage, qformat, kv):
    hf = hf_quantised.read(stage("llama", qformat, kv, checkpoint_format="hf"))
    trtllm = trtllm_checkpoint.read(stage("llama", qformat, kv))
    for ours, theirs in (("self_attn.o_proj", "attention.dense"), ("mlp.down_proj", "mlp.proj")):
        for layer in range(2):
            a = hf.linear(f"model.layers.{layer}.{ours}")
            b = trtllm.linear(f"transformer.layers.{layer}.{theirs}")
            assert np.array_equal(a.weight, b.weight)
            assert (a.prequant is None and b.prequant is None) or np.array_equal(a.prequant, b.prequant)


@pytest.mark.build_env
def test_the_folder_has_all_that_the_llm_api_loads(stage):
    folder, source = stage("llama", "fp8", "fp8", checkpoint_format="hf"), stage.model("llama")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["quant_algo"] == "FP8"
    report = json.loads((folder / quantize.REPORT).read_text())
    assert report["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert report["weight_bytes"] == (folder / "model.safetensors").stat().st_size


@pytest.mark.build_env
def test_a_whole_model_is_linked_not_copied(stage):
    folder, source = stage("llama", "full_prec", checkpoint_format="hf"), stage.model("llama")
    assert (folder / "model.safetensors").samefile(source / "model.safetensors")
    assert hf_checkpoint.open_checkpoint(folder).sha256() == hf_checkpoint.open_checkpoint(source).sha256()


@pytest.mark.build_env
def test_the_gate_measures_it_like_any_other(stage):
    folder = stage("llama_bias", "fp8", "fp8", checkpoint_format="hf")
    quantised, weight_bytes = comparison.open_candidate(folder)
    (logits,) = quantised.logits(np.array([[1, 2, 3]]))
    assert np.isfinite(logits).all() and weight_bytes == (folder / "model.safetensors").stat().st_size


def write(folder, *, algo="FP8", kv=None, change=None):
    """A checkpoint of ones and halves, written without torch; ``change`` may spoil its tensors first."""
    config = checkpoints.CONFIGS["llama_gqa"]
    arch = hf_checkpoint.architectures.from_config(config)
    tensors = {}
    for name, shape in arch.expected_tensors().items():
        if not name.endswith("_proj.weight"):
            tensors[name] = ("BF16", np.full(shape, 0x3F80, np.uint16))
            continue
        module = name.removesuffix(".weight")
        tensors[name] = ("F8_E4M3", np.full(shape, 0x38, np.uint8))
        tensors[f"{module}.weight_scale"] = ("F32", np.array(0.5, np.float32))
        tensors[f"{module}.input_scale"] = ("F32", np.array(0.25, np.float32))
    if change:
        change(tensors)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "modelopt"}}))
    quantization = {"quant_algo": algo, "kv_cache_quant_algo": kv, "exclude_modules": ["lm_head"]}
    (folder / hf_quantised.QUANT_CONFIG).write_text(json.dumps({"quantization": quantization}))
    header, body = {}, b""
    for name, (dtype, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    return folder


def test_weights_are_the_stored_values_times_their_scale(tmp_path):
    quantised = hf_quantised.read(write(tmp_path / "c"))
    layer = quantised.decoder().layers[0]()
    assert (layer.qkv.weight == 0.5).all() and layer.qkv.weight.shape == (128, 64)
    assert layer.dense(np.full((1, 64), 0.26, np.float32)).tolist()[0][0] == 64 * 0.25 * 0.5  # 1.04 is rounded to 1


O_PROJ = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{O_PROJ}.input_scale"), f"lacks {O_PROJ}.input_scale"),
        (
            lambda t: t.update({f"{O_PROJ}.bias": ("BF16", np.zeros(64, np.uint16))}),
            "o_proj.bias, for which config.json",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.weight": ("BF16", np.zeros((64, 64), np.uint16))}),
            r"o_proj.weight is BF16 \[64, 64\]; config.json asks for F8_E4M3 \[64, 64\]",
        ),
        (
            lambda t: t.update({f"{O_PROJ}.weight_scale": ("F32", np.ones(64, np.float32))}),
            r"o_proj.weight_scale is F32 \[64\]; config.json asks for F32 \[\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, message):
    with pytest.raises(BadCheckpoint, match=message):
        hf_quantised.read(write(tmp_path / "c", change=change))


def test_query_key_and_value_must_round_their_common_input_alike(tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.k_proj.input_scale"] = ("F32", np.array(0.3, np.float32))

    quantised = hf_quantised.read(write(tmp_path / "c", change=change))
    with pytest.raises(BadCheckpoint, match="k_proj.input_scale, .*v_proj.input_scale are not equal"):
        quantised.decoder().layers[0]()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algo": "NVFP4"}, "quant_algo is 'NVFP4'; read are FP8"),
        ({"kv": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'; read are None"),
        ({"algo": "W4A16_AWQ"}, "group_size is missing"),
        ({"kv": "FP8"}, "lacks model.layers.0.self_attn.k_proj.k_scale"),
    ],
)
def test_formats_that_cannot_be_read_are_refused(tmp_path, options, message):
    with pytest.raises(InvalidArgument, match=message):
        hf_quantised.read(write(tmp_path / "c", **options))


def test_a_file_cut_short_and_a_missing_file_are_refused(tmp_path):
    folder = write(tmp_path / "c")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadCheckpoint, match="truncated"):
        hf_quantised.read(folder)
    (folder / hf_quantised.QUANT_CONFIG).unlink()
    with pytest.raises(BadCheckpoint, match="hf_quant_config.json: cannot be read"):
        hf_quantised.read(folder)
