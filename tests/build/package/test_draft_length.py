"""How many draft tokens an engine verifies at most."""

import dataclasses

import pytest

from build.base import shape
from build.package import draft_length
from build.recipe import recipe as recipes
from contract import manifest as manifests
from tests.build.recipe.test_choice import TABLE

ARCH = shape.find(TABLE["model"]).architecture
LOOKUP = {"mode": "prompt_lookup", "max_draft_len": 8, "ngram_size": 3}


def recipe(**drafting):
    return recipes.parse(TABLE | {"precision": "int8", "speculative_decoding": drafting}, "tiny.toml")


def test_the_longer_one_is_chosen_where_its_steps_take_hardly_longer():
    assert draft_length.chosen({3: 17.0, 8: 20.9}) == 8
    assert draft_length.chosen({3: 20.8, 8: 39.3}) == 3


def test_nothing_is_measured_where_there_is_no_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_length, "LEAST_PARAMETERS", 0)
    short = recipe(**LOOKUP | {"max_draft_len": 3})
    plain = recipes.parse(TABLE | {"precision": "int8"}, "tiny.toml")
    for made in (short, plain):
        assert draft_length.measure(tmp_path, made, {}, ARCH, print) is None
    monkeypatch.setattr(draft_length, "MOST_PARAMETERS", ARCH.num_parameters() - 1)
    assert draft_length.measure(tmp_path, recipe(**LOOKUP), {}, ARCH, print) is None


@pytest.mark.slow
def test_steps_of_an_engine_are_timed_and_its_manifest_has_the_choice(tiny_engine, monkeypatch):
    monkeypatch.setattr(draft_length, "LEAST_PARAMETERS", 0)
    told = []
    properties = manifests.load(tiny_engine).properties
    found = draft_length.measure(tiny_engine, recipe(**LOOKUP), properties, ARCH, told.append)
    assert found["chosen"] in (3, 8) and min(found["step_ms"].values()) > 0 and set(found["step_ms"]) == {"3", "8"}
    assert f": {found['chosen']} at most" in told[0]


def test_an_engine_drafts_what_was_chosen_for_it(tiny_engine):
    engine = manifests.load(tiny_engine)
    drafting = dataclasses.replace(engine, recipe={**engine.recipe, "speculative_decoding": LOOKUP}, evaluation=None)
    assert engine.draft_tokens == 0 and drafting.draft_tokens == 8
    chosen = dataclasses.replace(drafting, evaluation={"draft_length": {"chosen": 3, "step_ms": {}}})
    assert chosen.draft_tokens == 3
