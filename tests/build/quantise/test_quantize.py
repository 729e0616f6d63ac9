"""The quantise stage: recipes into jobs, and what ModelOpt really writes.

Tests marked build_env run the whole stage on tiny random models and read the result back with our own reader, whose
arithmetic ``test_trtllm_checkpoint.py`` and ``test_decoder.py`` hold to independent ones.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from build.base import checkpoint as hf_checkpoint
from build.base import program
from build.model import decoder
from build.model.calibration import TokenBlocks
from build.quantise import exporters, quantize, trtllm_checkpoint
from build.recipe import schema
from build.recipe.quantization import HF_QFORMATS, QFORMATS, Quantization
from contract.errors import EngineFailed, InvalidArgument
from tests.fakes import checkpoints
from tests.fakes.quantisable_models import BLOCKS, HELD_OUT, LLAMA, MODELS

OBSERVED = json.loads(Path(__file__).with_name("checkpoint_tensors_observed.json").read_text())
SAFETENSORS_NAME = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "int8": "I8"}


def test_every_precision_of_a_trtllm_recipe_but_nvfp4_is_a_format():
    precisions = set(schema.PRECISIONS[schema.TRTLLM])
    assert {"full_prec" if p == "bf16" else p for p in precisions} - {"nvfp4"} == set(QFORMATS)
    precisions = set(schema.PRECISIONS[schema.LLMAPI])
    assert {"full_prec" if p == "bf16" else p for p in precisions} - {"nvfp4"} == set(HF_QFORMATS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model_dir", "{tmp}", "--output_dir", "{tmp}/out"], "has no config.json; is it a Hugging Face checkpoint?"),
        (
            ["--model_dir", "{tmp}/model", "--output_dir", "{tmp}"],
            "error: output_dir: {tmp} exists; remove it or allow",
        ),
        (
            ["--model_dir", "{tmp}/model", "--output_dir", "{tmp}/out", "--tp_size", "3"],
            "error: tp_size: 3 ranks cannot share the model's num_attention_heads 4 evenly",
        ),
    ],
)
def test_the_command_refuses_in_one_sentence(tmp_path, capsys, arguments, message):
    checkpoints.write(tmp_path / "model", LLAMA)
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    assert program.run(lambda: quantize.main(given), "error") == 1
    err = capsys.readouterr().err
    assert message.format(tmp=tmp_path) in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


# --- with ModelOpt ---


def reference_logits(folder):
    return np.stack(list(decoder.from_checkpoint(hf_checkpoint.open_checkpoint(folder)).logits(HELD_OUT)))


def engine_logits(folder, vocab):
    return np.stack(list(trtllm_checkpoint.read(folder).decoder().logits(HELD_OUT)))[..., :vocab]


def relative_error(candidate, expected):
    return np.linalg.norm(candidate - expected) / np.linalg.norm(expected)


@pytest.mark.build_env
@pytest.mark.parametrize("variant", OBSERVED["tensors_layer0_and_globals"])
def test_names_dtypes_shapes_and_quantization_are_those_observed(stage, variant):
    family, qformat, kv, tp = variant.split("-")
    tp = int(tp[2:])
    qformat = "full_prec" if qformat == "none" else qformat
    folder = stage(family, qformat, None if kv == "kvNone" else kv[2:], tp)
    observed = {
        name: (SAFETENSORS_NAME[tensor["dtype"]], tuple(tensor["shape"]))
        for name, tensor in OBSERVED["tensors_layer0_and_globals"][variant].items()
    }
    for rank in trtllm_checkpoint.read(folder).ranks:
        stored = {name: (tensor.dtype, tensor.shape) for name, tensor in rank.items()}
        assert {name: entry for name, entry in stored.items() if ".layers.1." not in name} == observed
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == OBSERVED["quantization_blocks"][variant]


@pytest.mark.build_env
@pytest.mark.parametrize("variant", OBSERVED["config_json_examples"])
def test_config_json_has_every_key_observed_with_its_value(stage, variant):
    family, qformat, kv, tp = variant.split("-")
    folder = stage(family, qformat, None if kv == "kvNone" else kv[2:], int(tp[2:]))
    config = json.loads((folder / "config.json").read_text())
    expected = OBSERVED["config_json_examples"][variant]
    assert {key: config.get(key) for key in expected} == expected
    added = {"model_type", "attn_bias", "mlp_bias", "rotary_base", "rotary_scaling", "qwen_type"}
    assert config.keys() - expected.keys() <= added


# Relative error against bf16: of one weight matrix, and of the logits of a two-layer model. Random weights are the
# hard case for logits: every error is as large as every other and nothing averages out (a trained model in FP8 loses
# about 0.1 % of perplexity). Measured on all models: 0.026, 0.13-0.16 (fp8); 0.004-0.01, 0.22 (int8_sq); 0.11-0.13,
# 0.33-0.45 (int4_awq); bf16 is exact.
WEIGHT_BOUNDS = {
    "full_prec": 0, "fp8": 0.03, "fp8_pc_pt": 0.03, "int8_sq": 0.02, "int4_awq": 0.15, "w4a8_awq": 0.16,
    "int8_wo": 0.01, "int4_wo": 0.16,
}  # fmt: skip
LOGIT_BOUNDS = {
    "full_prec": 1e-6, "fp8": 0.22, "fp8_pc_pt": 0.20, "int8_sq": 0.35, "int4_awq": 0.60, "w4a8_awq": 0.60,
    "int8_wo": 0.05, "int4_wo": 0.60,
}  # fmt: skip
CASES = [
    (model, qformat, "fp8" if qformat in ("fp8", "w4a8_awq") else None)
    for model in MODELS
    for qformat in (LOGIT_BOUNDS if model in ("llama", "qwen3") else ("full_prec", "fp8", "int4_awq"))
]


@pytest.mark.build_env
@pytest.mark.parametrize(("model", "qformat", "kv"), CASES)
def test_dequantised_weights_reproduce_the_logits_of_the_model(stage, model, qformat, kv):
    expected = reference_logits(stage.model(model))
    folder = stage(model, qformat, kv)
    error = relative_error(engine_logits(folder, expected.shape[-1]), expected)
    assert error <= LOGIT_BOUNDS[qformat]
    if qformat != "full_prec":
        assert error > LOGIT_BOUNDS[qformat] / 5  # the rounding is really there


@pytest.mark.build_env
@pytest.mark.parametrize(("model", "qformat", "kv"), CASES)
def test_dequantised_weights_are_close_to_the_models(stage, model, qformat, kv):
    exact = decoder.from_checkpoint(hf_checkpoint.open_checkpoint(stage.model(model)))
    engine = trtllm_checkpoint.read(stage(model, qformat, kv)).decoder()
    for make_exact, make_layer in zip(exact.layers, engine.layers, strict=True):
        expected, layer = make_exact(), make_layer()
        for name in ("qkv", "dense", "fc", "gate", "proj"):
            linear = getattr(layer, name)
            weight = linear.weight * (1 if linear.prequant is None else linear.prequant)
            assert relative_error(weight, getattr(expected, name).weight) <= WEIGHT_BOUNDS[qformat], name


@pytest.mark.build_env
@pytest.mark.parametrize(
    "model", ["llama", "llama_bias", "llama_odd_vocab", "llama_mha_tied", "qwen2", "qwen3_wide_heads"]
)
def test_the_reference_is_transformers_own_forward_pass(stage, model):
    import torch
    import transformers

    folder = stage.model(model)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if "rope_parameters" in MODELS[model]:  # a spelling that transformers 4 does not read
        config = transformers.AutoConfig.from_pretrained(folder, rope_theta=1e6)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, config=config)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(HELD_OUT)).logits.numpy()
    assert relative_error(reference_logits(folder), logits) < 2e-5


@pytest.mark.build_env
@pytest.mark.parametrize("model", ["llama", "llama_bias", "qwen3"])
@pytest.mark.parametrize(
    ("qformat", "kv"), [("fp8", None), ("fp8_pc_pt", None), ("int8_sq", None), ("int4_awq", None), ("w4a8_awq", None)]
)
def test_the_simulated_engine_rounds_as_modelopts_own_simulation_does(stage, model, qformat, kv):
    """ModelOpt's fake-quantised model, in torch, before it is exported: another program for the same rounding.

    They differ where a division ends on a tie, and where the exporter merges scales: of q, k and v, and in FP8 of
    fc and gate, which the builder may fuse.
    """
    import torch

    opened = hf_checkpoint.open_checkpoint(stage.model(model))
    job = Quantization(opened.folder, Path("unused"), qformat, kv, batch_size=8)
    simulated = quantize.load_model(job, opened)
    quantize.calibrate(simulated, job, BLOCKS, lambda line: None)
    simulated = simulated.float()
    exact = decoder.from_checkpoint(opened)
    engine = trtllm_checkpoint.read(stage(model, qformat, kv)).decoder()
    random = np.random.default_rng(5)
    for index, block in enumerate(simulated.model.layers):
        ours, whole = engine.layers[index](), exact.layers[index]()
        attention, mlp = block.self_attn, block.mlp
        pairs = {
            "dense": attention.o_proj, "fc": mlp.gate_proj, "gate": mlp.up_proj, "proj": mlp.down_proj,
            "qkv": lambda x, a=attention: torch.cat([a.q_proj(x), a.k_proj(x), a.v_proj(x)], -1),
        }  # fmt: skip
        for name, module in pairs.items():
            linear = getattr(ours, name)
            x = random.standard_normal((1, 64, linear.weight.shape[1])).astype(np.float32)
            with torch.no_grad():
                theirs = module(torch.from_numpy(x)).numpy()[0]
            rounding = relative_error(theirs, getattr(whole, name)(x[0]))
            apart = relative_error(linear(x[0]), theirs)
            merged = name == "qkv" or (qformat == "fp8" and name in ("fc", "gate"))
            assert apart < (1.5 if merged else 0.2) * rounding, (index, name, apart, rounding)


TP_CASES = [
    (model, qformat, kv)
    for model in ("llama", "llama_bias", "llama_mha_tied", "qwen3")
    for qformat, kv in (
        ("full_prec", None), ("fp8", "fp8"), ("fp8_pc_pt", None), ("int8_sq", None), ("int4_awq", None),
        ("w4a8_awq", "fp8"),
    )
] + [
    (model, qformat, None)
    for model in ("llama_mqa", "llama_odd_vocab", "llama_tied_odd_vocab")
    for qformat in ("full_prec", "fp8", "int4_awq")
]  # fmt: skip


@pytest.mark.build_env
@pytest.mark.parametrize(("model", "qformat", "kv"), TP_CASES)
def test_two_ranks_join_bit_for_bit_to_one(stage, model, qformat, kv):
    one = trtllm_checkpoint.read(stage(model, qformat, kv, 1))
    two = trtllm_checkpoint.read(stage(model, qformat, kv, 2))
    assert len(two.ranks) == 2 and one.ranks[0].keys() == two.ranks[0].keys()
    for name in one.ranks[0]:
        assert np.array_equal(one.tensor(name), two.tensor(name)), name
    ignored = ("mapping", "rank")
    assert {k: v for k, v in one.config.items() if k not in ignored} == {
        k: v for k, v in two.config.items() if k not in ignored
    }


@pytest.mark.build_env
def test_full_precision_is_the_model_bit_for_bit(stage):
    source = hf_checkpoint.open_checkpoint(stage.model("llama_bias")).tensors
    exported = trtllm_checkpoint.read(stage("llama_bias", "full_prec"))
    at, to = "model.layers.1", "transformer.layers.1"
    pairs = {
        "transformer.vocab_embedding.weight": ["model.embed_tokens.weight"],
        "lm_head.weight": ["lm_head.weight"],
        "transformer.ln_f.weight": ["model.norm.weight"],
        f"{to}.attention.qkv.weight": [f"{at}.self_attn.{side}_proj.weight" for side in "qkv"],
        f"{to}.attention.qkv.bias": [f"{at}.self_attn.{side}_proj.bias" for side in "qkv"],
        f"{to}.attention.dense.weight": [f"{at}.self_attn.o_proj.weight"],
        f"{to}.mlp.fc.weight": [f"{at}.mlp.gate_proj.weight"],
        f"{to}.mlp.gate.weight": [f"{at}.mlp.up_proj.weight"],
        f"{to}.mlp.proj.weight": [f"{at}.mlp.down_proj.weight"],
        f"{to}.mlp.proj.bias": [f"{at}.mlp.down_proj.bias"],
        f"{to}.input_layernorm.weight": [f"{at}.input_layernorm.weight"],
        f"{to}.post_layernorm.weight": [f"{at}.post_attention_layernorm.weight"],
    }
    for name, parts in pairs.items():
        assert np.array_equal(exported.tensor(name), np.concatenate([source[part].raw() for part in parts])), name


@pytest.mark.build_env
def test_scales_are_the_largest_magnitudes_over_the_formats_largest_value(stage):
    source = hf_checkpoint.open_checkpoint(stage.model("llama")).tensors
    down = source["model.layers.0.mlp.down_proj.weight"].f32()
    proj = "transformer.layers.0.mlp.proj"
    fp8 = trtllm_checkpoint.read(stage("llama", "fp8", "fp8"))
    np.testing.assert_allclose(fp8.f32(f"{proj}.weights_scaling_factor"), [np.abs(down).max() / 448], rtol=1e-6)
    rowwise = trtllm_checkpoint.read(stage("llama", "fp8_pc_pt"))
    np.testing.assert_allclose(rowwise.f32(f"{proj}.per_channel_scale"), np.abs(down).max(1) / 448, rtol=1e-6)
    for side in ("kv", "k", "v"):
        assert fp8.f32(f"transformer.layers.0.attention.{side}_cache_scaling_factor") >= 1
    awq = trtllm_checkpoint.read(stage("llama", "int4_awq"))
    smoothed = down / awq.f32(f"{proj}.prequant_scaling_factor")
    blocks = np.abs(smoothed).reshape(256, 4, 128).max(-1) / 7
    np.testing.assert_allclose(awq.f32(f"{proj}.weights_scaling_factor"), blocks, rtol=2e-2)  # smoothed in bf16


@pytest.mark.build_env
def test_an_odd_vocabulary_is_padded_by_awq_only_and_said_so(stage):
    padded = stage("llama_odd_vocab", "int4_awq")
    report = json.loads((padded / quantize.REPORT).read_text())
    assert report["vocab_size"] == {"model": 1001, "checkpoint": 1024}
    checkpoint = trtllm_checkpoint.read(padded)
    for name in ("transformer.vocab_embedding.weight", "lm_head.weight"):
        assert not checkpoint.f32(name)[1001:].any() and checkpoint.f32(name)[:1001].any(1).all()
    kept = json.loads((stage("llama_odd_vocab", "fp8", None, 2) / quantize.REPORT).read_text())
    assert kept["vocab_size"] == {"model": 1001, "checkpoint": 1001}


@pytest.mark.build_env
def test_biases_have_their_place_in_config_json(stage):
    config = json.loads((stage("llama_bias", "fp8", "fp8") / "config.json").read_text())
    assert config["attn_bias"] is True and config["mlp_bias"] is True
    config = json.loads((stage("qwen2", "fp8", "fp8") / "config.json").read_text())
    assert config["attn_bias"] is True and config["mlp_bias"] is False and config["qwen_type"] == "qwen2"
    config = json.loads((stage("qwen3", "fp8", "fp8") / "config.json").read_text())
    assert config["attn_bias"] is False and config["qwen_type"] == "qwen3" and config["rotary_base"] == 1e6


@pytest.mark.build_env
@pytest.mark.parametrize(("qformat", "algo"), [("int8_wo", "W8A16"), ("int4_wo", "W4A16")])
def test_weight_only_formats_store_whole_weights_under_their_name(stage, qformat, algo):
    checkpoint = trtllm_checkpoint.read(stage("llama", qformat))
    assert checkpoint.quant_algo == algo
    assert checkpoint.ranks[0]["transformer.layers.0.mlp.fc.weight"].dtype == "BF16"


@pytest.mark.build_env
@pytest.mark.parametrize("qformat", ["int8_sq", "int4_awq"])
def test_an_int8_kv_cache_is_exported_with_its_scales(stage, qformat):
    checkpoint = trtllm_checkpoint.read(stage("llama", qformat, "int8"))
    assert checkpoint.kv_cache_quant_algo == "INT8"
    expected = reference_logits(stage.model("llama"))
    assert relative_error(engine_logits(checkpoint.folder, 1024), expected) < LOGIT_BOUNDS[qformat]


@pytest.mark.build_env
def test_a_smaller_block_has_more_scales_and_less_error(stage):
    expected = reference_logits(stage.model("llama"))
    errors = []
    for block in (64, 128):
        folder = stage("llama", "int4_awq", awq_block_size=block)
        checkpoint = trtllm_checkpoint.read(folder)
        assert checkpoint.config["quantization"]["group_size"] == block
        assert checkpoint.tensor("transformer.layers.0.mlp.proj.weights_scaling_factor").shape == (256, 512 // block)
        errors.append(relative_error(engine_logits(folder, 1024), expected))
    assert errors[0] < errors[1]


@pytest.mark.build_env
@pytest.mark.parametrize(("model", "qformat"), [("qwen3", "fp8"), ("llama", "int4_awq")])
def test_the_same_input_and_seed_give_the_same_bytes(stage, tmp_path, model, qformat):
    for run in ("a", "b"):
        job = Quantization(stage.model(model), tmp_path / run, qformat, calib_size=4, calib_max_seq_length=32)
        quantize.quantize(job, notify=lambda line: None)  # with texts, tokenizer and draw of its own
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir()) and quantize.REPORT in files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.build_env
def test_a_failure_leaves_the_output_as_it_was(stage, tmp_path, monkeypatch):
    output = tmp_path / "out"
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "rank0.safetensors").write_text("left by a run that was killed")
    job = Quantization(stage.model("llama"), output, "full_prec")
    quantize.quantize(job, notify=lambda line: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    before = {path.name: path.read_bytes() for path in output.iterdir()}

    def fail(*arguments, **options):
        (Path(options["export_dir"]) / "rank0.safetensors").write_text("half")
        raise NotImplementedError("no such layer")

    import modelopt.torch.export

    monkeypatch.setattr(modelopt.torch.export, "export_tensorrt_llm_checkpoint", fail)
    with pytest.raises(EngineFailed, match="ModelOpt could not export this model: NotImplementedError: no such layer"):
        quantize.quantize(job, overwrite=True, notify=lambda line: None)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


@pytest.mark.build_env
def test_a_checkpoint_that_reads_back_wrong_never_appears(stage, tmp_path, monkeypatch):
    """The exporter's own config.json has no word about biases: exported without it, their tensors have no place."""
    monkeypatch.setattr(exporters, "complete_config", lambda exported, *_: exported)
    job = Quantization(stage.model("llama_bias"), tmp_path / "out", "full_prec")
    with pytest.raises(trtllm_checkpoint.BadCheckpoint, match="bias.*, for which config.json leaves no place"):
        quantize.quantize(job, notify=lambda line: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.build_env
def test_ids_outside_the_vocabulary_and_a_missing_gpu_are_refused(stage, tmp_path):
    import torch

    job = Quantization(stage.model("llama"), tmp_path / "out", "fp8")
    with pytest.raises(InvalidArgument, match="token id 1024 is outside the model's vocabulary of 1024"):
        quantize.quantize(job, TokenBlocks(np.full((1, 4), 1024), 1), notify=lambda line: None)
    if not torch.cuda.is_available():
        with pytest.raises(InvalidArgument, match="device: must be auto or cpu, because torch finds no GPU"):
            quantize.quantize(replace(job, device="cuda"), BLOCKS, notify=lambda line: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.build_env
def test_the_command_calibrates_on_texts_and_reports_as_json(stage, tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text(
        "\n".join(json.dumps({"text": "some words " * 30}) for _ in range(9))
    )
    arguments = [
        "--model_dir", stage.model("llama"), "--output_dir", tmp_path / "out", "--qformat", "fp8", "--calib_size", 3,
        "--kv_cache_dtype", "fp8", "--calib_dataset", tmp_path / "texts", "--calib_max_seq_length", 64, "--tp_size", 2,
    ]  # fmt: skip
    assert quantize.main([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report == json.loads((tmp_path / "out" / quantize.REPORT).read_text())
    calibrated = report["calibration"]
    assert (calibrated["sequences"], calibrated["tokens_per_sequence"]) == (3, 64)
    assert report["versions"]["modelopt"] == "0.37.0"
    for line in (
        "[1/4] calibrate on 3 sequences of 64 tokens",
        "pass 1: 3/3 batches",
        "[4/4] export 2 rank(s)",
        "done in",
    ):
        assert line in err
    trtllm_checkpoint.read(tmp_path / "out")
