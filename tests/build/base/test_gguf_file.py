"""Every type the library reads gives the weights of the checkpoint it was made from; damage is one sentence."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st

from build.base.gguf_file import from_pairs, open_gguf, read_index, write_index
from build.base.json_fields import CheckpointError
from tests.fakes import checkpoints, gguf_models

LLAMA = checkpoints.CONFIGS["llama_gqa"]
WIDE = LLAMA | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mha_tied", "qwen2", "qwen3"])
def test_an_f32_file_holds_the_checkpoint_it_was_made_from(name, tmp_path):
    config = checkpoints.CONFIGS[name]
    opened = open_gguf(gguf_models.write(tmp_path / "m.gguf", config))
    expected = checkpoints.tensors(config)
    assert opened.tensors.keys() == expected.keys()
    for tensor, values in expected.items():
        assert np.array_equal(opened.tensors[tensor].f32(), values), tensor


@pytest.mark.parametrize("kind", gguf_models.WRITABLE)
def test_a_written_type_gives_what_the_library_makes_of_it(kind, tmp_path):
    opened = open_gguf(gguf_models.write(tmp_path / "m.gguf", LLAMA, kind))
    name = "model.layers.1.mlp.down_proj.weight"
    dtype = GGMLQuantizationType[kind]
    expected = dequantize(quantize(checkpoints.tensors(LLAMA)[name], dtype), dtype)
    assert np.array_equal(opened.tensors[name].f32(), expected)
    assert opened.tensors[name].dtype == (kind if kind in ("BF16", "F16") else "F32")
    raw = opened.tensors[name].raw()
    if kind == "BF16":
        assert np.array_equal((raw.astype(np.uint32) << 16).view(np.float32), expected)
    else:
        assert np.array_equal(raw.astype(np.float32), expected)


@pytest.mark.parametrize("kind", gguf_models.SUPER_BLOCKS)
def test_a_type_that_is_only_read_is_read_row_by_row_as_whole(kind, tmp_path):
    opened = open_gguf(gguf_models.write(tmp_path / "m.gguf", WIDE, kind))
    tensor = opened.tensors["model.embed_tokens.weight"]
    assert tensor.kind == kind and tensor.f32().shape == (331, 256)
    assert np.array_equal(tensor.f32()[:3], tensor._rows(3)) and np.isfinite(tensor.f32()).all()


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([(), (3,)]))
def test_turning_rows_back_undoes_the_converter(heads, half, columns):
    values = np.arange(heads * 2 * half * (columns[0] if columns else 1), dtype=np.float32)
    values = values.reshape(heads * 2 * half, *columns)
    assert np.array_equal(from_pairs(gguf_models.to_pairs(values, heads), heads), values)


def test_the_index_stands_for_the_file(tmp_path):
    opened = open_gguf(gguf_models.write(tmp_path / "m.gguf", LLAMA, "Q8_0"))
    write_index(tmp_path, opened)
    assert read_index(tmp_path) == opened.tensors


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.9, 0.9999])
def test_a_truncated_file_is_one_sentence(share, tmp_path):
    path = gguf_models.write(tmp_path / "m.gguf", LLAMA)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"model: .*m\.gguf is truncated, damaged or no GGUF file: "):
        open_gguf(path)


@given(st.integers(0, 40), st.integers(0, 255))
def test_a_damaged_header_is_one_sentence_or_harmless(tmp_path_factory, at, byte):
    folder = tmp_path_factory.getbasetemp()
    if not (folder / "whole.gguf").exists():
        gguf_models.write(folder / "whole.gguf", LLAMA | {"num_hidden_layers": 1})
    data = bytearray((folder / "whole.gguf").read_bytes())
    data[at] = byte
    (folder / "damaged.gguf").write_bytes(data)
    try:
        open_gguf(folder / "damaged.gguf")
    except CheckpointError as error:
        assert "\n" not in str(error) and "damaged.gguf" in str(error)


def test_a_tensor_of_another_kind_of_model_is_named(tmp_path):
    experts = {"blk.0.ffn_gate_inp.weight": np.ones((4, 64), np.float32)}
    path = gguf_models.write(tmp_path / "m.gguf", LLAMA, tensors=checkpoints.tensors(LLAMA) | experts)
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_gate_inp\.weight has no place in a dense Llama"):
        open_gguf(path)


def test_a_type_without_a_dequantiser_is_named(tmp_path, monkeypatch):
    path = gguf_models.write(tmp_path / "m.gguf", LLAMA)

    def cannot(data, qtype):
        raise NotImplementedError(f"for {qtype.name}")

    monkeypatch.setattr("gguf.quants.dequantize", cannot)
    with pytest.raises(CheckpointError, match=r"is stored as F32, which cannot be dequantised: for F32"):
        open_gguf(path)


def test_rows_that_heads_cannot_share_are_refused(tmp_path):
    path = gguf_models.write(tmp_path / "m.gguf", LLAMA, metadata={"llama.attention.head_count": 3})
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight has 64 rows, which 3 heads cannot share"):
        open_gguf(path)
