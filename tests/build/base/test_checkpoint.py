"""A folder is opened only when an engine can be made from it; otherwise one sentence says what is wrong."""

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from build.base import shape
from build.base.checkpoint import CheckpointError, open_checkpoint
from build.base.rope import inverse_frequencies
from tests.fakes import checkpoints

LLAMA = checkpoints.CONFIGS["llama_gqa"]


@pytest.fixture
def folder(tmp_path):
    checkpoints.write(tmp_path / "tiny", LLAMA)
    return tmp_path / "tiny"


def edit(path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.field == "model" and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
@pytest.mark.parametrize(("dtype", "shards"), [("BF16", 1), ("F16", 3), ("F32", 2)])
def test_every_tensor_is_found_with_its_exact_values(tmp_path, name, dtype, shards):
    stored = checkpoints.write(tmp_path, checkpoints.CONFIGS[name], dtype=dtype, shards=shards)
    opened = open_checkpoint(tmp_path)
    assert opened.tensors.keys() == stored.keys()
    for tensor in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        np.testing.assert_array_equal(opened.tensors[tensor].f32(), stored[tensor])


def test_token_ids_come_from_generation_config_then_from_config(folder):
    edit(folder / "generation_config.json", eos_token_id=[7, 256, 7], pad_token_id=-1)
    opened = open_checkpoint(folder)
    assert (opened.eos_token_ids, opened.bos_token_id, opened.pad_token_id) == ((7, 256), 257, None)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).eos_token_ids == (256,)


def test_null_in_generation_config_is_no_end_id(folder):
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=7)
    assert open_checkpoint(folder).eos_token_ids == (7, 256)


@pytest.mark.parametrize(
    ("token", "ends"),
    [("<|begin|>", (256, 257)), ({"content": "<|begin|>"}, (256, 257)), ("absent", (256,)), (None, (256,))],
)
def test_the_tokenizers_end_token_ends_answers_too(folder, token, ends):
    edit(folder / "tokenizer_config.json", eos_token=token)
    assert open_checkpoint(folder).eos_token_ids == ends
    (folder / "tokenizer_config.json").unlink()
    assert open_checkpoint(folder).eos_token_ids == (256,)


def test_a_lone_file_of_another_name_is_accepted(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert open_checkpoint(folder).tensors["model.norm.weight"].path.name == "weights.safetensors"


def test_a_stored_copy_of_a_tied_head_and_old_rotary_buffers_are_ignored(tmp_path):
    config = checkpoints.CONFIGS["llama_mha_tied"]
    checkpoints.write(tmp_path, config)
    values = checkpoints.tensors(config)
    values["lm_head.weight"] = values["model.embed_tokens.weight"]
    values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    checkpoints.write_weights(tmp_path, values)
    assert "lm_head.weight" not in open_checkpoint(tmp_path).tensors


def test_the_hash_follows_weights_config_and_tokenizer_but_not_the_place(folder, tmp_path):
    first = open_checkpoint(folder).sha256()
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert open_checkpoint(moved).sha256() == first
    (moved / "README.md").write_text("not part of an engine")
    assert open_checkpoint(moved).sha256() == first
    seen = {first}
    checkpoints.write_weights(moved, checkpoints.tensors(LLAMA, seed=1))
    seen.add(open_checkpoint(moved).sha256())
    edit(moved / "config.json", rope_theta=20_000.0)
    seen.add(open_checkpoint(moved).sha256())
    edit(moved / "tokenizer_config.json", eos_token="<|begin|>")
    seen.add(open_checkpoint(moved).sha256())
    assert len(seen) == 4


def test_a_folder_that_is_no_checkpoint_is_said_to_be_none(tmp_path):
    assert "has no config.json; is it a Hugging Face checkpoint?" in refusal(tmp_path)


def test_a_broken_config_is_named(folder):
    (folder / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "config.json is not a JSON object" in refusal(folder)


def test_an_unsupported_architecture_names_the_supported_ones(folder):
    edit(folder / "config.json", architectures=["MixtralForCausalLM"])
    assert "architectures is MixtralForCausalLM; supported are LlamaForCausalLM" in refusal(folder)


def test_missing_weights_are_told_apart(folder):
    (folder / "model.safetensors").unlink()
    assert "has no model.safetensors and no model.safetensors.index.json" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "PyTorch weights only; convert them to safetensors first" in refusal(folder)


def test_a_missing_shard_is_named(tmp_path):
    checkpoints.write(tmp_path, LLAMA, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing; model.safetensors.index.json names it" in refusal(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": 3}, ["a"]])
def test_an_index_without_a_weight_map_is_refused(tmp_path, weight_map):
    checkpoints.write(tmp_path, LLAMA, shards=2)
    edit(tmp_path / "model.safetensors.index.json", weight_map=weight_map)
    assert "has no weight_map" in refusal(tmp_path)


def test_an_index_may_not_point_outside_the_folder(tmp_path):
    checkpoints.write(tmp_path / "tiny", LLAMA, shards=2)
    checkpoints.write_weights(tmp_path, {"x": np.ones(1, np.float32)})
    edit(tmp_path / "tiny" / "model.safetensors.index.json", weight_map={"x": "../model.safetensors"})
    assert "model.safetensors is missing" in refusal(tmp_path / "tiny")


def test_a_missing_tensor_is_named_with_its_shape(folder):
    values = checkpoints.tensors(LLAMA)
    del values["model.layers.1.mlp.up_proj.weight"]
    checkpoints.write_weights(folder, values)
    assert "the weights lack model.layers.1.mlp.up_proj.weight [96, 64]" in refusal(folder)


def test_a_wrong_shape_is_named_with_the_one_expected(folder):
    edit(folder / "config.json", vocab_size=332)
    assert "model.embed_tokens.weight is [331, 64]; config.json says [332, 64]" in refusal(folder)


def test_a_tensor_without_a_place_is_refused_because_it_would_change_the_model(folder):
    values = checkpoints.tensors(LLAMA) | {"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}
    checkpoints.write_weights(folder, values)
    assert "q_proj.bias has no place in LlamaForCausalLM as config.json has it" in refusal(folder)


def test_a_number_format_that_is_not_supported_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"I16" ', 1))
    assert "must be stored as one of BF16, F16, F32, got I16" in refusal(folder)


def test_a_truncated_weight_file_is_named(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert "model.safetensors is truncated" in refusal(folder)


def test_a_checkpoint_without_a_fast_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer.json; load it with transformers' AutoTokenizer" in refusal(folder)
    (folder / "tokenizer.model").write_bytes(b"")
    assert "has no tokenizer.json (only a SentencePiece tokenizer.model)" in refusal(folder)


def test_a_tokenizer_of_another_model_is_refused(folder):
    edit(folder / "tokenizer.json", model={"vocab": {"a": 0, "b": 331}})
    assert "tokenizer.json has ids up to 331; the model's vocab_size is 331" in refusal(folder)
    edit(folder / "tokenizer.json", model={"vocab": [["a", 0.0]] * 332})
    assert "tokenizer.json has ids up to 331" in refusal(folder)


@pytest.mark.parametrize("value", [331, "x", [3, None], True, -2])
def test_an_end_id_outside_the_vocabulary_is_refused(folder, value):
    edit(folder / "generation_config.json", eos_token_id=value)
    expected = f"generation_config.json: eos_token_id must be token ids below vocab_size 331, got {value!r}"
    assert expected in refusal(folder)


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", [["a"], "2", [2, None], True, 2.0, {}])
def test_a_token_id_in_config_that_generation_config_overrides_must_be_an_integer_too(folder, key, value):
    edit(folder / "generation_config.json", **{key: 7})
    edit(folder / "config.json", **{key: value})
    assert f"config.json: {key} must be token ids" in refusal(folder)


def test_an_overridden_id_beyond_the_vocabulary_does_no_harm(folder):
    edit(folder / "generation_config.json", pad_token_id=7)
    edit(folder / "config.json", pad_token_id=331)
    assert open_checkpoint(folder).pad_token_id == 7


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        ({"model": None}, "tokenizer.json: model must be an object"),
        ({"model": {"vocab": {"a": "b"}}}, "tokenizer.json: model.vocab: 'a' must have an id, got 'b'"),
        ({"model": {"vocab": {"a": -1}}}, "tokenizer.json: model.vocab: 'a' must have an id, got -1"),
        ({"model": {"vocab": 3}}, "tokenizer.json: model.vocab must be an object or a list, got 3"),
        ({"model": {"vocab": {}}}, "tokenizer.json: model.vocab is empty"),
    ],
)
def test_a_tokenizer_with_a_vocabulary_that_is_none_is_refused(folder, tokenizer, says):
    edit(folder / "tokenizer.json", **tokenizer)
    assert says in refusal(folder)


def test_a_folder_in_place_of_the_weights_is_named(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "model.safetensors is a folder; it must be a file" in refusal(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    checkpoints.write(tmp_path, LLAMA, shards=2)
    first, second = sorted(tmp_path.glob("model-*.safetensors"))
    second.write_bytes(first.read_bytes())
    assert "is stored twice, in model-00001-of-00002.safetensors and in model-00002-of-00002" in refusal(tmp_path)


def test_a_broken_weight_file_is_named_once(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert refusal(folder).count(str(folder)) == 1


def test_the_name_of_a_shard_may_be_anything(tmp_path):
    checkpoints.write(tmp_path, LLAMA, shards=2)
    for name in ("x" * 5000, "a\0b", "", ".", "..", "model-00001-of-00002.safetensors/"):
        edit(tmp_path / "model.safetensors.index.json", weight_map={"a": name})
        assert "model" in refusal(tmp_path)


# What files from the internet, edited by hand, may hold in place of a value.
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 700),
    st.floats(),
    st.sampled_from([1e-320, 1e308, 10**400, 1.0, 0, -1]),
    st.text(max_size=20),
    st.sampled_from(["yarn", "linear", "llama3", "default", "dynamic", "true", "64", "full_attention"]),
    st.lists(st.one_of(st.integers(), st.text(max_size=5), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.none()), max_size=3),
    st.fixed_dictionaries(
        {"rope_type": st.sampled_from(["yarn", "linear", "llama3", "default"])},
        optional={
            key: st.one_of(st.floats(), st.integers(-5, 600), st.none(), st.just("x"))
            for key in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale")
        }
        | {"original_max_position_embeddings": st.one_of(st.floats(), st.integers(-1, 600)), "rope_theta": st.floats()},
    ),
)
_FIELDS = {
    "config.json": (*LLAMA, "head_dim", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window")
    + (
        "layer_types",
        "quantization_config",
        "attention_bias",
        "mlp_bias",
        "partial_rotary_factor",
        "pad_token_id",
        "eos_token_id",
    ),
    "generation_config.json": ("eos_token_id", "bos_token_id", "pad_token_id"),
    "tokenizer.json": ("model", "added_tokens", "version"),
}


@st.composite
def _changes(draw) -> list[tuple[str, str, object]]:
    """Up to three (file, field, value)."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(_FIELDS)))
        found.append((name, draw(st.sampled_from(_FIELDS[name])), draw(_ODD)))
    return found


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    checkpoints.write(folder, checkpoints.CONFIGS["mistral_mqa"])
    return folder


@given(changes=_changes())
def test_whatever_the_fields_hold_it_is_opened_or_refused_in_one_sentence(pristine, changes):
    before = {name: (pristine / name).read_bytes() for name in _FIELDS}
    try:
        for name, key, value in changes:
            edit(pristine / name, **{key: value})
        opened = open_checkpoint(pristine)
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert np.isfinite(inverse_frequencies(opened.architecture.rope, opened.architecture.head_dim)[0]).all()
        shape.from_config("m", dict(opened.config), "here")  # what the plan reads is no more easily surprised
    finally:
        for name, content in before.items():
            (pristine / name).write_bytes(content)
