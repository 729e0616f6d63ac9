import re

import gpu_recipes
import pytest
from gpu_recipes import make, table
from hypothesis import given
from hypothesis import strategies as st

from build.base import hardware, layout
from build.recipe import recipe as recipes
from build.recipe import schema
from build.recipe.recipe import RecipeError, load, lookahead_draft_len, parse
from contract.errors import InvalidArgument

CPU_TABLE = {
    "kind": "cpu",
    "model": "build/demo_model/checkpoint",
    "precision": "int8",
    "max_batch_size": 8,
    "max_num_tokens": 256,
    "max_seq_len": 512,
    "kv_cache_tokens": 4096,
}


def refusal(given: dict, path: str = "somewhere/mine.toml") -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        parse(given, path)
    return caught.value


@pytest.mark.parametrize("path", sorted(layout.RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_is_named_by_its_file(path):
    assert load(path).name == path.stem


def test_a_recipe_keeps_what_it_says_and_fills_in_the_rest():
    recipe = make(tp=2, calibration={"size": 64})
    assert (recipe.tp, recipe.pp, recipe.world_size) == (2, 1, 2)
    assert recipe.calibration == schema.Calibration(size=64)
    assert recipe.image == schema.IMAGE
    assert recipe.prefix_reuse and recipe.chunked_context


def test_a_cpu_recipe_calibrates_only_when_it_says_so():
    assert parse(CPU_TABLE, "mine.toml").calibration is None
    asked = parse(CPU_TABLE | {"precision": "int4", "calibration": {"size": 8}}, "mine.toml").calibration
    assert (asked.dataset, asked.size, asked.max_seq_length) == ("cpython", 8, 256)


def test_an_unknown_key_is_refused_with_the_file_the_key_and_the_nearest_one():
    error = refusal(table(max_batchsize=4))
    assert error.path == "somewhere/mine.toml" and error.key == "max_batchsize"
    assert str(error).startswith("somewhere/mine.toml: max_batchsize: unknown key; nearest is 'max_batch_size'")
    of_cpu = str(refusal(CPU_TABLE | {"max_batchsize": 4}))
    assert "kv_cache_fraction" in str(error) and "kv_cache_tokens" in of_cpu and "kv_cache_fraction" not in of_cpu


@pytest.mark.parametrize(
    ("changes", "key", "nearest"),
    [
        ({"calibration": {"sise": 3}}, "calibration.sise", "'size'"),
        ({"quality": {"perplexity": 1.1}}, "quality.perplexity", "'perplexity_ratio'"),
        ({"speculative_decoding": {"mod": "eagle"}}, "speculative_decoding.mod", "'mode'"),
        ({"build": {"multiple_profils": "enable"}}, "build.multiple_profils", "'multiple_profiles'"),
        ({"quantize": {"tokenizer_max_seq_len": 1}}, "quantize.tokenizer_max_seq_len", "'tokenizer_max_seq_length'"),
        ({"convert": {"per_chanel": True}}, "convert.per_chanel", "'per_channel'"),
    ],
)
def test_an_unknown_key_in_a_table_is_refused_the_same_way(changes, key, nearest):
    error = refusal(table(**changes))
    assert error.key == key
    assert f"nearest is {nearest}" in str(error)


@pytest.mark.parametrize(
    ("changes", "key", "allowed"),
    [
        ({"max_batch_size": 0}, "max_batch_size", "an integer from 1 to 4096"),
        ({"max_batch_size": True}, "max_batch_size", "an integer from 1 to 4096"),
        ({"max_batch_size": 2.0}, "max_batch_size", "an integer from 1 to 4096"),
        ({"max_num_tokens": "8192"}, "max_num_tokens", "an integer from 1 to"),
        ({"max_seq_len": 1}, "max_seq_len", "an integer from 2 to"),
        ({"prefix_reuse": "yes"}, "prefix_reuse", "true or false"),
        ({"model": "  "}, "model", "a non-empty string"),
        ({"precision": "fp16"}, "precision", "one of bf16, fp8"),
        ({"precision": "int8"}, "precision", "one of bf16, fp8"),
        ({"kv_cache_precision": "u8"}, "kv_cache_precision", "one of auto, fp8, int8"),
        ({"tp": 3}, "tp", "one of 1, 2, 4, 8, 16"),
        ({"tp": "2"}, "tp", "one of 1, 2, 4, 8, 16, got '2'; nearest is '2'"),
        ({"kv_cache_fraction": 1.5}, "kv_cache_fraction", "a number from 0.01 to 1"),
        ({"kv_cache_fraction": float("nan")}, "kv_cache_fraction", "a number from 0.01 to 1"),
        ({"optimize_for": "speed"}, "optimize_for", "one of balanced, latency, throughput"),
        ({"group_size": 100}, "group_size", "one of 32, 64, 128, 256"),
        (
            {"speculative_decoding": {"mode": "explicit_draft_tokens", "max_draft_len": 4, "draft_model": "no/such"}},
            "speculative_decoding.draft_model",
            "unknown key",
        ),
        ({"gpu": "h1000"}, "gpu", "nearest is 'h100'"),
        ({"gpu": None, "sm": 91}, "sm", "one of 80, 86, 89, 90, 100, 103, 120"),
        ({"calibration": 5}, "calibration", "a table"),
        ({"calibration": {"size": 0}}, "calibration.size", "an integer from 1 to"),
        ({"quality": {"top1_agreement": 1.2}}, "quality.top1_agreement", "a number from 0 to 1"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": 0}}, "environment.CUDA_VISIBLE_DEVICES", "a string"),
        ({"build": {"tokens_per_block": "32"}}, "build.tokens_per_block", "a value of type int"),
        ({"build": {"gemm_plugin": "fp9"}}, "build.gemm_plugin", "nearest is 'fp8'"),
        ({"build": {"multiple_profiles": True}}, "build.multiple_profiles", "one of enable, disable"),
        ({"build": {"strip_plan": "enable"}}, "build.strip_plan", "true or false"),
        ({"build": {"lora_dir": []}}, "build.lora_dir", "a list with at least one entry"),
        ({"build": {"workers": 10**30}}, "build.workers", "an integer from 0 to 2147483647"),
        ({"build": {"input_timing_cache": ""}}, "build.input_timing_cache", "a non-empty string on one line"),
        ({"build": {"input_timing_cache": 7}}, "build.input_timing_cache", "a non-empty string on one line"),
        ({"convert": {"smoothquant": float("nan")}}, "convert.smoothquant", "a finite number"),
        ({"quantize": {"auto_quantize_bits": float("inf")}}, "quantize.auto_quantize_bits", "a finite number"),
        ({"quantize": {"num_medusa_heads": 4}}, "quantize.num_medusa_heads", "speculative_decoding.num_medusa_heads"),
        ({"model": "a\nb"}, "model", "a non-empty string on one line"),
        ({"revision": "../../etc"}, "revision", "a branch, tag or commit"),
        ({"image": "tag with blanks"}, "image", "a container image"),
        ({"environment": {"A B": "1"}}, "environment.A B", "a name of letters"),
        ({"environment": {"A": "\0"}}, "environment.A", "a string"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(changes, key, allowed):
    error = refusal(table(**changes))
    assert error.key == key
    assert allowed in str(error)


@pytest.mark.parametrize("key", ["model", "precision", "max_batch_size", "max_num_tokens", "kind"])
def test_a_missing_key_is_named(key):
    error = refusal(table(**{key: None}))
    assert error.key == key and "is missing" in str(error)


def test_a_key_of_another_kind_is_refused():
    assert "does not apply to kind 'cpu'" in str(refusal(CPU_TABLE | {"gpu": "h100"}))
    assert "does not apply to kind 'llmapi'" in str(refusal(table(kind="llmapi", build={"fast_build": True})))


def test_only_a_trtllm_recipe_may_leave_max_seq_len_to_rule_r11():
    assert make(max_seq_len=None).max_seq_len is None
    assert "max_seq_len: is missing" in str(refusal(table(kind="llmapi", max_seq_len=None)))
    assert "max_seq_len: is missing" in str(refusal({k: v for k, v in CPU_TABLE.items() if k != "max_seq_len"}))


def test_a_card_and_its_compute_capability_complete_each_other():
    assert (make(gpu="NVIDIA L40S").gpu, make(gpu="l40s").sm) == ("l40s", 89)
    assert make(gpu=None, sm=86).gpu == hardware.reference(86).name
    assert make(gpu="h100", sm=90).sm == 90
    assert "must be 90, the SM of h100, got 89" in str(refusal(table(gpu="h100", sm=89)))
    assert "name the target card" in str(refusal(table(gpu=None)))


@pytest.mark.parametrize(
    ("changes", "home"),
    [
        ({"build": {"max_seq_len": 4096}}, "max_seq_len"),
        ({"build": {"max_draft_len": 5}}, "speculative_decoding.max_draft_len"),
        ({"quantize": {"qformat": "fp8"}}, "precision"),
        ({"quantize": {"calib_size": 5}}, "calibration.size"),
        ({"convert": {"tp_size": 2}}, "tp"),
    ],
)
def test_a_value_with_a_key_of_its_own_is_not_taken_as_an_option(changes, home):
    assert f"is set by the recipe's own key: {home}" in str(refusal(table(**changes)))


def test_tensor_parallelism_is_not_an_option_of_the_builder():
    assert "trtllm-build has no such option (R33)" in str(refusal(table(build={"tp_size": 2})))


def test_paths_are_the_builds_own():
    assert "is chosen by the build" in str(refusal(table(build={"output_dir": "/tmp/x"})))


def test_lookahead_derives_its_draft_length():
    spec = {"mode": "lookahead_decoding", "window_size": 7, "ngram_size": 7, "verification_set_size": 7}
    assert make(speculative_decoding=spec).speculative_decoding.max_draft_len == 83
    assert lookahead_draft_len(4, 3, 4) == 15
    assert lookahead_draft_len(1, 1, 0) == 0


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({}, "speculative_decoding.mode: is missing"),
        ({"mode": "eagel"}, "nearest is 'eagle'"),
        ({"mode": "eagle"}, "speculative_decoding.max_draft_len: is missing"),
        ({"mode": "lookahead_decoding", "window_size": 7}, "speculative_decoding.ngram_size: is missing"),
        ({"mode": "eagle", "max_draft_len": 4, "window_size": 7}, "does not apply to mode 'eagle'"),
    ],
)
def test_speculative_decoding_says_what_its_mode_needs(spec, problem):
    assert problem in str(refusal(table(speculative_decoding=spec)))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({}, "speculative_decoding.mode: is missing; must be one of prompt_lookup, draft_model"),
        ({"mode": "eagle", "max_draft_len": 4}, "must be one of prompt_lookup, draft_model, got 'eagle'"),
        ({"mode": "prompt_lookup", "max_draft_len": 17}, "max_draft_len: must be an integer from 1 to 16, got 17"),
        ({"mode": "prompt_lookup", "window_size": 7}, "does not apply to mode 'prompt_lookup'"),
    ],
)
def test_a_cpu_engine_drafts_by_prompt_lookup_or_a_draft_model(spec, problem):
    cpu = {"kind": "cpu", "model": "m", "precision": "bf16", "max_batch_size": 4, "max_num_tokens": 64}
    cpu |= {"max_seq_len": 64, "kv_cache_tokens": 128}
    with pytest.raises(RecipeError, match=re.escape(problem)):
        recipes.parse({**cpu, "speculative_decoding": spec}, "m.toml")
    declared = recipes.parse({**cpu, "speculative_decoding": {"mode": "prompt_lookup"}}, "m.toml").speculative_decoding
    assert (declared.max_draft_len, declared.ngram_size) == (8, 3)
    assert "one of lookahead_decoding" in str(refusal(table(speculative_decoding={"mode": "prompt_lookup"})))


def test_quality_budgets_follow_the_precision_and_can_be_set_one_by_one():
    default = recipes.DEFAULT_QUALITY["fp8"]
    assert make().quality == default
    changed = make(quality={"kl": 0.5}).quality
    assert (changed.kl, changed.top1_agreement) == (0.5, default.top1_agreement)
    assert set(recipes.DEFAULT_QUALITY) == {p for allowed in schema.PRECISIONS.values() for p in allowed}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = " + "[" * 5000, "must be TOML: "),
        ("x = " + "9" * 5000, "must be TOML: Exceeds the limit"),
        (
            'kind = "cpu"\nmax_batch_size = 0x' + "f" * 8000,
            "from 1 to 4096, got a value of type int too large to print",
        ),
        ('kind = "cpu"\nmax_batch_size = "' + "a" * 8000 + '"', "must be an integer from 1 to 4096, got 'aaa"),
        ("a" * 8000 + " = 1", "unknown key"),
    ],
)
def test_a_huge_value_makes_a_short_error(tmp_path, text, said):
    file = tmp_path / "mine.toml"
    extra = '\nmodel = "x"\nprecision = "int8"\nmax_num_tokens = 8\nmax_seq_len = 8\nkv_cache_tokens = 64\n'
    file.write_text(text + extra)
    with pytest.raises(RecipeError) as raised:
        load(file)
    assert said in str(raised.value) and len(str(raised.value)) < 1200


@pytest.mark.parametrize("name", ["a" * 129, "", ".", "..", "a/b", "../../x", "x y", "é", "-x", "a\n"])
def test_an_engine_is_named_by_a_name_and_not_a_path(name):
    with pytest.raises(InvalidArgument, match=r"^engine: must be a name of letters, digits, '\.', '_' and '-', got "):
        recipes.named(name)


def test_a_wrong_name_gets_the_three_nearest_and_where_all_are_listed():
    with pytest.raises(RecipeError) as raised:
        load(layout.RECIPES / "demo-fp9.toml")
    said = str(raised.value)
    assert "build/recipes/demo-fp9.toml" in said and str(layout.ROOT) not in said
    assert "nearest is 'demo-fp8', " in said and said.count("'demo") == 3
    count = len(list(layout.RECIPES.glob("*.toml")))
    assert said.endswith(f"`ls build/recipes` lists all {count}") and len(said) < 200


def test_a_file_that_is_not_toml_or_not_there_is_named(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("kind = \n")
    with pytest.raises(RecipeError, match=r"broken.toml: must be TOML: .*line 1"):
        load(broken)
    with pytest.raises(RecipeError, match="there is no such recipe; nearest is 'broken'; `ls "):
        load(tmp_path / "brokn.toml")
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="must be TOML: 'utf-8' codec"):
        load(broken)


def test_the_name_is_the_files_and_fit_for_a_folder():
    assert "must be the file's name, 'mine', got 'other'" in str(refusal(table(name="other")))
    assert "a recipe's file name must be letters" in str(refusal(table(), "my engine.toml"))


@given(st.sampled_from(sorted(schema.KEYS)), st.characters(categories=["Ll"]))
def test_any_key_with_a_letter_too_many_is_refused_by_name(key, letter):
    error = refusal(gpu_recipes.FP8 | {f"{key}_{letter}": 1})
    assert error.key == f"{key}_{letter}" and "nearest is " in str(error)


@given(gpu_recipes.tables())
def test_what_loads_says_what_was_written(written):
    recipe = parse(written, "drawn.toml")
    for key in ("model", "precision", "max_batch_size", "max_num_tokens", "max_seq_len", "tp", "optimize_for"):
        assert getattr(recipe, key) == written[key]
    assert recipe.build == written["build"]


def test_adapters_are_named_folders_in_the_order_of_their_numbers():
    two = [{"name": "poet", "path": "adapters/poet"}, {"name": "lawyer", "path": "adapters/lawyer"}]
    made = parse(CPU_TABLE | {"adapters": two}, "cpu.toml")
    assert [(one.name, one.path) for one in made.adapters] == [("poet", "adapters/poet"), ("lawyer", "adapters/lawyer")]


@pytest.mark.parametrize(
    ("adapters", "key", "says"),
    [
        ([{"name": "a"}], "adapters.0.path", "is missing; must be a non-empty string"),
        ([{"name": "a", "path": "p"}, {"name": "b:c", "path": "p"}], "adapters.1.name", "must be a name of letters"),
        ([{"name": "a", "path": "p", "ranks": 1}], "adapters.0.ranks", "unknown key"),
        ([{"name": "a", "path": "p"}] * 2, "adapters", "must have different names, got 'a' twice"),
        ([{"name": str(n), "path": "p"} for n in range(64)], "adapters", "must be at most 63 tables, got 64"),
        ({"a": "p"}, "adapters", "must be tables, [[adapters]]"),
        (["a"], "adapters.0", "must be tables, [[adapters]], got 'a'"),
    ],
)
def test_a_wrong_adapter_is_refused_with_what_is_allowed(adapters, key, says):
    error = refusal(CPU_TABLE | {"adapters": adapters})
    assert error.key == key and says in str(error)
