"""An encoder's engine is built whole from a folder, compared with its checkpoint, and not built again."""

import json

import numpy as np
import pytest

from build.package import encoder
from build.recipe import recipe as recipes
from contract import manifest
from contract.encoder import Encoder
from contract.errors import EngineFailed, InvalidArgument
from tests.fakes import checkpoints, gguf_models
from tests.fakes import tiny_encoders as tiny

pytestmark = pytest.mark.slow  # builds engines


def build(tmp_path, folder, kind="embedding", accept=None, **keys):
    lines = []
    recipe = recipes.encoder({"kind": kind, "model": str(folder)} | keys, "tiny.toml")
    return encoder.build(recipe, tmp_path / "engines", lines.append, accept), lines


@pytest.fixture
def bert(tmp_path):
    return tiny.write_sentence_files(tiny.write_bert(tmp_path / "bert", tiny.BERT), prompts={"query": "q: "})


def test_the_manifest_says_what_was_built(tmp_path, bert):
    folder, lines = build(tmp_path, bert)
    found = manifest.verify(folder)
    assert (found.kind, found.architecture, found.max_seq_len, found.precision) == (
        "embedding",
        "BertModel",
        32,
        "fp32",
    )
    assert Encoder.from_manifest(found.encoder) == Encoder("mean", True, 32, (), {"query": "q: "})
    assert found.evaluation["least_cosine"] > 0.99999 and found.evaluation["passed"]
    assert set(found.files) >= {"openvino_model.xml", "openvino_model.bin", "tokenizer.json", "config.json"}
    assert "least cosine" in lines[-1]


def test_what_is_up_to_date_is_not_built_again_and_another_pooling_is_another_engine(tmp_path, bert):
    build(tmp_path, bert)
    _, lines = build(tmp_path, bert)
    assert lines == [f"{tmp_path}/engines/tiny is up to date (fp32 from {bert})"]
    tiny.write_sentence_files(bert, "cls_token")
    folder, _ = build(tmp_path, bert)
    assert manifest.load(folder).encoder["pooling"] == "cls"


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_narrow_weights_are_compared_with_a_wider_bound(tmp_path, bert, precision):
    folder, _ = build(tmp_path, bert, precision=precision)
    assert manifest.load(folder).evaluation["bound"] == encoder.LEAST_COSINE[precision]


def test_the_f32_graph_that_is_compared_with_lies_where_the_next_build_removes_it(tmp_path, bert, monkeypatch):
    compared, seen = encoder._compared, []

    def watched(recipe, checkpoint, tokens, folder, exact_folder):
        seen.extend([exact_folder.parent == folder, exact_folder.is_dir()])
        return compared(recipe, checkpoint, tokens, folder, exact_folder)

    monkeypatch.setattr(encoder, "_compared", watched)
    folder, _ = build(tmp_path, bert, precision="int8")
    assert seen == [True, True] and not any(path.is_dir() for path in folder.iterdir())


def test_vectors_beyond_the_bound_are_not_published_unless_accepted(tmp_path, bert, monkeypatch):
    monkeypatch.setitem(encoder.LEAST_COSINE, "int8", 1.1)
    with pytest.raises(EngineFailed, match="least cosine .* must be at least 1.1 with int8 weights"):
        build(tmp_path, bert, precision="int8")
    assert not (tmp_path / "engines" / "tiny").exists()
    folder, _ = build(tmp_path, bert, precision="int8", accept="a test")
    assert manifest.load(folder).evaluation["accepted"] == "a test"


@pytest.mark.parametrize("write", [lambda f: tiny.write_bert(f, tiny.RERANKER), tiny.write_qwen3])
def test_rerankers_are_compared_by_their_scores(tmp_path, write):
    folder, _ = build(tmp_path, write(tmp_path / "model"), "rerank")
    found = manifest.load(folder)
    assert found.kind == "rerank" and found.evaluation["largest_error"] < 1e-4


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_seq_len": 65}, "max_seq_len: must be 2 to 64"),
        ({"instruction": "x"}, "instruction: has no effect on BertModel"),
        ({"matryoshka_dimensions": [8, 64]}, "matryoshka_dimensions: must be at most the model's dimensions, 32"),
    ],
)
def test_keys_that_do_not_fit_the_model_are_refused_by_name(tmp_path, bert, keys, words):
    with pytest.raises(InvalidArgument, match=words):
        build(tmp_path, bert, **keys)


def test_a_rerankers_recipe_has_no_pooling(tmp_path):
    with pytest.raises(InvalidArgument, match="pooling: has no effect on a reranker"):
        build(tmp_path, tiny.write_bert(tmp_path / "m", tiny.RERANKER), "rerank", pooling="cls")


def test_a_recipe_is_made_for_a_given_model_and_found_again_by_its_engine(tmp_path, bert, monkeypatch):
    monkeypatch.setattr(encoder.layout, "ENGINES", tmp_path / "engines")
    recipe = encoder.recipe_for("tiny", str(bert), "int8")
    assert (recipe.name, recipe.kind, recipe.precision) == ("tiny", "embedding", "int8")
    encoder.build(recipe, tmp_path / "engines", lambda line: None)
    assert encoder.recipe_for("tiny", None, None) == recipe
    assert encoder.recipe_for("tiny", None, "exact").precision == "fp32"
    assert "kind embedding, BertModel, int8 weights, texts of up to 32 tokens" in encoder.plan(recipe)
    assert encoder.recipe_for("demo", None, None) is None
    assert encoder.recipe_for("other", str(tiny.write_qwen3(tmp_path / "qwen")), None) is None
    with pytest.raises(recipes.RecipeError, match="precision: must be one of fp32, bf16, fp16, int8, got 'int4'"):
        encoder.recipe_for("tiny", str(bert), "int4")


def test_qwen3s_embedding_is_that_of_the_last_token(tmp_path):
    model = tiny.write_sentence_files(tiny.write_qwen3(tmp_path / "qwen", bare=True), "lasttoken")
    folder, _ = build(tmp_path, model, matryoshka_dimensions=[16, 32])
    found = Encoder.from_manifest(json.loads((folder / "manifest.json").read_text())["encoder"])
    assert (found.pooling, found.matryoshka_dimensions, found.dimensions) == ("last", (16, 32), 64)
    assert np.isfinite(manifest.load(folder).evaluation["least_cosine"])


def test_an_encoder_is_built_from_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setattr(encoder.layout, "FETCHED", tmp_path / "cache")
    file = gguf_models.write(tmp_path / "model.gguf", checkpoints.CONFIGS["qwen3"])
    folder, _ = build(tmp_path, file)
    assert manifest.verify(folder).encoder["pooling"] == "last"


def test_every_source_that_shapes_an_encoder_is_in_its_version(sources_imported):
    left_out = {
        # Paths, hashes, processes, and readers whose output is compared as the checkpoint's or the wheel's files.
        *(f"base/{name}.py" for name in ("digest", "fetch", "gguf_folder", "gguf_tokenizer", "json_fields", "layout")),
        *(f"base/{name}.py" for name in ("program", "wheel")),
        "package/engine_folder.py",
        # The recipe, which is in the manifest and compared, and what recipes of other kinds import.
        *(f"base/{name}.py" for name in ("hardware", "option_table")),
        *(f"recipe/{name}.py" for name in ("provenance", "recipe", "schema")),
        "model/lora_adapter.py",
        "model/lora_graph.py",  # which a decoder's graph names for its type
    }
    assert sources_imported(["package/encoder.py"]) == set(encoder._BUILDER) | left_out
