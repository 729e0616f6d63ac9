"""A GGUF file opens as a checkpoint, and computes what transformers computes with the same file."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from build.base import gguf_folder, layout
from build.base import rope as rotary
from build.base.checkpoint import CheckpointError, open_checkpoint
from build.model import decoder
from tests.fakes import checkpoints, gguf_models, numpy_llama

LLAMA = checkpoints.CONFIGS["llama_gqa"]
WIDE = {"hidden_size": 256, "intermediate_size": 256}
IDS = np.random.default_rng(3).integers(0, 256, 24)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(layout, "FETCHED", tmp_path / "cache")
    return tmp_path / "cache"


def opened(path: Path, *arguments: object, **options: object):
    return open_checkpoint(gguf_folder.unpacked(gguf_models.write(path, *arguments, **options)))


def logits(checkpoint) -> np.ndarray:
    return next(decoder.from_checkpoint(checkpoint).logits(IDS[None]))


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mha_tied", "qwen2", "qwen3", "llama_linear_rope_wide_heads"])
def test_it_has_the_architecture_and_the_logits_of_the_checkpoint_it_was_made_from(name, tmp_path):
    config = checkpoints.CONFIGS[name]
    scaling = {"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 2.0}
    made = opened(tmp_path / "m.gguf", config, metadata=scaling if config.get("rope_scaling") else None)
    checkpoints.write(tmp_path / "own", config, dtype="F32")
    own = open_checkpoint(tmp_path / "own")
    strip = {"rope": dataclasses.replace(made.architecture.rope, scaling={}), "window": None}
    theirs = {"rope": dataclasses.replace(own.architecture.rope, scaling={}), "window": None}
    assert dataclasses.replace(made.architecture, **strip) == dataclasses.replace(own.architecture, **theirs)
    assert np.abs(logits(made) - numpy_llama.logits(config, checkpoints.tensors(config), list(IDS))).max() < 2e-4
    assert made.eos_token_ids == (checkpoints.EOS,) and made.bos_token_id == checkpoints.BOS


def test_llama_3s_table_of_factors_becomes_its_rope_scaling(tmp_path):
    block = gguf_folder.LLAMA3_ROPE | {"factor": 8.0}
    config = LLAMA | {"head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    plain = rotary.Rope(500000.0, "default", {})
    scaled, _ = rotary.inverse_frequencies(rotary.Rope(500000.0, "llama3", block), 64)
    factors = rotary.inverse_frequencies(plain, 64)[0] / scaled
    weights = checkpoints.tensors(config)
    made = opened(tmp_path / "m.gguf", config, tensors=weights | {"rope_freqs.weight": factors})
    assert (made.architecture.rope.kind, made.architecture.rope.need("factor")) == ("llama3", pytest.approx(8.0))
    found, _ = rotary.inverse_frequencies(made.architecture.rope, 64)
    assert np.allclose(found, scaled, rtol=1e-5)
    ones = opened(tmp_path / "1.gguf", config, tensors=weights | {"rope_freqs.weight": np.ones(32, np.float32)})
    assert ones.architecture.rope.kind == "default"
    odd = weights | {"rope_freqs.weight": np.linspace(1, 3, 32, dtype=np.float32)}
    with pytest.raises(CheckpointError, match="is not Llama 3's scaling"):
        opened(tmp_path / "2.gguf", config, tensors=odd)


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"ARCH.rope.scaling.factor": 2.0}, "linear"),
        ({"ARCH.rope.scale_linear": 2.0}, "linear"),
        ({"ARCH.rope.scaling.factor": 1.0}, "default"),
        ({"ARCH.rope.scaling.type": "none", "ARCH.rope.scaling.factor": 2.0}, "default"),
    ],
)
def test_a_scaling_without_a_type_is_linear(metadata, kind, tmp_path):
    found = opened(tmp_path / "m.gguf", LLAMA, metadata=metadata).architecture.rope
    assert found.kind == kind and (kind == "default" or found.need("factor") == 2.0)


def test_it_is_written_once_and_again_when_the_file_changes(tmp_path):
    path = gguf_models.write(tmp_path / "m.gguf", LLAMA)
    folder = gguf_folder.unpacked(path)
    written = (folder / "config.json").stat().st_mtime_ns
    assert gguf_folder.unpacked(path) == folder and (folder / "config.json").stat().st_mtime_ns == written
    gguf_models.write(path, LLAMA, "Q8_0")
    assert gguf_folder.unpacked(path) != folder
    assert not list(layout.FETCHED.rglob("*.partial-*"))


def test_chat_template_and_end_ids_come_from_the_metadata(tmp_path):
    path = gguf_models.write(tmp_path / "m.gguf", LLAMA, metadata={"tokenizer.ggml.eot_token_id": 65})
    folder = gguf_folder.unpacked(path)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [256, 65]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["chat_template"].startswith("{% for m") and settings["eos_token"] == "<|end|>"


@pytest.mark.parametrize(("control", "ends"), [(True, [2, 330]), (False, [2])])
def test_a_control_token_that_ends_turns_is_an_end_id_that_the_metadata_may_leave_out(control, ends, tmp_path):
    keys = gguf_models.spm_keys(LLAMA["vocab_size"])
    keys["tokenizer.ggml.tokens"][330] = "<|im_end|>"
    keys["tokenizer.ggml.token_type"][330] = gguf_models.CONTROL if control else gguf_models.NORMAL
    folder = gguf_folder.unpacked(gguf_models.write(tmp_path / "m.gguf", LLAMA, metadata=keys))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ends


def test_a_folder_of_one_gguf_file_is_that_file(tmp_path):
    path = gguf_models.write(tmp_path / "m.gguf", LLAMA)
    assert gguf_folder.of(tmp_path) == gguf_folder.unpacked(path)
    (tmp_path / "config.json").write_text("{}")
    assert gguf_folder.of(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture must be one of llama, qwen2, qwen3, got 'mamba'"),
        ({"ARCH.expert_count": 8}, "llama.expert_count is 8; such models are not supported"),
        ({"ARCH.block_count": None}, "block_count must be a positive integer, got None"),
        ({"ARCH.attention.head_count_kv": [2, 1]}, "head_count_kv must be a positive integer"),
        ({"ARCH.rope.dimension_count": 8}, "rope.dimension_count is 8; supported is 16"),
        ({"ARCH.rope.scaling.type": "longrope"}, "must be none, linear or yarn, got 'longrope'"),
        ({"split.count": 3}, "one of several parts; join them first"),
        ({"ARCH.context_length": "long"}, "context_length must be a positive integer"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(metadata, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "m.gguf", LLAMA, metadata=metadata)
    assert not layout.FETCHED.exists() or not list(layout.FETCHED.rglob("config.json"))


def test_a_missing_tensor_and_one_of_another_shape_are_named(tmp_path):
    weights = checkpoints.tensors(LLAMA)
    lacking = {name: value for name, value in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(CheckpointError, match=r"the weights lack model\.layers\.1\.mlp\.up_proj\.weight \[96, 64\]"):
        opened(tmp_path / "1.gguf", LLAMA, tensors=lacking)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[3\]; config\.json says \[64\]"):
        opened(tmp_path / "2.gguf", LLAMA, tensors=weights | {"model.norm.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match="the weights lack token_embd.weight"):
        opened(tmp_path / "3.gguf", LLAMA, tensors={"model.norm.weight": np.ones(64, np.float32)})


KINDS = [("llama_gqa", kind) for kind in gguf_models.WRITABLE] + [("qwen2", "Q8_0"), ("qwen2", "Q5_1")]
KINDS += [("llama_gqa", kind) for kind in ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS")]
GREEDY = ("Q8_0", "Q4_1", "Q5_1", "Q6_K")
PROMPTS = [list(np.random.default_rng(n).integers(0, 256, 2 + 3 * n)) for n in range(13)]


@pytest.mark.build_env
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_greedy_ids_and_logits_are_those_of_transformers_on_the_same_file(name, kind, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    config = checkpoints.CONFIGS[name] | (WIDE if kind in gguf_models.SUPER_BLOCKS else {})
    path = gguf_models.write(tmp_path / "m.gguf", config, kind)
    ours = decoder.from_checkpoint(open_checkpoint(gguf_folder.unpacked(path)))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    with torch.inference_mode():
        for prompt in PROMPTS[::4]:
            expected = theirs(torch.tensor([prompt])).logits[0].numpy()
            assert np.abs(next(ours.logits(np.array([prompt]))) - expected).max() < 2e-5 * max(
                np.abs(expected).max(), 1
            )
        for prompt in PROMPTS if kind in GREEDY else ():
            spoken, given = [int(i) for i in prompt], torch.tensor([prompt])
            for _ in range(6):
                spoken.append(int(next(ours.logits(np.array([spoken])))[-1].argmax()))
            options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            ids = theirs.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=6, **options)
            assert spoken == ids[0].tolist()


TEXTS = ["hello world", "hello  world   the", "", " ", "aaa aaaa", "héllo 你好\n\tx", "<s>hello</s> the", "x  ", "🎉"]


@pytest.mark.build_env
def test_a_sentence_piece_vocabulary_encodes_and_decodes_as_transformers_converts_it(tmp_path):
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    path = gguf_models.write(tmp_path / "m.gguf", LLAMA, tokenizer="llama")
    ours = Tokenizer.from_file(str(gguf_folder.unpacked(path) / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
