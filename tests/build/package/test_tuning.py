"""Which run-time setting of several is served."""

import pytest

from build.package import tuning
from build.package.tuning import Measured
from build.recipe import recipe as recipes
from tests.build.recipe.test_choice import TABLE

OWN = {"KV_CACHE_PRECISION": "u8"}


def recipe(**changes):
    return recipes.parse(TABLE | {"precision": "int8"} | changes, "tiny.toml")


def measured(step_s, read_s=0.1):
    return Measured(OWN, {streams: [9.0, step_s, 9.0] for streams in tuning.STREAMS}, [read_s, 9.0])


def test_tokens_per_second_count_the_prompts_and_the_answers():
    speeds = measured(step_s=0.01, read_s=0.512).tokens_per_s()  # a prompt token takes 1 ms
    assert speeds[1] == pytest.approx(64 / (0.128 + 0.64)) and speeds[8] == pytest.approx(8 * 64 / (8 * 0.128 + 0.64))


def test_only_what_is_clearly_faster_is_tried_before_the_plugins_own():
    own, much, little, slower = measured(0.02), measured(0.01), measured(0.0199), measured(0.03)
    assert [id(each) for each in tuning.ranked([own, slower, little, much])] == [id(much), id(own)]
    decodes, reads = measured(0.019, read_s=0.2), measured(0.0201, read_s=0.01)
    assert tuning.ranked([own, decodes, reads])[0] is reads  # at 32 streams prompts take most of the time


def test_engines_that_leave_no_choice_or_are_small_or_large_are_not_measured(tmp_path):
    for made, parameters in (
        (recipe(), tuning.LEAST_PARAMETERS - 1),
        (recipe(), tuning.MOST_PARAMETERS + 1),
        (recipe(precision="bf16", kv_cache_precision="u8"), 10**8),
        (recipe(kv_cache_precision="f32"), 10**8),
    ):
        (found,) = tuning.measure(tmp_path, made, parameters, lambda line: None)
        assert not found.steps_s and found.properties["KV_CACHE_PRECISION"] == made.kv_cache_precision


@pytest.mark.slow
def test_settings_are_measured_in_turn_and_the_plugins_own_is_last(tiny_engine, monkeypatch):
    lines = []
    monkeypatch.setattr(tuning, "WORTH", 0.0)  # every other setting is worth it
    found = tuning.measure(tiny_engine, recipe(), tuning.LEAST_PARAMETERS, lines.append)
    assert "measuring 2 run-time settings" in lines[0] and lines[-1].endswith(found[0].words())
    assert [dict(each.properties) for each in found] == [OWN | tuning.SETTINGS[0], OWN]
    assert list(found[0].steps_s) == [1, 8] and len(found[0].steps_s[8]) == tuning.ROUNDS * tuning.STEPS
    assert found[0].record()["tokens_per_s"]["8"] > 0 and found[1].words() == "the plugin's own"
