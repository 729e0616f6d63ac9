import importlib.util
import json
import shlex
import subprocess
import sys

import gpu_recipes
import pytest
from gpu_recipes import LLAMA_70B, accepted, case, make
from hypothesis import given, settings
from program_parser import parse

from build.base import layout, option_table
from build.base import shape as shapes
from build.package import plan as plans
from build.recipe import commands, memory, schema, verdict
from build.recipe import recipe as recipes
from contract.errors import InvalidArgument

GPU_RECIPES = [r for path in sorted(layout.RECIPES.glob("*.toml")) if (r := recipes.load(path)).kind != schema.CPU]


def plan_of(**changes: object) -> plans.Plan:
    drawn = case(**changes)
    return plans.make(drawn.recipe, drawn.shape)


@pytest.mark.parametrize("recipe", GPU_RECIPES, ids=lambda recipe: recipe.name)
def test_every_shipped_recipe_has_a_plan_without_a_warning(recipe):
    plan = plans.make(recipe, shapes.find(recipe.model))
    assert not plan.refused
    assert [f.message for f in plan.findings if f.severity.value == "warn"] == []
    text = plans.as_text(plan, verbose=True)
    assert recipe.image in text and "Memory per GPU" in text and "= max_seq_len" in text


def recipe_table(name: str) -> dict:
    return recipes.read(layout.RECIPES / f"{name}.toml")


def test_a_cpu_recipe_is_planned_without_a_gpu_or_an_image(tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 8192}
    config |= {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    recipe = recipes.parse(recipe_table("demo") | {"model": str(tmp_path)}, "demo.toml")
    plan = plans.make(recipe, shapes.find(recipe.model))
    assert [stage.name for stage in plan.stages] == ["compile"]
    assert commands.line(plan.stages[0].argv) == ".venv/bin/python -m build.engine --engine demo"
    assert not any(stage.needs_gpu for stage in plan.stages)
    assert "image" not in plans.as_text(plan) and "on the CPU" in plans.as_text(plan)
    assert "Memory of the process" in plans.as_text(plan, verbose=True)


def test_a_refused_recipe_has_no_stages():
    plan = plan_of(gpu="b200", precision="int4_awq", kv_cache_precision="auto")
    assert plan.refused and plan.stages == () and plan.footprint is None
    text = plans.as_text(plan)
    assert "refused R4: " in text and "nearest recipe that works" in text and "Stages" not in text


def test_limits_are_those_the_engine_will_have():
    plan = plan_of(precision="int4_awq", max_seq_len=256, max_batch_size=2)
    limits = plans.limits(plan.recipe)
    assert limits["max_num_tokens"] == 512 and limits["prefix_reuse"] is False and limits["chunked_context"] is False
    assert "prefix_reuse     no" in plans.as_text(plan, verbose=True)
    spec = {"mode": "eagle", "max_draft_len": 5}
    assert plans.limits(make(speculative_decoding=spec))["max_seq_len"] == 4096 + 5


def test_memory_and_concurrency_are_the_formulas():
    plan = plan_of(model=LLAMA_70B, tp=4, max_seq_len=8192, max_batch_size=100)
    foot = memory.footprint(plan.recipe, plan.shape.architecture)
    rows = {row["total_tokens"]: row for row in plans.concurrency(plan)}
    assert rows[8192]["fit_in_kv_pool"] == foot.pool_tokens // 32 // 256
    assert rows[256]["run_at_once"] == 100 < rows[256]["fit_in_kv_pool"]
    text = plans.as_text(plan, verbose=True)
    assert f"{foot.weight_bytes / memory.GIB:7.2f} GiB" in text
    assert "here 2 x 80 x 2 x 128 x 1 = 40960 bytes per token" in text


def test_drafts_take_their_tokens_of_a_step():
    spec = {"mode": "lookahead_decoding", "window_size": 7, "ngram_size": 7, "verification_set_size": 7}
    rows = plans.concurrency(plan_of(speculative_decoding=spec, max_num_tokens=4096))
    assert {row["run_at_once"] for row in rows} == {4096 // 84}


def test_the_verdict_stands_first_and_formulas_only_where_asked():
    text = plans.as_text(plan_of())
    assert text.splitlines()[1].startswith("  verdict    fits: ") and " of 79.1 GiB per GPU" in text.splitlines()[1]
    assert text.splitlines()[2].startswith("  at once    64 sequences of 256 tokens, ")
    assert text.splitlines()[3].startswith("  build      about ")
    assert "kv_pool =" not in text and "estimate:" not in text and len(text.splitlines()) < 40
    assert "kv_pool =" in plans.as_text(plan_of(), verbose=True)
    refused = plans.as_text(plan_of(gpu="b200", precision="int4_awq", kv_cache_precision="auto"))
    assert refused.splitlines()[1] == "  verdict    refused by 1 rule, see below"


@pytest.mark.parametrize("recipe", GPU_RECIPES, ids=lambda recipe: recipe.name)
def test_every_printed_command_starts_with_a_program_that_is_there(recipe):
    """What runs here names the environment that has what it needs; the rest runs in the image, through docker."""
    text = plans.as_text(plans.make(recipe, shapes.find(recipe.model)))
    printed = [shlex.split(line.partition("$ ")[2]) for line in text.splitlines() if "$ " in line]
    assert printed
    for argv in printed:
        if argv[0] == "docker":
            continue
        torch = argv[2] == "build.quantise.quantize"
        assert argv[:2] == [".venv-build/bin/python" if torch else ".venv/bin/python", "-m"]
        assert importlib.util.find_spec(argv[2]) is not None


def test_a_printed_command_runs_as_it_is_printed():
    recipe = recipes.load(layout.RECIPES / "demo.toml")
    line = commands.line(plans.make(recipe, shapes.find(recipe.model)).stages[-1].argv)
    done = subprocess.run(f"{line} --dry-run", shell=True, cwd=layout.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("demo: ")


ODD = (
    float("nan"),
    float("-inf"),
    -1,
    10**30,
    True,
    "",
    "a/b",
    "x\0y",
    "é" * 300,
    "~nobody/x",
    [float("nan")],
    {"a": 1},
)


@pytest.mark.parametrize("kind", schema.KINDS)
def test_an_odd_value_anywhere_is_an_error_of_ours_or_a_plan_in_whole(kind, monkeypatch):
    monkeypatch.setattr(verdict._Search, "nearest", lambda self, rule: "")  # what is nearest has its own tests
    cpu = {"kind": "cpu", "model": "build/demo_model/checkpoint", "precision": "int4", "max_seq_len": 512}
    cpu |= {"max_batch_size": 8, "max_num_tokens": 256, "kv_cache_tokens": 4096}
    base = cpu if kind == schema.CPU else gpu_recipes.table(kind=kind)
    tables = {"calibration": schema.fields_of(schema.Calibration), "quality": schema.fields_of(schema.Quality)}
    tables |= {"environment": {"A": None}, "speculative_decoding": schema.SPECULATIVE_KEYS}
    programs = {"build": "trtllm_build", "quantize": "quantize", "convert": "convert_checkpoint_llama"}
    tables |= {name: option_table.read(program).options for name, program in programs.items()}
    drawn = [base | {key: value} for key in schema.KEYS for value in ODD]
    for name, keys in tables.items():
        mode = {"mode": "medusa", "max_draft_len": 4} if name == "speculative_decoding" else {}
        plain = {"precision": "bf16", "kv_cache_precision": "auto"} if name == "convert" else {}
        drawn += [base | plain | {name: mode | {key: value}} for key in keys for value in ODD]
    refusals = 0
    for table in drawn:
        try:
            recipe = recipes.parse(table, "mine.toml")
            plan = plans.make(recipe, shapes.find(recipe.model))
        except InvalidArgument:
            refusals += 1
            continue
        assert plans.as_text(plan, verbose=True)
    assert refusals > len(drawn) / 2


def test_lengths_beyond_the_recipe_are_left_out():
    assert {row["total_tokens"] for row in plans.concurrency(plan_of(max_seq_len=1000))} == {256, 1000}


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(accepted())
def test_the_text_of_every_accepted_recipe_has_its_commands_and_its_memory_adds_up(drawn):
    plan = plans.make(drawn.recipe, drawn.shape)
    text, footprint = plans.as_text(plan, verbose=True), plan.footprint
    assert not plan.refused and drawn.recipe.image in text
    for stage in plan.stages:
        command = commands.line(stage.argv)
        assert shlex.split(command) == list(stage.argv) and f"$ {command}" in text
    assert footprint.fixed_bytes + footprint.pool_bytes <= footprint.available_bytes
    longest = plans.concurrency(plan)[-1]
    assert longest["total_tokens"] == drawn.recipe.max_seq_len
    assert 1 <= longest["run_at_once"] <= drawn.recipe.max_batch_size


@pytest.mark.slow
def test_planning_loads_neither_torch_nor_an_engine():
    code = "import sys; from build import engine; engine.main(['--engine', 'llama-3.1-8b-fp8-hopper', '--dry-run']); "
    code += "print([m for m in ('torch', 'openvino', 'tritonclient', 'grpc', 'modelopt') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=layout.ROOT)
    assert done.stdout.startswith("llama-3.1-8b-fp8-hopper: ") and done.stdout.rstrip().endswith("[]")


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
