"""The draft model of an engine: what is refused, what it costs, and what the manifest says of it."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import pytest
from hypothesis import given
from hypothesis import strategies as st

from build import engine
from build.base import hardware
from build.base.checkpoint import open_checkpoint
from build.package import draft as drafts
from build.recipe import memory
from build.recipe import recipe as recipes
from build.recipe.verdict import Refused
from contract.errors import InvalidArgument, TridentError
from contract.manifest import load

LLAMA = checkpoints.CONFIGS["llama_gqa"]
TABLE = {
    "kind": "cpu",
    "precision": "fp32",
    "kv_cache_precision": "f32",
    "max_batch_size": 8,
    "max_num_tokens": 64,
    "max_seq_len": 256,
    "kv_cache_tokens": 2048,
}


@pytest.fixture
def models(tmp_path):
    """Three checkpoints: the model, one with other weights and the same vocabulary, one with fewer ids."""
    checkpoints.write(tmp_path / "model", LLAMA)
    checkpoints.write(tmp_path / "other", LLAMA, seed=7)
    checkpoints.write(tmp_path / "fewer", checkpoints.CONFIGS["llama_mha_tied"])
    return tmp_path


def recipe(models: Path, draft: str, **changes: object) -> recipes.Recipe:
    table = {"mode": "draft_model", "draft": str(models / draft)} | changes
    return recipes.parse(TABLE | {"model": str(models / "model"), "speculative_decoding": table}, Path("tiny.toml"))


def test_a_vocabulary_of_another_size_is_refused(models):
    made, refused = open_checkpoint(models / "model"), open_checkpoint(models / "fewer")
    with pytest.raises(InvalidArgument, match=r"speculative_decoding.draft: must have .* 331 ids, got 300"):
        drafts.check(made, refused)
    drafts.check(made, open_checkpoint(models / "other"))


def test_a_token_that_is_another_one_is_refused(models):
    path = models / "other" / "tokenizer.json"
    table = json.loads(path.read_text())
    table["model"]["vocab"]["é"] = table["model"]["vocab"].pop("a")
    path.write_text(json.dumps(table))
    with pytest.raises(InvalidArgument, match="got another token at id"):
        drafts.check(open_checkpoint(models / "model"), open_checkpoint(models / "other"))


def test_a_draft_that_is_not_there_is_named_by_its_key(models):
    with pytest.raises(InvalidArgument, match=r"speculative_decoding.draft: there is no folder or .gguf file .*gone"):
        engine.opened_draft(recipe(models, "gone"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"draft": " "}, r"speculative_decoding.draft: must be a non-empty string"),
        ({"max_draft_len": 17}, r"speculative_decoding.max_draft_len: must be an integer from 1 to 16, got 17"),
        ({"draft_precision": "fp8"}, r"speculative_decoding.draft_precision: must be one of bf16, .*got 'fp8'"),
        ({"ngram_size": 3}, r"speculative_decoding.ngram_size: does not apply to mode 'draft_model'"),
        ({"mode": "medusa"}, r"speculative_decoding.mode: must be one of prompt_lookup, draft_model, got 'medusa'"),
    ],
)
def test_a_wrong_value_is_named(models, changes, problem):
    with pytest.raises(TridentError, match=problem):
        table = {"mode": "draft_model", "draft": str(models / "other")} | changes
        recipes.parse(TABLE | {"model": "m", "speculative_decoding": table}, Path("tiny.toml"))


def test_adapters_exclude_a_draft_model(models):
    table = {"mode": "draft_model", "draft": str(models / "other")}
    adapters = [{"name": "a", "path": "somewhere"}]
    with pytest.raises(TridentError, match="adapters: must be left out with speculative_decoding.mode 'draft_model'"):
        recipes.parse(TABLE | {"model": "m", "speculative_decoding": table, "adapters": adapters}, Path("tiny.toml"))


@given(st.floats(0, 1), st.floats(0, 2), st.integers(1, 16))
def test_no_draft_gains_more_than_its_length(agreement, cost, length):
    gain = drafts.gain(agreement, cost, length)
    assert 0 < gain <= length + 1
    assert drafts.gain(0, cost, length) <= 1 and drafts.gain(1, 0, length) == length + 1
    assert drafts.gain(agreement, cost + 0.1, length) < gain


def test_the_memory_counts_the_draft_model(models):
    made, arch = recipe(models, "other"), open_checkpoint(models / "model").architecture
    without, both = memory.footprint(made, arch), memory.footprint(made, arch, arch)
    own = memory.weight_bytes(made.changed(precision="int8"), arch)
    assert both.buffer_bytes - without.buffer_bytes > own > 0


@pytest.mark.slow
def test_a_draft_model_is_built_into_the_engine_and_recorded(models):
    lines: list[str] = []
    made = recipe(models, "model")
    folder = engine.build(made, models / "engines", lines.append, accept="too small to gain")
    built = load(folder)
    assert any("the draft model agrees with the engine on" in line for line in lines)
    assert built.versions["draft"] == open_checkpoint(models / "model").sha256()
    assert {"draft/openvino_model.bin", "draft/openvino_tokenizer.xml", "openvino_tokenizer.xml"} <= set(built.files)
    scores = built.evaluation["draft"]
    assert scores["top1_agreement"] > 0.8 and scores["cost"] > 0
    assert scores["override"] == (None if scores["expected_gain"] > 1 else "too small to gain")
    engine.build(made, models / "engines", lines.append)
    assert "is up to date" in lines[-1]


@pytest.mark.slow
def test_a_draft_model_that_gains_nothing_is_refused(models):
    made = recipe(models, "other", draft_precision="fp32")
    with pytest.raises(
        InvalidArgument, match=r"speculative_decoding.draft: must be a model whose drafts gain; .* agrees"
    ):
        engine.build(made, models / "engines", lambda line: None)
    assert not (models / "engines" / "tiny").exists()


def test_a_draft_model_that_does_not_fit_this_machine_is_refused_before_the_build(models, monkeypatch):
    made, arch = recipe(models, "other"), open_checkpoint(models / "model").architecture
    fits_without = memory.footprint(made, arch).total_bytes
    assert memory.footprint(made, arch, arch).total_bytes > fits_without
    monkeypatch.setattr(hardware, "memory_bytes", lambda: fits_without)
    with pytest.raises(Refused, match="tiny is refused by C5"):
        engine.build(made, models / "engines", lambda line: None)
