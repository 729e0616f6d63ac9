"""Which run-time setting of several is served."""

import dataclasses

import pytest

from build.base import hardware, shape
from build.package import tuning
from build.package.tuning import Measured
from build.recipe import memory
from build.recipe import recipe as recipes
from contract import manifest as manifests
from tests.build.recipe.test_choice import TABLE

OWN = {"KV_CACHE_PRECISION": "u8"}


ARCH = shape.find(TABLE["model"]).architecture


def recipe(**changes):
    return recipes.parse(TABLE | {"precision": "int8"} | changes, "tiny.toml")


def measured(step_s, read_s=0.1, kv="u8"):
    return Measured(
        {"KV_CACHE_PRECISION": kv}, {streams: [9.0, step_s, 9.0] for streams in tuning.STREAMS}, [read_s, 9.0]
    )


def test_tokens_per_second_count_the_prompts_and_the_answers():
    speeds = measured(step_s=0.01, read_s=0.512).tokens_per_s()  # a prompt token takes 1 ms
    assert speeds[1] == pytest.approx(128 / (0.256 + 1.28)) and speeds[8] == pytest.approx(8 * 128 / (8 * 0.256 + 1.28))


def test_only_what_is_clearly_faster_is_tried_before_the_plugins_own():
    own, much, little, slower = measured(0.02), measured(0.01), measured(0.0199), measured(0.03)
    assert [id(each) for each in tuning.ranked([own, slower, little, much])] == [id(much), id(own)]
    decodes, reads = measured(0.019, read_s=0.2), measured(0.0201, read_s=0.01)
    assert tuning.ranked([own, decodes, reads])[0] is reads  # at 32 streams prompts take most of the time


def test_a_wider_kv_cache_is_worth_its_memory_only_where_it_is_clearly_faster():
    own, much, wider, widest = measured(0.02), measured(0.01), measured(0.0099, kv="f16"), measured(0.008, kv="f16")
    assert tuning.ranked([own, much, wider]) == [much, wider, own]
    assert tuning.ranked([own, much, widest])[0] is widest
    assert tuning.ranked([own, measured(0.019, kv="f16")])[0] is not own  # beside the first alone, WORTH once


def test_engines_that_leave_no_choice_or_are_small_or_large_are_not_measured(tmp_path, monkeypatch):
    for made, least, most in (
        (recipe(), ARCH.num_parameters() + 1, 10**10),
        (recipe(), 0, ARCH.num_parameters() - 1),
        (recipe(precision="bf16", kv_cache_precision="u8"), 0, 10**10),
        (recipe(kv_cache_precision="f32"), 0, 10**10),
        (recipe(precision="fp32"), 0, 10**10),
    ):
        monkeypatch.setattr(tuning, "LEAST_PARAMETERS", least)
        monkeypatch.setattr(tuning, "MOST_PARAMETERS", most)
        (found,) = tuning.measure(tmp_path, made, ARCH, lambda line: None)
        assert not found.steps_s and found.properties["KV_CACHE_PRECISION"] == made.kv_cache_precision


def test_a_wider_kv_cache_is_measured_where_none_is_given_and_half_the_memory_holds_the_engine(monkeypatch):
    assert [each["KV_CACHE_PRECISION"] for each in tuning.properties(recipe(), ARCH)] == ["u8", "u8", "f16", "f16"]
    assert [each["KV_CACHE_PRECISION"] for each in tuning.properties(recipe(precision="bf16"), ARCH)] == ["u8", "f16"]
    assert len(tuning.properties(recipe(kv_cache_precision="u8"), ARCH)) == 2
    wider = memory.footprint(recipe(kv_cache_precision="f16"), ARCH).total_bytes
    for here, count in ((2 * wider, 4), (2 * wider - 1, 2), (None, 2)):
        monkeypatch.setattr(hardware, "memory_bytes", lambda here=here: here)
        assert len(tuning.properties(recipe(), ARCH)) == count


@pytest.mark.slow
def test_settings_are_measured_in_turn_and_the_plugins_own_is_last(tiny_engine, monkeypatch):
    lines = []
    monkeypatch.setattr(tuning, "WORTH", 0.0001)  # every other setting is worth it
    monkeypatch.setattr(tuning, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(
        tuning, "properties", lambda *of: [OWN, OWN | tuning.SETTINGS[0] | {"KV_CACHE_PRECISION": "f16"}]
    )
    found = tuning.measure(tiny_engine, recipe(), ARCH, lines.append)
    assert "measuring 2 run-time settings" in lines[0] and lines[-1].endswith(found[0].words())
    assert [each.properties["KV_CACHE_PRECISION"] for each in found] == ["f16", "u8"]
    assert list(found[0].steps_s) == [1, 8] and len(found[0].steps_s[8]) == tuning.ROUNDS * tuning.STEPS
    assert found[0].record()["tokens_per_s"]["8"] > 0 and found[1].words() == "the plugin's own, u8 KV"


LOOKUP = {"mode": "prompt_lookup", "max_draft_len": 8, "ngram_size": 3}


def drafting(**changes):
    return recipe(speculative_decoding=LOOKUP | changes)


def test_the_longer_one_is_chosen_where_its_steps_take_hardly_longer():
    assert tuning.longer_if_cheap({3: 17.0, 8: 20.9}) == 8
    assert tuning.longer_if_cheap({3: 20.8, 8: 39.3}) == 3


def test_nothing_is_measured_where_there_is_no_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "LEAST_PARAMETERS", 0)
    short = drafting(max_draft_len=3)
    plain = recipe()
    for made in (short, plain):
        assert tuning.draft_length(tmp_path, made, {}, ARCH, print) is None
    monkeypatch.setattr(tuning, "MOST_PARAMETERS", ARCH.num_parameters() - 1)
    assert tuning.draft_length(tmp_path, drafting(), {}, ARCH, print) is None


@pytest.mark.slow
def test_steps_of_an_engine_are_timed_and_its_manifest_has_the_choice(tiny_engine, monkeypatch):
    monkeypatch.setattr(tuning, "LEAST_PARAMETERS", 0)
    told = []
    properties = manifests.load(tiny_engine).properties
    found = tuning.draft_length(tiny_engine, drafting(), properties, ARCH, told.append)
    assert found["chosen"] in (3, 8) and min(found["step_ms"].values()) > 0 and set(found["step_ms"]) == {"3", "8"}
    assert f": {found['chosen']} at most" in told[0]


@pytest.mark.slow
def test_an_engine_drafts_what_was_chosen_for_it(tiny_engine):
    engine = manifests.load(tiny_engine)
    lookup = dataclasses.replace(engine, recipe={**engine.recipe, "speculative_decoding": LOOKUP}, evaluation=None)
    assert engine.draft_tokens == 0 and lookup.draft_tokens == 8
    chosen = dataclasses.replace(lookup, evaluation={"draft_length": {"chosen": 3, "step_ms": {}}})
    assert chosen.draft_tokens == 3
