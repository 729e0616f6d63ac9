import json
import re
import subprocess

import gpu_machine
import pytest
from google.protobuf import text_format
from gpu_recipes import accepted, make
from hypothesis import given, settings
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInstanceGroup

from build.base import layout
from build.base import shape as shapes
from build.lint import __main__, repository
from build.package import model_configs
from build.package.compile_trtllm import check_engine
from build.recipe import commands, schema
from build.recipe import recipe as recipes
from contract import tensors
from contract.errors import EngineFailed, InvalidArgument

SHIPPED = [r for path in sorted(layout.RECIPES.glob("*.toml")) if (r := recipes.load(path)).kind == schema.TRTLLM]


WEIGHTS_TYPE = {"float16": "TYPE_FP16", "bfloat16": "TYPE_BF16"}


def model_dtype(recipe: recipes.Recipe) -> str:
    return commands.dtype(recipe, shapes.find(recipe.model))


def parsed(recipe: recipes.Recipe) -> ModelConfig:
    return text_format.Parse(model_configs.render(recipe), ModelConfig())


def parameters(recipe: recipes.Recipe) -> dict[str, str]:
    return {key: value.string_value for key, value in parsed(recipe).parameters.items()}


def check(recipe: recipes.Recipe) -> None:
    """What holds for every configuration we write."""
    text, config, theirs = model_configs.render(recipe), parsed(recipe), model_configs.contract()
    assert "${" not in text
    assert (config.name, config.backend, config.max_batch_size) == ("engine", "tensorrtllm", recipe.max_batch_size)
    assert config.model_transaction_policy.decoupled
    assert [(g.kind, g.count) for g in config.instance_group] == [(ModelInstanceGroup.KIND_CPU, 1)]
    batching = config.dynamic_batching
    assert batching.max_queue_delay_microseconds == 0 and batching.default_queue_policy.max_queue_size > 0
    for side in ("input", "output"):
        names = [tensor.name for tensor in getattr(config, side)]
        assert len(set(names)) == len(names)
        for tensor in getattr(config, side):
            known = theirs[side][tensor.name]
            wanted = "TYPE_FP32" if known["data_type"] == "${logits_datatype}" else known["data_type"]
            wanted = wanted if tensor.name != "lora_weights" else WEIGHTS_TYPE[model_dtype(recipe)]
            assert (DataType.Name(tensor.data_type), list(tensor.dims)) == (wanted, known["dims"])
            assert tensor.HasField("reshape") == known["reshape_scalar"] and list(tensor.reshape.shape) == []
    known = json.loads(model_configs.CONTRACT.read_text())["tensorrt_llm"]["parameters"]
    assert set(config.parameters) <= set(known)
    assert all(len(line) <= 160 for line in text.splitlines())


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda recipe: recipe.name)
def test_the_configuration_of_every_shipped_recipe_parses_and_keeps_the_contract(recipe):
    check(recipe)
    assert parameters(recipe)["gpt_model_path"] == f"engines/{recipe.name}/engine"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(accepted())
def test_the_configuration_of_every_accepted_recipe_parses_and_keeps_the_contract(drawn):
    check(drawn.recipe)


ADAPTER = ["lora_weights", "lora_config"]  # which an engine in Python reads from its own folder


def described(tensor) -> tuple:
    return tensor.name, tensor.data_type, tuple(tensor.dims), getattr(tensor, "optional", False)


def test_the_signature_is_the_cpu_engines_without_what_is_ours():
    config, cpu = parsed(make()), ModelConfig()
    text_format.Parse((layout.MODEL_REPOSITORY / "engine" / "config.pbtxt").read_text(), cpu)
    ours = {t.name for t in (*tensors.ENGINE_INPUTS, *tensors.ENGINE_OUTPUTS) if t.ours}
    for side in ("input", "output"):
        theirs = {described(t) for t in getattr(config, side) if t.name not in ADAPTER}
        assert theirs == {described(t) for t in getattr(cpu, side) if t.name not in ours}
    assert [t.name for t in config.input] == [t.name for t in tensors.ENGINE_INPUTS if not t.ours] + ADAPTER
    assert [t.name for t in config.output] == [t.name for t in tensors.ENGINE_OUTPUTS if not t.ours]
    required = {t.name for t in config.input if not t.optional}
    assert required == {"input_lengths", "request_output_len"}


def test_one_tensor_stands_on_a_line_with_its_shape_behind():
    rows = [row for row in model_configs.render(make()).splitlines() if "data_type" in row]
    assert len(rows) == len(model_configs.inputs()) + len(model_configs.outputs(make()))
    assert all(re.search(r"# \[batch(, (n|\d))+\]$", row) for row in rows)
    assert any('name: "stop_words_list"' in row and row.endswith("# [batch, 2, n]") for row in rows)


def test_logits_are_offered_where_the_engine_gathers_them():
    assert "context_logits" not in model_configs.outputs(make())
    assert model_configs.outputs(make(build={"gather_context_logits": True}))[-1] == "context_logits"
    assert model_configs.outputs(make(build={"gather_all_token_logits": True}))[-2:] == [
        "context_logits",
        "generation_logits",
    ]
    check(make(build={"gather_all_token_logits": True}))


def test_reuse_and_chunking_are_on_only_where_the_engine_can():
    def pair(**changes: object) -> tuple[str, str]:
        values = parameters(make(**changes))
        return values["enable_kv_cache_reuse"], values["enable_chunked_context"]

    assert pair() == ("true", "true")
    assert pair(prefix_reuse=False) == ("false", "true")
    assert pair(chunked_context=False) == ("true", "false")
    assert pair(precision="int4_awq") == ("false", "false")  # with its FP8 KV cache: R1
    assert pair(precision="int4_awq", kv_cache_precision="auto") == ("true", "true")


def test_the_pools_size_and_the_scheduler_follow_the_recipe():
    values = parameters(make(kv_cache_tokens=4096, kv_cache_fraction=0.5, optimize_for="throughput", max_beam_width=4))
    assert values["kv_cache_free_gpu_mem_fraction"] == "0.5" and values["max_tokens_in_paged_kv_cache"] == "4096"
    assert values["batch_scheduler_policy"] == "max_utilization" and values["max_beam_width"] == "4"
    assert "max_tokens_in_paged_kv_cache" not in parameters(make())
    assert parameters(make())["batch_scheduler_policy"] == "guaranteed_no_evict"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            {"mode": "lookahead_decoding", "window_size": 5, "ngram_size": 4, "verification_set_size": 3},
            {
                "decoding_mode": "lookahead",
                "lookahead_window_size": "5",
                "lookahead_ngram_size": "4",
                "lookahead_verification_set_size": "3",
            },
        ),
        ({"mode": "medusa", "max_draft_len": 63}, {"decoding_mode": "medusa"}),
        (
            {"mode": "eagle", "max_draft_len": 4, "choices": "{0}, {0, 0}"},
            {"decoding_mode": "eagle", "eagle_choices": "{0}, {0, 0}"},
        ),
        ({"mode": "explicit_draft_tokens", "max_draft_len": 4}, {"decoding_mode": "redrafter"}),
    ],
)
def test_speculative_decoding_sets_its_mode(spec, expected):
    values = parameters(make(speculative_decoding=spec))
    assert {key: values[key] for key in expected} == expected
    assert "acceptance_rate" in model_configs.outputs(make(speculative_decoding=spec))


def test_quotes_in_a_value_do_not_break_the_file():
    spec = {"mode": "medusa", "max_draft_len": 4, "choices": 'a "quoted" \\ choice'}
    assert parameters(make(speculative_decoding=spec))["medusa_choices"] == 'a "quoted" \\ choice'


def test_guides_need_a_vocabulary_and_go_with_neither_drafts_nor_beams():
    keys = ("tokenizer_dir", "guided_decoding_backend", "xgrammar_tokenizer_info_path")
    folder = f"{layout.relative(layout.ENGINES / make().name)}"
    given = parameters(make())
    assert [given[key] for key in keys] == [folder, "xgrammar", f"{folder}/xgrammar_tokenizer_info.json"]
    table = json.loads(model_configs.CONTRACT.read_text())["tensorrt_llm"]
    assert set(keys) <= {*table["parameters"]}
    spec = {
        "mode": "lookahead_decoding",
        "window_size": 4,
        "ngram_size": 4,
        "verification_set_size": 4,
    }
    for recipe in (make(max_beam_width=2), make(speculative_decoding=spec)):
        given = parameters(recipe)
        assert [given[key] for key in keys] == ["", "", ""] and not model_configs.follows_grammars(recipe)


@pytest.mark.parametrize("batch", [1, 64, 2048])
def test_the_inflight_limit_is_above_what_the_engine_holds_and_queues(tmp_path, batch):
    recipe = make(max_batch_size=batch)
    written = {path.parts[-3]: path for path in model_configs.write_steps(recipe, tmp_path)}
    engine = text_format.Parse(model_configs.render(recipe), ModelConfig())
    held = engine.max_batch_size + engine.dynamic_batching.default_queue_policy.max_queue_size
    for name in ("ensemble", "ensemble_packed"):
        ensemble = text_format.Parse(written[name].read_text(), ModelConfig())
        assert ensemble.ensemble_scheduling.max_inflight_requests == max(64, 4 * batch) >= 2 * held
    assert "detokenizer_packed" in written


@pytest.mark.parametrize("model", ["engine", "ensemble", "detokenizer", "ensemble_packed", "detokenizer_packed"])
def test_what_packaging_writes_is_not_shown_by_git(model):
    path = f"model_repository/{model}/configs/any-engine.pbtxt"
    assert subprocess.run(["git", "check-ignore", "-q", path], cwd=layout.ROOT).returncode == 0


def test_a_cpu_recipe_needs_no_configuration_of_its_own():
    with pytest.raises(InvalidArgument, match="is of kind 'cpu'; engine/config.pbtxt is its own"):
        model_configs.render(recipes.load(layout.RECIPES / "demo.toml"))


def test_the_llm_apis_configuration_is_the_cpu_engines_with_another_program():
    llmapi, cpu = parsed(recipes.load(layout.RECIPES / "qwen3-8b-fp8-llmapi.toml")), ModelConfig()
    text_format.Parse((layout.MODEL_REPOSITORY / "engine" / "config.pbtxt").read_text(), cpu)
    assert (llmapi.backend, llmapi.default_model_filename) == ("python", "llmapi.py")
    assert (layout.MODEL_REPOSITORY / "engine" / "1" / llmapi.default_model_filename).is_file()
    llmapi.default_model_filename = ""
    assert llmapi == cpu


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Engines in a folder of their own, with one compiled for ``make()``."""
    monkeypatch.setattr(layout, "ENGINES", tmp_path / "engines")
    folder = layout.compiled("engine-under-test")
    gpu_machine.builder(tmp_path / "bin")
    gpu_machine.checkpoint(layout.checkpoint("engine-under-test"), 1)
    argv = ["--checkpoint_dir", str(layout.checkpoint("engine-under-test")), "--output_dir", str(folder)]
    limits = ["--max_batch_size", "64", "--max_seq_len", "4096"]
    subprocess.run([str(tmp_path / "bin" / "trtllm-build"), *argv, *limits], check=True, timeout=60)
    assert check_engine(make()) == folder
    gpu_machine.verified(make())
    return tmp_path


def test_what_the_gate_did_not_let_pass_is_not_packaged(compiled):
    path, rank = layout.evaluation("engine-under-test"), layout.checkpoint("engine-under-test") / "rank0.safetensors"
    good = path.read_text()

    def refused() -> str:
        with pytest.raises(EngineFailed) as caught:
            model_configs.write(make(), compiled / "models")
        assert not (compiled / "models").exists()
        return str(caught.value)

    gpu_machine.verified(make(), "")
    assert (
        "beyond its quality budget: KL is 3 nats; run `.venv/bin/python -m build.quality.evaluation --engine"
        in refused()
    )
    path.write_text(good)
    rank.write_bytes(b"another")
    assert "verified with another checkpoint or another budget" in refused()
    rank.write_bytes(b"")
    with pytest.raises(EngineFailed, match="another budget"):
        model_configs.write(make(quality={"kl": 0.001}), compiled / "models")
    for damaged in ("{", "[]", '{"verdict": {}}'):
        path.write_text(damaged)
        assert "has not been verified" in refused()
    path.unlink()
    assert "has not been verified" in refused()
    gpu_machine.verified(make(), "somebody signed")
    assert model_configs.write(make(), compiled / "models").is_file()


def test_a_compiled_engine_is_packaged_and_the_lint_finds_nothing(compiled):
    path = model_configs.write(make(), compiled / "models")
    assert path == compiled / "models" / "engine" / "configs" / "engine-under-test.pbtxt"
    assert path.read_text() == model_configs.render(make())
    assert list(path.parent.iterdir()) == [path]
    (compiled / "models" / "engine" / "1").mkdir()
    assert __main__.lint(repository.read(compiled / "models", "engine-under-test")) == []


def test_packaging_twice_leaves_the_same_file(compiled):
    first = model_configs.write(make(), compiled / "models").read_text()
    assert model_configs.write(make(), compiled / "models").read_text() == first


def test_without_a_compiled_engine_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "ENGINES", tmp_path / "engines")
    with pytest.raises(EngineFailed, match="holds no compiled engine: run `make build-engine"):
        model_configs.write(make(), tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_a_text_that_is_no_configuration_is_not_written():
    with pytest.raises(EngineFailed, match="does not parse as a ModelConfig"):
        model_configs.parse('name: "engine" backnd: "tensorrtllm"')


def test_the_engines_path_is_where_the_builder_puts_it():
    recipe = make()
    argv = commands.compile_engine(recipe, shapes.find(recipe.model))
    assert argv[argv.index("--output_dir") + 1] == parameters(recipe)["gpt_model_path"]
