"""An engine folder is what the checkpoint and the recipe say, seen through the pipeline that serves it."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest

from build.base import layout
from build.base.checkpoint import CheckpointError, open_checkpoint
from build.model import graph
from build.model.weights import quantize_int4, quantize_int8
from build.package.compile_cpu import check, compile_cpu, properties, require_servable
from build.recipe import recipe as recipes
from build.recipe.recipe import Recipe
from contract.errors import InvalidArgument
from tests.fakes import checkpoints, numpy_llama
from tests.fakes.dequantized import dequantized

pytestmark = pytest.mark.slow

LLAMA = checkpoints.CONFIGS["llama_gqa"]
PROMPT = [int(i) for i in np.random.default_rng(11).integers(0, 256, 30)]
READ_OUT = ("model.embed_tokens.weight", "lm_head.weight")


def recipe(precision: str, kv_cache_precision: str = "f32", **changes: object) -> Recipe:
    table = {"kind": "cpu", "model": "m", "precision": precision, "kv_cache_precision": kv_cache_precision}
    limits = {"max_batch_size": 8, "max_num_tokens": 64, "max_seq_len": 256, "kv_cache_tokens": 2048, "group_size": 32}
    return recipes.parse(table | limits | changes, Path("tiny.toml"))


def compiled(folder: Path, config: dict, made: Recipe, **options) -> tuple[Path, dict[str, np.ndarray]]:
    """(engine folder, the checkpoint's exact values)."""
    values = checkpoints.write(folder / "checkpoint", config, **options)
    (folder / "engine").mkdir()
    compile_cpu(open_checkpoint(folder / "checkpoint"), made, folder / "engine", lambda line: None)
    return folder / "engine", values


def generate(engine: Path, opened_with: dict[str, str], prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy tokens of all prompts at once, through continuous batching with chunked prefill."""
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks, scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 64, 48, True
    pipeline = genai.ContinuousBatchingPipeline(str(engine), scheduler, "CPU", opened_with)
    config = pipeline.get_config()
    config.max_new_tokens, config.do_sample = max_tokens, False
    handles = [pipeline.add_request(i, ov.Tensor(np.array([ids])), config) for i, ids in enumerate(prompts)]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return [[token for output in handle.read_all() for token in output.generated_ids] for handle in handles]


def logits(engine: Path, opened_with: dict[str, str], ids: list[int]) -> np.ndarray:
    model = ov.Core().compile_model(str(engine / "openvino_model.xml"), "CPU", opened_with)
    inputs = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
    inputs |= {"position_ids": np.arange(len(ids))[None], "beam_idx": np.zeros(1, np.int32)}
    return model.create_infer_request().infer(inputs)["logits"][0].copy()


@pytest.mark.parametrize(
    ("name", "precision"), [*((name, "fp32") for name in checkpoints.CONFIGS), ("llama_gqa", "bf16"), ("qwen3", "bf16")]
)
def test_greedy_tokens_equal_the_reference_token_for_token(tmp_path, name, precision):
    config = checkpoints.CONFIGS[name]
    made = recipe(precision)
    engine, values = compiled(tmp_path, config, made, shards=2)
    prompts = [PROMPT, PROMPT[:1], PROMPT[5:20] * 4]
    expected = [numpy_llama.greedy(config, values, ids, 12, eos=(checkpoints.EOS,)) for ids in prompts]
    # The end id, when it comes, is part of what the pipeline returns.
    found = [[t for t in ids if t != checkpoints.EOS] for ids in generate(engine, properties(made), prompts, 12)]
    assert found == expected


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama_gqa", "llama_mha_tied", "qwen2", "qwen3"])
def test_quantised_weights_compute_as_their_dequantised_values_would(tmp_path, name, precision):
    config = checkpoints.CONFIGS[name]
    made = recipe(precision)
    engine, values = compiled(tmp_path, config, made)
    dequantised = dict(values)
    for tensor, value in values.items():
        if value.ndim == 2 and (precision == "int8" or tensor in READ_OUT):
            dequantised[tensor] = dequantized(quantize_int8(value))
        elif value.ndim == 2:
            dequantised[tensor] = dequantized(quantize_int4(value, 32))
    expected = numpy_llama.logits(config, dequantised, PROMPT)
    np.testing.assert_allclose(logits(engine, properties(made), PROMPT), expected, atol=0.02)


@pytest.mark.parametrize(
    ("precision", "kv_cache_precision", "root_mean_square", "top1"),
    [("bf16", "u8", 0.1, 0.9), ("fp16", "f16", 0.01, 0.96), ("int8", "f16", 0.25, 0.8), ("int8", "u8", 0.35, 0.75)],
)
def test_logits_stay_near_the_exact_ones(tmp_path, precision, kv_cache_precision, root_mean_square, top1):
    """Of random weights, whose logits (standard deviation 2) are close to each other; trained ones do far better."""
    made = recipe(precision, kv_cache_precision)
    engine, values = compiled(tmp_path, LLAMA, made)
    ids = [int(i) for i in np.random.default_rng(12).integers(0, 256, 120)]
    expected, found = numpy_llama.logits(LLAMA, values, ids), logits(engine, properties(made), ids)
    assert np.sqrt(np.mean((found - expected) ** 2)) < root_mean_square
    assert np.mean(found.argmax(-1) == expected.argmax(-1)) > top1


def test_fewer_bits_make_a_smaller_file_and_a_tied_matrix_is_stored_once(tmp_path):
    sizes = {}
    for precision in ("fp32", "bf16", "int8", "int4"):
        engine, values = compiled(tmp_path / precision, checkpoints.CONFIGS["llama_mha_tied"], recipe(precision))
        sizes[precision] = (engine / "openvino_model.bin").stat().st_size
    parameters = sum(value.size for value in values.values())
    assert sizes["fp32"] < 4.1 * parameters and sizes["bf16"] < 2.1 * parameters and sizes["int8"] < 1.2 * parameters
    assert sizes["int4"] < 0.9 * sizes["int8"]


def test_the_folder_holds_everything_a_server_needs(tmp_path):
    engine, _ = compiled(tmp_path, LLAMA, recipe("bf16"))
    assert sorted(p.name for p in engine.iterdir()) == [
        "config.json",
        "generation_config.json",
        "grammar_checker",
        "openvino_detokenizer.bin",
        "openvino_detokenizer.xml",
        "openvino_model.bin",
        "openvino_model.xml",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (engine / name).read_bytes() == (tmp_path / "checkpoint" / name).read_bytes()


def test_end_ids_are_a_list_and_other_generation_settings_stay(tmp_path):
    checkpoints.write(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9, "temperature": 0.6, "do_sample": true}')
    (tmp_path / "engine").mkdir()
    compile_cpu(open_checkpoint(tmp_path), recipe("int8"), tmp_path / "engine", lambda line: None)
    written = json.loads((tmp_path / "engine" / "generation_config.json").read_text())
    end_of_turn = 256  # the eos_token of tokenizer_config.json
    assert written == {"eos_token_id": [9, end_of_turn], "temperature": 0.6, "do_sample": True}


def test_a_chat_template_of_its_own_file_comes_along(tmp_path):
    checkpoints.write(tmp_path, LLAMA)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "engine").mkdir()
    compile_cpu(open_checkpoint(tmp_path), recipe("int8"), tmp_path / "engine", lambda line: None)
    assert (tmp_path / "engine" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "engine" / "tokenizer_config.json").read_text()) == {}


def test_a_model_that_never_ends_is_refused(tmp_path):
    config = {key: value for key, value in LLAMA.items() if key != "eos_token_id"}
    checkpoints.write(tmp_path, config | {"eos_token_id": None})
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "engine").mkdir()
    with pytest.raises(CheckpointError, match=r"neither generation_config.json nor config.json has an eos_token_id"):
        compile_cpu(open_checkpoint(tmp_path), recipe("int8"), tmp_path / "engine", lambda line: None)
    assert list((tmp_path / "engine").iterdir()) == []


def test_progress_is_said_before_each_long_step(tmp_path):
    checkpoints.write(tmp_path / "c", LLAMA)
    (tmp_path / "engine").mkdir()
    lines = []
    compile_cpu(open_checkpoint(tmp_path / "c"), recipe("int4"), tmp_path / "engine", lines.append)
    assert lines[0] == "LlamaForCausalLM, 0.1 M parameters: weights to int4"
    assert lines[-1] == "writing openvino_model.xml and openvino_model.bin"


@pytest.mark.parametrize(
    ("precision", "kv", "expected"),
    [
        ("int8", "u8", {"KV_CACHE_PRECISION": "u8"}),
        ("int8_sq", "u8", {"KV_CACHE_PRECISION": "u8"}),
        ("bf16", "bf16", {"KV_CACHE_PRECISION": "bf16", "INFERENCE_PRECISION_HINT": "bf16"}),
        ("int4", "f16", {"KV_CACHE_PRECISION": "f16", "INFERENCE_PRECISION_HINT": "f32"}),
        ("bf16", "f32", {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}),
        ("fp32", "u8", {"KV_CACHE_PRECISION": "u8", "INFERENCE_PRECISION_HINT": "f32"}),
    ],
)
def test_every_pair_of_precisions_opens_and_generates(tmp_path, precision, kv, expected):
    if kv == "bf16" and "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU does not compute in bf16")
    made = recipe(precision, kv, **({"calibration": {"size": 2}} if precision == "int8_sq" else {}))
    exact = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"} if expected.get("INFERENCE_PRECISION_HINT") == "f32" else {}
    assert properties(made) == expected | exact
    engine, _ = compiled(tmp_path, LLAMA, made)
    assert [len(ids) for ids in generate(engine, properties(made), [PROMPT], 3)] == [3]


def test_bf16_keys_do_not_go_with_fp32_weights(tmp_path):
    checkpoints.write(tmp_path / "c", LLAMA)
    made = dataclasses.replace(recipe("int8"), precision="fp32", kv_cache_precision="bf16")
    with pytest.raises(InvalidArgument, match="kv_cache_precision: must be f32, f16 or u8"):
        compile_cpu(open_checkpoint(tmp_path / "c"), made, tmp_path / "nowhere", lambda line: None)


def test_neither_torch_nor_nncf_is_imported():
    code = "import sys; from build.package import compile_cpu; print({'torch', 'nncf'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=layout.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_adapters_are_refused_for_a_graph_that_another_program_writes(tmp_path):
    checkpoints.write(tmp_path, LLAMA)
    opened = open_checkpoint(tmp_path)
    exported = dataclasses.replace(opened, architecture=dataclasses.replace(opened.architecture, exported=True))
    made = recipe("bf16", adapters=[{"name": "poet", "path": "no/such"}])
    with pytest.raises(InvalidArgument, match="adapters: must be left out for .* optimum-intel writes; got poet"):
        check(exported, made)


def test_activations_in_8_bits_are_refused_with_adapters_and_for_exported_graphs(tmp_path):
    checkpoints.write(tmp_path, LLAMA)
    opened = open_checkpoint(tmp_path)
    made = recipe("int8_sq", adapters=[{"name": "poet", "path": "no/such"}])
    with pytest.raises(InvalidArgument, match="adapters: must be left out with precision 'int8_sq'.*; got poet"):
        check(opened, made)
    exported = dataclasses.replace(opened, architecture=dataclasses.replace(opened.architecture, exported=True))
    with pytest.raises(InvalidArgument, match="precision: must be .* optimum-intel writes; got 'int8_sq'"):
        check(exported, recipe("int8_sq"))


def test_a_graph_that_continuous_batching_would_change_is_refused(tmp_path, monkeypatch):
    engine, _ = compiled(tmp_path / "as-written", LLAMA, made := recipe("fp32"))
    arch = open_checkpoint(tmp_path / "as-written" / "checkpoint").architecture
    require_servable(engine, properties(made), arch)
    plain = graph._attention_bias

    def by_distance(mask, new):  # as ALiBi: near keys count for more
        bias = plain(mask, new)
        keys = graph.ops.convert(graph.ops.cum_sum(mask, graph.i64(1)), ov.Type.f32)
        return graph.ops.add(bias, graph.ops.unsqueeze(keys, graph.i64([1, 2])))

    monkeypatch.setattr(graph, "_attention_bias", by_distance)
    engine, _ = compiled(tmp_path / "biased", LLAMA, made)
    with pytest.raises(CheckpointError, match="continuous batching: it leaves out a part of the attention: log prob"):
        require_servable(engine, properties(made), arch)
