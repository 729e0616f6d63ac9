"""Families beyond the torch-free builder: exported, compressed, and equal to transformers."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from build.base import architecture, layout
from build.base.checkpoint import open_checkpoint
from build.base.json_fields import BadField, CheckpointError
from build.package import engine_folder
from build.quantise import environment, export
from contract.errors import Unavailable
from tests.fakes import checkpoints

BASE = checkpoints.SIZES | {
    "max_position_embeddings": 256,
    "bos_token_id": checkpoints.BOS,
    "eos_token_id": checkpoints.EOS,
    "pad_token_id": checkpoints.EOS,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
FAMILIES = {
    "gemma2": {"head_dim": 16, "sliding_window": 64},
    "gemma3_text": {"head_dim": 16, "sliding_window": 64},
    "phi3": {},
    "granite": {},
    "olmo2": {},
    "smollm3": {},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "qwen3_moe": {"head_dim": 16, "decoder_sparse_step": 1} | EXPERTS,
}


def write(folder: Path, family: str) -> Path:
    """A random model of a family as transformers saves it, in bf16, with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **BASE, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    checkpoints.write_tokenizer(folder)
    return folder


@pytest.mark.build_env
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compressed_export_predicts_what_transformers_predicts(family, tmp_path):
    import openvino as ov
    import torch
    from transformers import AutoModelForCausalLM

    from build.model import exported_graph
    from build.model.openvino_engine import OpenVinoEngine
    from build.model.weights import Weights

    opened = open_checkpoint(write(tmp_path / "model", family), any_family=True)
    assert opened.architecture.exported and opened.architecture.num_parameters() > 50_000
    assert "f32 logits differ from transformers' by" in export.export(tmp_path / "model", tmp_path / "graph")
    stored, graph = exported_graph.matrices(dataclasses.replace(opened, graph=tmp_path / "graph"))
    (tmp_path / "engine").mkdir()
    weights = Weights(stored, "bf16", 128)
    ov.save_model(graph.with_weights(weights.matrix), str(tmp_path / "engine" / export.GRAPH), compress_to_fp16=False)
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    ids = np.random.default_rng(1).integers(0, 256, (1, 150))  # beyond the sliding windows, and in two pieces
    found = next(OpenVinoEngine(tmp_path / "engine", exact, 331).logits(ids))
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = original(torch.tensor(ids)).logits[0].numpy()
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.build_env
def test_the_same_command_builds_and_the_manifest_says_how(tmp_path):
    serving = layout.ROOT / ".venv" / "bin" / "python"
    if not serving.exists():
        pytest.skip("needs the serving environment: make setup")
    folder = write(tmp_path / "gemma", "gemma2")
    command = [str(serving), "-m", "build.engine", "--engine", "g", "--model", str(folder)]
    variables = os.environ | {"TRIDENT_ENGINES_DIR": str(tmp_path / "engines")}
    done = subprocess.run(command, cwd=layout.ROOT, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Gemma2ForCausalLM: exported by optimum-intel in .venv-build" in done.stdout
    manifest = json.loads((tmp_path / "engines" / "g" / "manifest.json").read_text())
    assert manifest["architecture"] == "Gemma2ForCausalLM" and manifest["evaluation"]["verdict"]["passed"]
    assert manifest["versions"]["graph"].startswith("optimum-intel==")
    again = subprocess.run(command, cwd=layout.ROOT, env=variables, capture_output=True, text=True, timeout=60)
    assert "is up to date" in again.stdout and "exported" not in again.stdout


def opened(folder: Path, name: str = "GemmaForCausalLM", **changes: object):
    checkpoints.write(folder, checkpoints.CONFIGS["llama_gqa"] | {"architectures": [name]} | changes)
    return open_checkpoint(folder, any_family=True)


@pytest.mark.build_env
def test_what_optimum_does_not_know_is_one_sentence(tmp_path):
    found = opened(tmp_path / "m", "StrangeForCausalLM", model_type="strange")
    with pytest.raises(CheckpointError, match=r"optimum-intel cannot export StrangeForCausalLM: .*strange"):
        with export.exported(found, tmp_path / "g", lambda line: None):
            pass


def test_another_family_is_opened_only_where_it_is_asked_for(tmp_path):
    found = opened(tmp_path / "m", "SmolLM3ForCausalLM")
    assert found.architecture.exported and found.architecture.name == "SmolLM3ForCausalLM"
    assert found.architecture.num_parameters() == sum(np.prod(tensor.shape) for tensor in found.tensors.values())
    with pytest.raises(CheckpointError, match="architectures must be one of|architectures is SmolLM3ForCausalLM"):
        open_checkpoint(tmp_path / "m")
    for name in ("BertModel", "WhisperForConditionalGeneration"):
        with pytest.raises(BadField):
            architecture.from_config(checkpoints.CONFIGS["qwen2"] | {"architectures": [name]}, any_family=True)


def test_names_of_older_families_are_read():
    old = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 32, "n_head": 4, "n_layer": 3}
    found = architecture.from_config(old | {"n_positions": 64}, any_family=True)
    assert (found.hidden_size, found.num_heads, found.num_layers, found.max_positions) == (32, 4, 3, 64)
    neo = {
        "architectures": ["GPTNeoForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "num_heads": 4,
        "num_layers": 3,
    }
    found = architecture.from_config(neo | {"intermediate_size": None}, any_family=True)
    assert (found.intermediate_size, found.num_heads, found.num_layers) == (128, 4, 3)
    mpt = {"architectures": ["MptForCausalLM"], "vocab_size": 100, "d_model": 32, "n_heads": 2, "n_layers": 5}
    found = architecture.from_config(mpt | {"max_seq_len": 64}, any_family=True)
    assert (found.hidden_size, found.num_heads, found.num_layers, found.max_positions) == (32, 2, 5, 64)
    with pytest.raises(BadField, match="hidden_size"):
        architecture.from_config({"architectures": ["GPT2LMHeadModel"], "vocab_size": 100}, any_family=True)
    with pytest.raises(BadField, match="already quantised"):
        architecture.from_config(old | {"quantization_config": {"quant_method": "gptq"}}, any_family=True)


@pytest.mark.parametrize(
    ("keys", "kv_heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({}, 4),
    ],
)
def test_the_kv_heads_of_falcon_and_starcoder_are_read(keys, kv_heads):
    falcon = {"architectures": ["FalconForCausalLM"], "vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4}
    found = architecture.from_config(falcon | {"num_hidden_layers": 2} | keys, any_family=True)
    assert found.num_kv_heads == kv_heads


def test_without_the_build_environment_the_remedy_is_named(tmp_path, monkeypatch):
    found = opened(tmp_path / "m")
    monkeypatch.setattr(environment, "BUILD_PYTHON", tmp_path / "nowhere")
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="make setup-build"):
        with export.exported(found, tmp_path / "g", lambda line: None):
            pass


def test_an_exporter_that_fails_or_writes_nothing_is_one_sentence(tmp_path, monkeypatch):
    python = tmp_path / "bin" / "env" / "python"
    python.parent.mkdir(parents=True)
    monkeypatch.setattr(environment, "BUILD_PYTHON", python)
    found = opened(tmp_path / "m")
    for script, message in (
        ("echo Traceback >&2; echo 'cannot export: no such family' >&2; exit 1", "GemmaForCausalLM: no such family$"),
        ("exit 0", "no graph was written"),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        with pytest.raises(CheckpointError, match=message):
            with export.exported(found, tmp_path / "g", lambda line: None):
                pass
    assert not list(tmp_path.glob("g*"))
    python.write_text(f'#!/bin/sh\ntouch "$6/{export.GRAPH}"; echo exported\n')
    with export.exported(found, tmp_path / "g", lambda line: None) as graph:
        with engine_folder.only_builder(tmp_path / "g", lambda line: None):
            assert not graph.exists(), "the next build of the engine removes what a killed one left"
