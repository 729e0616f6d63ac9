"""The stages of a build: their order, commands and estimates."""

import json

from gpu_recipes import case
from program_parser import parse

from build.base import layout
from build.base import shape as shapes
from build.package import plan as plans
from build.recipe import recipe as recipes


def plan_of(**changes: object) -> plans.Plan:
    drawn = case(**changes)
    return plans.make(drawn.recipe, drawn.shape)


def recipe_table(name: str) -> dict:
    return recipes.tomllib.loads((layout.RECIPES / f"{name}.toml").read_text())


def test_the_stages_come_in_order_and_their_commands_are_accepted_by_the_programs():
    plan = plan_of()
    assert [s.name for s in plan.stages] == ["image", "fetch", "quantise", "verify", "compile", "package"]
    by_name = {stage.name: stage for stage in plan.stages}
    assert parse(list(by_name["compile"].argv)).max_batch_size == 64
    assert parse(list(by_name["quantise"].argv)).qformat == "fp8"
    assert by_name["quantise"].needs_gpu and by_name["compile"].needs_gpu and not by_name["package"].needs_gpu
    assert by_name["quantise"].instead[:3] == (".venv-build/bin/python", "-m", "build.quantise.quantize")


def test_a_local_model_is_not_fetched_and_a_plain_one_is_converted(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024}
    config |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = plan_of(model=str(tmp_path), precision="bf16", kv_cache_precision="auto")
    assert [s.name for s in plan.stages] == ["image", "convert", "verify", "compile", "package"]
    assert str(tmp_path) in plan.stages[1].argv


def test_the_llm_api_has_no_engine_to_compile():
    given_llmapi = recipes.parse({**recipe_table("qwen3-8b-fp8-llmapi")}, "x.toml")
    plan = plans.make(given_llmapi, shapes.find(given_llmapi.model))
    assert [s.name for s in plan.stages] == ["image", "fetch", "quantise", "verify", "package"]


def test_calibrating_a_cpu_engine_is_in_the_estimate():
    table = recipe_table("demo-int4")
    calibrated, nearest = (recipes.parse(t, "x.toml") for t in (table, table | {"calibration": {"size": 1}}))
    slow, fast = (plans.make(recipe, shapes.find(recipe.model)).stages[0] for recipe in (calibrated, nearest))
    assert slow.seconds > fast.seconds and "(8192 tokens + 256)" in slow.basis


def test_every_setting_that_may_be_tried_and_the_quality_gate_are_in_the_estimate():
    table = recipe_table("smollm2")
    one = recipes.parse(table, "x.toml")
    del table["kv_cache_precision"]
    several = recipes.parse(table | {"precision": "auto"}, "x.toml")
    fixed, tried = (plans.make(recipe, shapes.find(recipe.model)).stages[0] for recipe in (one, several))
    assert 12 < fixed.seconds < 30 and tried.seconds > 2 * fixed.seconds
    assert "4 settings at most" in tried.basis and "the quality gate's 2048 tokens" in fixed.basis
