import json
import struct

import numpy as np
import pytest

from benchmarks import gguf_checkpoint
from tests.fakes import checkpoints


def test_a_llama_becomes_a_file_with_llama_cpps_names_and_the_same_values(tmp_path):
    gguf = pytest.importorskip("gguf")
    values = checkpoints.write(tmp_path / "model", checkpoints.CONFIGS["llama_gqa"], dtype="F32")
    gguf_checkpoint.write(tmp_path / "model", tmp_path / "m.gguf", "f32")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert len(stored) == len(values) and {"token_embd.weight", "output.weight", "output_norm.weight"} <= stored.keys()
    np.testing.assert_array_equal(stored["blk.1.ffn_down.weight"], values["model.layers.1.mlp.down_proj.weight"])
    keys = gguf_checkpoint.interleaved(values["model.layers.0.self_attn.k_proj.weight"], 2)
    np.testing.assert_array_equal(stored["blk.0.attn_k.weight"], keys)


def test_eight_bit_weights_are_blocks_of_llama_cpps_and_norms_stay(tmp_path):
    gguf = pytest.importorskip("gguf")
    values = checkpoints.write(tmp_path / "model", checkpoints.CONFIGS["llama_gqa"], dtype="F32")
    gguf_checkpoint.write(tmp_path / "model", tmp_path / "m.gguf", "int8")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    down, norm = stored["blk.1.ffn_down.weight"], stored["output_norm.weight"]
    assert down.tensor_type.name == "Q8_0" and norm.tensor_type.name == "F32"
    weight = values["model.layers.1.mlp.down_proj.weight"]
    widened = gguf.quants.dequantize(down.data, down.tensor_type)
    np.testing.assert_allclose(widened, weight, atol=abs(weight).max() / 100)


def test_a_tokenizer_that_splits_off_every_digit_is_smollms():
    digits = {"type": "Digits", "individual_digits": True}
    assert gguf_checkpoint.splits_digits({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits]}})
    assert not gguf_checkpoint.splits_digits({"pre_tokenizer": {"type": "ByteLevel"}})
    assert not gguf_checkpoint.splits_digits({})


@pytest.mark.parametrize(
    ("config", "decoder", "named"),
    [
        ({"architectures": ["QwenForCausalLM"]}, "ByteLevel", "architectures: must be LlamaForCausalLM"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, "ByteLevel", "rope_scaling: must be null, got"),
        ({"rope_scaling": None}, "Metaspace", "decoder of tokenizer.json: must be ByteLevel, got"),
    ],
)
def test_what_the_file_cannot_say_is_refused(config, decoder, named):
    llama, byte_level = {"architectures": ["LlamaForCausalLM"]}, {"decoder": {"type": "ByteLevel"}}
    gguf_checkpoint.check(llama, byte_level)
    with pytest.raises(ValueError, match=f"^{named}"):
        gguf_checkpoint.check(llama | config, {"decoder": {"type": decoder}})


def test_a_tensor_that_a_llama_does_not_have_is_refused(tmp_path):
    pytest.importorskip("gguf")
    checkpoints.write(tmp_path / "model", checkpoints.CONFIGS["llama_gqa"] | {"attention_bias": True}, dtype="F32")
    with pytest.raises(ValueError, match="^tensor: must be .*'model.layers.0.self_attn.q_proj.bias'"):
        gguf_checkpoint.write(tmp_path / "model", tmp_path / "m.gguf", "f32")


def test_interleaving_makes_both_ways_to_rotate_one():
    """Rotating halves, as Hugging Face does, is rotating neighbours of the interleaved rows, as llama.cpp does."""
    rng, heads, size, hidden = np.random.default_rng(0), 3, 8, 5
    weight, angles = rng.normal(size=(heads * size, hidden)), rng.normal(size=size // 2)
    x = rng.normal(size=hidden)
    cos, sin = np.cos(angles), np.sin(angles)

    halves = (weight @ x).reshape(heads, 2, size // 2)
    rotated = np.stack([halves[:, 0] * cos - halves[:, 1] * sin, halves[:, 1] * cos + halves[:, 0] * sin], axis=1)

    pairs = (gguf_checkpoint.interleaved(weight, heads) @ x).reshape(heads, size // 2, 2)
    left, right = pairs[..., 0], pairs[..., 1]
    neighbours = np.stack([left * cos - right * sin, right * cos + left * sin], axis=-1)
    assert np.allclose(np.sort(neighbours.ravel()), np.sort(rotated.ravel()))
    assert np.allclose(neighbours[..., 0], rotated[:, 0]) and np.allclose(neighbours[..., 1], rotated[:, 1])


def test_weights_are_read_from_every_type_they_may_have(tmp_path):
    values = np.array([[1.0, -2.5], [0.0, 3.0]], np.float32)
    raws = {
        "F32": values.tobytes(),
        "F16": values.astype(np.float16).tobytes(),
        "BF16": (values.view(np.uint32) >> 16).astype("<u2").tobytes(),
    }
    for kind, raw in raws.items():
        header = json.dumps({"w": {"dtype": kind, "shape": [2, 2], "data_offsets": [0, len(raw)]}}).encode()
        (tmp_path / kind).write_bytes(struct.pack("<Q", len(header)) + header + raw)
        ((name, read),) = gguf_checkpoint.tensors(tmp_path / kind)
        assert name == "w" and np.array_equal(read, values)
    header = json.dumps({"w": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "I8").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(ValueError, match="'w': must be F32, F16 or BF16, got I8"):
        list(gguf_checkpoint.tensors(tmp_path / "I8"))


def test_a_tokenizers_tokens_come_by_id_and_merges_in_either_form():
    tokenizer = {
        "model": {"vocab": {"a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
        "added_tokens": [{"id": 0, "content": "<|end|>", "special": True}],
    }
    tokens, special, merges = gguf_checkpoint.vocabulary(tokenizer, 5)
    assert tokens == ["<|end|>", "a", "b", "ab", "[unused4]"]
    assert special == [True, False, False, False, False] and merges == ["a b"]


def test_whether_a_text_begins_with_a_special_token_is_read_off_the_tokenizer():
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]}
    plain = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}]}
    assert gguf_checkpoint.adds_begin({"post_processor": template})
    assert gguf_checkpoint.adds_begin({"post_processor": {"type": "Sequence", "processors": [template]}})
    assert not gguf_checkpoint.adds_begin({"post_processor": plain})
    assert not gguf_checkpoint.adds_begin({"post_processor": None})
