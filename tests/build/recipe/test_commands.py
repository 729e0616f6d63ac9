import shlex

import pytest
from gpu_recipes import LLAMA_70B, QWEN_7B, accepted, make
from hypothesis import given, settings
from program_parser import parse

from build.base import layout
from build.base import shape as shapes
from build.recipe import commands, schema
from build.recipe import recipe as recipes
from build.recipe.recipe import load
from build.recipe.schema import CPU, TRTLLM

SHIPPED = [
    r
    for path in sorted(layout.RECIPES.glob("*.toml"))
    if (r := load(path)).kind == TRTLLM and not commands.calibrates_here(r, shapes.find(r.model))
]


def built(recipe: recipes.Recipe):
    return parse(commands.compile_engine(recipe, shapes.find(recipe.model)))


def quantised(recipe: recipes.Recipe):
    return parse(commands.checkpoint(recipe, shapes.find(recipe.model)))


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda recipe: recipe.name)
def test_the_programs_accept_every_command_of_a_shipped_recipe(recipe):
    checkpoint, engine = quantised(recipe), built(recipe)
    assert checkpoint.output_dir == engine.checkpoint_dir == f"engines/{recipe.name}/checkpoint"
    assert checkpoint.model_dir == commands.model_dir(recipe.model)
    assert (checkpoint.tp_size, checkpoint.pp_size) == (recipe.tp, recipe.pp)
    assert engine.output_dir == f"engines/{recipe.name}/engine"
    assert (engine.max_batch_size, engine.max_seq_len) == (recipe.max_batch_size, recipe.max_seq_len)
    assert engine.logits_dtype == "float32" and engine.workers == recipe.world_size


@pytest.mark.slow
@settings(max_examples=300)
@given(accepted())
def test_the_programs_accept_every_command_of_an_accepted_recipe(drawn):
    checkpoint, engine = quantised(drawn.recipe), built(drawn.recipe)
    assert checkpoint.dtype == "bfloat16"
    assert (checkpoint.tp_size, checkpoint.pp_size) == (drawn.recipe.tp, drawn.recipe.pp)
    assert engine.max_seq_len == drawn.recipe.max_seq_len
    assert engine.max_num_tokens == commands.max_num_tokens(drawn.recipe)
    assert engine.logits_dtype == "float32"
    assert engine.use_paged_context_fmha == ("enable" if commands.paged_context_fmha(drawn.recipe) else "disable")


@pytest.mark.slow
@given(accepted())
def test_a_printed_line_is_read_back_by_a_shell_as_the_same_command(drawn):
    argv = commands.compile_engine(drawn.recipe, drawn.shape)
    assert shlex.split(commands.line(argv)) == argv
    wrapped = commands.in_docker(argv, drawn.recipe)
    assert shlex.split(commands.line(wrapped)) == wrapped and wrapped[-len(argv) :] == argv


def test_the_parser_of_these_tests_refuses_what_the_programs_would():
    for wrong in (["--tp_size", "2"], ["--multiple_profiles"], ["--gemm_plugin", "fp9"], ["--max_batch", "2"]):
        with pytest.raises(ValueError):
            parse(["trtllm-build", "--checkpoint_dir", "x", *wrong])


def test_an_fp8_build_is_the_documented_command():
    engine, checkpoint = built(make()), quantised(make())
    assert (checkpoint.qformat, checkpoint.kv_cache_dtype, checkpoint.calib_dataset) == ("fp8", "fp8", "cnn_dailymail")
    assert (checkpoint.calib_size, checkpoint.calib_max_seq_length, checkpoint.tokenizer_max_seq_length) == (
        512,
        2048,
        4096,
    )
    assert (engine.gemm_plugin, engine.use_fp8_context_fmha, engine.use_fused_mlp) == ("disable", "enable", "enable")
    assert (engine.multiple_profiles, engine.kv_cache_type, engine.gemm_swiglu_plugin) == ("enable", "paged", "fp8")
    assert (engine.reduce_fusion, engine.user_buffer) == ("disable", "disable")


def test_llama_on_several_gpus_fuses_its_reductions_and_qwen_does_not():
    engine = built(make(model=LLAMA_70B, tp=4))
    assert (engine.reduce_fusion, engine.user_buffer, engine.workers) == ("enable", "enable", 4)
    engine = built(make(model=LLAMA_70B, tp=4, precision="bf16", kv_cache_precision="auto"))
    assert (engine.reduce_fusion, engine.user_buffer) == ("enable", "disable")
    engine = built(make(model=QWEN_7B, tp=4))
    assert (engine.reduce_fusion, engine.user_buffer) == ("disable", "disable")


@pytest.mark.parametrize(
    ("precision", "gemm", "swiglu"),
    [
        ("bf16", "auto", "disable"),
        ("fp8", "disable", "fp8"),
        ("int4_awq", "auto", "disable"),
        ("w4a8_awq", "disable", "disable"),
    ],
)
def test_plugins_follow_the_precision(precision, gemm, swiglu):
    engine = built(make(precision=precision, kv_cache_precision="fp8" if precision in ("fp8", "w4a8_awq") else "auto"))
    assert (engine.gemm_plugin, engine.gemm_swiglu_plugin) == (gemm, swiglu)


def test_latency_takes_the_low_latency_plugins_in_place_of_the_other():
    engine = built(make(optimize_for="latency"))
    assert (engine.low_latency_gemm_plugin, engine.low_latency_gemm_swiglu_plugin) == ("fp8", "fp8")
    assert engine.gemm_swiglu_plugin == "disable"
    assert built(make(optimize_for="latency", gpu="b200")).low_latency_gemm_plugin == "disable"  # R5


def test_what_the_builder_would_change_silently_is_written_as_it_will_be():
    assert built(make(precision="int4_awq", kv_cache_precision="fp8")).use_paged_context_fmha == "disable"  # R1
    assert (
        built(make(gpu="a100", precision="int4_awq", kv_cache_precision="fp8")).use_fp8_context_fmha == "disable"
    )  # R3
    assert built(make(precision="int4_awq", kv_cache_precision="auto")).use_fused_mlp == "disable"  # R6
    assert built(make(max_seq_len=100, max_batch_size=2)).max_num_tokens == 200  # R12
    assert quantised(make(precision="int4_awq", calibration={"size": 512})).calib_size == 32  # R20


def test_the_recipes_own_options_win():
    engine = built(
        make(build={"gemm_plugin": "fp8", "tokens_per_block": 64, "strip_plan": True, "gemm_swiglu_plugin": "disable"})
    )
    assert (engine.gemm_plugin, engine.tokens_per_block, engine.strip_plan) == ("fp8", 64, True)
    assert engine.gemm_swiglu_plugin == "disable"
    assert quantised(make(quantize={"seed": 7})).seed == 7


def test_bf16_and_weight_only_checkpoints_are_converted_and_the_rest_quantised():
    converted = quantised(make(precision="int4_wo", kv_cache_precision="int8"))
    assert converted.use_weight_only and converted.weight_only_precision == "int4" and converted.int8_kv_cache
    assert quantised(make(precision="bf16", kv_cache_precision="fp8")).fp8_kv_cache
    plain = quantised(make(model=QWEN_7B, precision="bf16", kv_cache_precision="auto"))
    assert not plain.use_weight_only and not plain.int8_kv_cache
    smooth = quantised(make(precision="int8_sq", kv_cache_precision="auto", convert={"smoothquant": 0.8}))
    assert (smooth.smoothquant, smooth.per_channel, smooth.per_token) == (0.8, True, True)
    assert quantised(make(precision="int8_sq", kv_cache_precision="int8")).kv_cache_dtype == "int8"


def test_speculative_decoding_reaches_both_programs():
    engine = built(make(speculative_decoding={"mode": "eagle", "max_draft_len": 5}))
    assert (engine.speculative_decoding_mode, engine.max_draft_len) == ("eagle", 5)
    medusa = {"mode": "medusa", "max_draft_len": 63, "num_medusa_heads": 5, "medusa_model": "org/heads"}
    checkpoint = quantised(make(speculative_decoding=medusa))
    assert (checkpoint.num_medusa_heads, checkpoint.medusa_model_dir) == (5, ".cache/models/org--heads")


def test_a_hub_model_is_fetched_and_a_folder_is_not(tmp_path):
    argv = commands.fetch(make(revision="abc123"))
    assert argv[:4] == [".venv/bin/python", "-m", "build.base.fetch", "meta-llama/Llama-3.1-8B-Instruct"]
    assert argv[argv.index("--revision") + 1] == "abc123"
    assert argv[-1] == ".cache/models/meta-llama--Llama-3.1-8B-Instruct@abc123"
    assert argv[-1] == commands.model_dir("meta-llama/Llama-3.1-8B-Instruct", "abc123")
    assert commands.fetch(make())[-1] == commands.model_dir("meta-llama/Llama-3.1-8B-Instruct")
    assert commands.fetch(make(model=str(tmp_path))) is None
    assert commands.model_dir(str(tmp_path)) == str(tmp_path)


def test_docker_mounts_the_repository_and_what_lies_outside_it(tmp_path):
    argv = commands.in_docker(["true"], make(model=str(tmp_path), environment={"NCCL_DEBUG": "INFO"}))
    mounts = [argv[n + 1] for n, word in enumerate(argv) if word == "-v"]
    assert mounts == [f"{layout.ROOT}:/trident", f"{tmp_path}:{tmp_path}:ro"]
    empty = commands.in_docker(["true"], make(environment={"CUDA_VISIBLE_DEVICES": ""}))
    assert "CUDA_VISIBLE_DEVICES=" in empty, "without the sign docker takes this machine's value"
    assert "NCCL_DEBUG=INFO" in argv and argv[argv.index("-w") + 1] == "/trident"
    assert argv[argv.index(schema.IMAGE) + 1] == "bash" and argv[-1] == "true"


def test_the_hub_token_is_passed_on_by_name_only(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    line = commands.line(commands.in_docker(["true"], make())) + commands.line(commands.in_enroot(["true"], make()))
    assert "HF_TOKEN" in line and "hf_secret" not in line


def test_enroot_imports_the_same_image():
    assert commands.enroot_import(make())[-1] == "docker://nvcr.io#nvidia/tritonserver:26.07-trtllm-python-py3"
    for image in ("nvidia/trt:1", "mine:2"):  # of Docker Hub, which has no name before the sign
        assert commands.enroot_import(make(image=image))[-1] == f"docker://{image}"
    assert commands.enroot_import(make(image="localhost:5000/trt:1"))[-1] == "docker://localhost:5000#trt:1"
    assert "cd /trident" in commands.line(commands.in_enroot(["true"], make()))


def test_no_cpu_recipe_has_an_image_line():
    assert all(load(path).gpu is None for path in layout.RECIPES.glob("*.toml") if load(path).kind == CPU)


@pytest.mark.parametrize("name", ["demo-fp8", "demo-int4-awq"])
def test_what_calibrates_on_the_standard_library_is_our_own_stages_work(name):
    recipe = load(layout.RECIPES / f"{name}.toml")
    argv = commands.checkpoint(recipe, shapes.find(recipe.model))
    assert argv == commands.checkpoint_on_cpu(recipe) and argv[:3] == [
        ".venv-build/bin/python",
        "-m",
        "build.quantise.quantize",
    ]
    asked = parse(["python3", "/app/examples/quantization/quantize.py", *argv[3:]])  # in that script's own words
    assert (asked.qformat, asked.calib_dataset, asked.tp_size) == (recipe.precision, "cpython", recipe.tp)
    built(recipe)


def test_the_pins_of_what_quantises_are_those_of_its_environment():
    pins = (layout.ROOT / "requirements" / "build.txt").read_text().split()
    quantising = commands.modelopt().split()
    assert [pin.partition("==")[0] for pin in quantising] == ["nvidia-modelopt", "torch", "transformers"]
    assert set(quantising) <= set(pins) and commands.exporter() in pins
