"""The settings that a CPU engine is tried with when none is given."""

import dataclasses
import itertools

import pytest

from build import engine
from build.base import layout, shape
from build.package import tuning
from build.quality.comparison import BeyondBudget
from build.recipe import choice, memory, schema
from build.recipe import recipe as recipes
from contract.errors import TridentError
from contract.manifest import load

TABLE = {
    "kind": "cpu",
    "model": "build/demo_model/checkpoint",
    "precision": "auto",
    "max_batch_size": 8,
    "max_num_tokens": 64,
    "max_seq_len": 256,
    "kv_cache_tokens": 2048,
}


def recipe(**changes: object) -> recipes.Recipe:
    return recipes.parse(TABLE | changes, "tiny.toml")


def settings(made: recipes.Recipe) -> tuple[str, str, str]:
    return made.precision, made.head_precision, made.kv_cache_precision


def test_a_given_precision_is_the_only_candidate():
    for precision in schema.PRECISIONS[schema.CPU]:
        made = recipe(precision=precision)
        assert choice.candidates(made) == (made,) and not made.automatic


def test_automatic_begins_with_the_smallest_and_ends_with_the_exact_setting():
    found = choice.candidates(recipe())
    assert settings(found[0]) == ("int8", "int8", "u8") and settings(found[-1]) == ("bf16", "int8", "f32")
    assert len({settings(one) for one in found}) == len(found) and all(one.automatic for one in found)
    arch = shape.find(TABLE["model"]).architecture
    sizes = [memory.weight_bytes(one, arch) + memory.kv_bytes_per_token(one, arch) for one in found]
    assert all(small <= large for small, large in itertools.pairwise(sizes))


def test_every_candidate_has_its_own_precisions_budget_unless_the_recipe_gives_one():
    assert [one.quality for one in choice.candidates(recipe())] == [
        recipes.DEFAULT_QUALITY[one.precision] for one in choice.candidates(recipe())
    ]
    own = choice.candidates(recipe(quality={"kl": 0.5}))
    assert {one.quality.kl for one in own} == {0.5}
    strict = recipes.DEFAULT_QUALITY["bf16"]  # given for every precision, although it is the default of one
    assert {one.quality for one in choice.candidates(recipe(quality=dataclasses.asdict(strict)))} == {strict}


@pytest.mark.parametrize("key", ["kv_cache_precision", "head_precision", "group_size"])
def test_what_automatic_chooses_is_not_given_beside_it(key):
    value = {"kv_cache_precision": "f32", "head_precision": "bf16", "group_size": 64}[key]
    with pytest.raises(recipes.RecipeError, match=f"{key}: does not go with precision 'auto'"):
        recipe(**{key: value})


def test_the_kv_cache_is_measured_unless_the_recipe_gives_it():
    for given in ({}, {"kv_cache_precision": "auto"}):
        made = recipe(precision="bf16", **given)
        assert made.kv_cache_measured and made.kv_cache_precision == "u8"
        assert choice.words(made) == "bf16 weights, u8 or f16 KV"
    assert [one.kv_cache_measured for one in choice.candidates(recipe())] == [True, True, True, False]
    adapted = {"adapters": [{"name": "a", "path": "here"}]}
    for given in ({"kv_cache_precision": "u8"}, {"precision": "fp32"}, adapted):
        assert not recipe(**({"precision": "bf16"} | given)).kv_cache_measured


def test_a_wider_head_is_refused_where_it_changes_nothing():
    with pytest.raises(recipes.RecipeError, match="head_precision: has no effect on bf16 weights"):
        recipe(precision="bf16", head_precision="bf16")
    assert "bf16 embedding" in choice.words(recipe(precision="int8", head_precision="bf16"))


@pytest.mark.slow
def test_the_first_that_passes_is_published_and_what_was_tried_before_is_said(tmp_path):
    said: list[str] = []
    strict = {"top1_agreement": 0.9999, "kl": 0.0001}
    made = recipe(quality=strict)
    engine.build(made, tmp_path, said.append)
    manifest = load(tmp_path / "tiny")
    assert (manifest.precision, manifest.kv_cache_precision) == ("bf16", "f32")
    record = manifest.evaluation["choice"]
    assert record["chosen"] == "bf16 weights, f32 KV" and len(record["tried_before"]) == len(choice.SETTINGS) - 1
    assert "KL divergence is" in record["tried_before"][0]["refused"]
    assert any("chose bf16 weights, f32 KV: the fastest of 4 settings that passes" in line for line in said)
    assert manifest.evaluation["text"]["python"]

    said.clear()
    engine.build(made, tmp_path, said.append)
    assert len(said) == 1 and "up to date" in said[0]
    said.clear()
    engine.build(recipe(precision="int8"), tmp_path, said.append)  # a given precision is honoured
    assert load(tmp_path / "tiny").precision == "int8"


@pytest.mark.slow
def test_where_none_passes_the_engine_that_was_there_stays(tmp_path):
    engine.build(recipe(), tmp_path, lambda line: None)
    before = load(tmp_path / "tiny")
    assert before.precision == "int8" and before.evaluation["choice"]["tried_before"] == []
    impossible = dataclasses.replace(
        recipe(), quality=recipes.QualityBudget(perplexity_ratio=0.5, top1_agreement=0.5, kl=1.0)
    )
    with pytest.raises(BeyondBudget, match="none of 4 settings passed; the last: engine tiny is not packaged"):
        engine.build(impossible, tmp_path, lambda line: None)
    assert load(tmp_path / "tiny") == before


@pytest.mark.slow
def test_a_given_model_is_built_automatically_and_later_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "ENGINES", tmp_path)
    made = engine.recipe_for("mine", TABLE["model"], None)
    assert made.automatic and settings(made) == ("int8", "int8", "u8")
    assert not engine.recipe_for("mine", TABLE["model"], "int8").automatic
    wider = {"KV_CACHE_PRECISION": "f16"}
    monkeypatch.setattr(tuning, "measure", lambda *of: [tuning.Measured(wider)])  # as measured where that is faster
    engine.build(made, tmp_path, lambda line: None)
    assert engine.recipe_for("mine", None, None) == made
    manifest, arch = load(tmp_path / "mine"), shape.find(TABLE["model"]).architecture
    assert (manifest.kv_cache_precision, manifest.properties) == ("f16", wider)
    assert manifest.memory_bytes == memory.footprint(made.changed(kv_cache_precision="f16"), arch).total_bytes
    said: list[str] = []
    engine.build(made, tmp_path, said.append)
    assert len(said) == 1 and "up to date (int8 weights, f16 KV" in said[0]


def test_exact_is_as_stored_with_f32_keys_and_values():
    assert settings(engine.recipe_for("mine", TABLE["model"], "exact")) == ("bf16", "int8", "f32")
    assert settings(engine.recipe_for("demo-int8", None, "exact")) == ("bf16", "int8", "f32")
    with pytest.raises(TridentError):
        engine.recipe_for("demo-fp8", None, "exact")
