import re
from dataclasses import replace

import gpu_recipes
import pytest
from gpu_recipes import LLAMA_70B, QWEN_7B, case
from hypothesis import HealthCheck, given, settings

from build.base import shape as shapes
from build.recipe import recipe as recipes
from build.recipe import schema, verdict
from build.recipe.case import Case, Severity
from contract.toml_table import tomllib


def alternative(rule: str, **changes: object) -> str:
    return next(finding.instead for finding in verdict.judge(case(**changes)) if finding.rule == rule)


def applied(drawn: Case, instead: str) -> Case:
    """The case after the change an alternative describes, read from its text alone."""
    recipe = drawn.recipe
    for part in re.split(r", (?=without |[a-z_.]+ = )", instead.split(" (as build/")[0]):
        if part.startswith("without "):
            table, _, key = part.removeprefix("without ").strip("[]").partition(".")
            if not key and table in ("group_size", "calibration", "revision"):
                default = {"group_size": 128, "calibration": schema.Calibration(), "revision": None}[table]
                left = tuple(given for given in recipe.given if given != table)
                recipe = replace(recipe, **{table: default, "given": left})
                continue
            if table == "speculative_decoding" and key:
                recipe = replace(recipe, speculative_decoding=replace(recipe.speculative_decoding, **{key: None}))
                continue
            left = {k: v for k, v in getattr(recipe, table).items() if k != key} if key else {}
            recipe = replace(recipe, **{table: None if table == "speculative_decoding" else left})
            continue
        key, value = part.split(" = ")
        read = tomllib.loads(f"value = {value}")["value"]
        table, _, inner = key.partition(".")
        if inner:
            recipe = replace(recipe, **{table: replace(getattr(recipe, table), **{inner: read})})
        elif key == "gpu":
            recipe = replace(recipe, gpu=read, sm=recipes.hardware.find(read).sm)
        else:
            recipe = replace(recipe, **{key: read})
    return Case(recipe, drawn.shape)


def test_int4_awq_with_an_fp8_kv_cache_is_told_to_leave_the_kv_cache():
    said = alternative("R1", precision="int4_awq")
    assert said == 'kv_cache_precision = "auto" (as build/recipes/llama-3.1-8b-int4-awq-hopper.toml, limits aside)'
    assert alternative("R1", precision="int8_wo") == 'kv_cache_precision = "auto"'


def test_fp8_on_ampere_is_told_what_ampere_is_best_at():
    assert alternative("H1", gpu="a100").startswith('precision = "int4_awq", kv_cache_precision = "auto"')


def test_int4_awq_on_sm_100_is_told_to_take_fp8():
    said = alternative("R4", gpu="b200", precision="int4_awq", kv_cache_precision="auto")
    assert said.startswith('precision = "fp8", kv_cache_precision = "fp8"')


def test_a_shipped_recipe_is_named_where_it_is_the_answer():
    said = alternative("H1", gpu="a100", max_seq_len=2048)
    assert "(as build/recipes/llama-3.1-8b-int4-awq-ampere.toml, limits aside)" in said


def test_a_recipe_is_named_as_the_alternative_only_if_it_is(monkeypatch):
    right = gpu_recipes.make("shipped", precision="int4_awq", kv_cache_precision="auto")
    given = {"precision": "int4_awq", "kv_cache_precision": "fp8"}
    for changes, named in (
        ({}, " (as build/recipes/shipped.toml)"),
        ({"max_seq_len": 2048}, " (as build/recipes/shipped.toml, limits aside)"),
        ({"build": {"tokens_per_block": 64}}, ""),
        ({"max_beam_width": 2}, ""),
        ({"prefix_reuse": False}, ""),
        ({"image": "another"}, ""),
    ):
        shipped = (replace(right, **changes),)
        monkeypatch.setattr(verdict, "_shipped", lambda there=shipped: there)
        assert alternative("R1", **given) == f'kv_cache_precision = "auto"{named}'


def test_too_large_a_model_is_told_what_fits_a_smaller_format_before_more_cards():
    assert alternative("M1", model=LLAMA_70B, gpu="l40s") == 'precision = "int4_awq", kv_cache_precision = "auto"'
    assert alternative("M1", model=LLAMA_70B, gpu="l4") == "tp = 4"


def test_heads_that_do_not_divide_are_told_a_number_that_does():
    assert alternative("S2", model=QWEN_7B, tp=8) == "tp = 4"


def test_two_limits_over_are_answered_together():
    spec = {"mode": "eagle", "max_draft_len": 300}
    said = alternative("R16", max_batch_size=600, speculative_decoding=spec)
    assert said == "max_batch_size = 512, speculative_decoding.max_draft_len = 256"


def test_an_option_is_dropped_before_anything_dearer():
    assert alternative("R17", build={"streamingllm": "enable"}).startswith("without build.streamingllm")


def test_findings_come_with_refusals_first_and_are_one_sentence():
    found = verdict.judge(case(gpu="a100", max_seq_len=None, precision="int4_awq"))
    order = [list(Severity).index(finding.severity) for finding in found]
    assert order == sorted(order) and order[0] == 0
    refusal = found[0]
    assert (
        refusal.rule == "R11" and refusal.message == f"{refusal.reason}; nearest recipe that works: {refusal.instead}"
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(gpu_recipes.tables())
def test_every_refusal_has_an_alternative_and_every_one_works_when_it_is_typed_in(written):
    recipe = recipes.parse(written, "drawn.toml")
    drawn = Case(recipe, shapes.find(recipe.model))
    for finding in verdict.judge(drawn):
        assert finding.instead or finding.severity is not Severity.REFUSE, finding.message
        if finding.instead:
            after = verdict.check(applied(drawn, finding.instead))
            assert finding.rule not in {f.rule for f in after}
            assert not verdict.refused(tuple(after))
