"""Texts of an engine with adapters equal those of separately fused models, whatever runs in the batch."""

from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from build.base.checkpoint import open_checkpoint
from build.model import lora_graph
from build.model.weights import quantize_int4, quantize_int8
from build.package import compile_cpu
from build.recipe import recipe as recipes
from python_backends.adapters import AdapterIds
from tests.fakes import adapters, checkpoints, numpy_llama
from tests.fakes.dequantized import dequantized

pytestmark = pytest.mark.slow

_TABLE = {"kind": "cpu", "model": "m", "kv_cache_precision": "f32", "max_batch_size": 8, "max_num_tokens": 64}
_TABLE |= {"max_seq_len": 256, "kv_cache_tokens": 2048, "group_size": 32}
READ_OUT = ("model.embed_tokens.weight", "lm_head.weight")
RANDOM = np.random.default_rng(5)
CHATS = [[checkpoints.BOS, *RANDOM.integers(0, 250, length).tolist()] for length in (3, 30, 41, 20, 33, 9)]
TEXTS = [RANDOM.integers(0, 250, length).tolist() for length in (1, 35, 18)]


def stored(values: dict[str, np.ndarray], precision: str) -> dict[str, np.ndarray]:
    """The values that an engine's matrices stand for."""
    found = dict(values)
    for name, value in values.items():
        if value.ndim == 2 and precision in ("int8", "int4"):
            four = precision == "int4" and name not in READ_OUT
            found[name] = dequantized(quantize_int4(value, 32) if four else quantize_int8(value))
    return found


def build(folder: Path, config: dict, precision: str, specs: list[dict], kv: str = "f32"):
    """(engine folder, properties, ids of the adapters, [values without an adapter, with the first, ...])."""
    base = stored(checkpoints.write(folder / "model", config), precision)
    fused = [adapters.write(folder / f"lora-{at}", base, seed=at, **spec) for at, spec in enumerate(specs)]
    listed = [{"name": f"lora-{at}", "path": str(folder / f"lora-{at}")} for at in range(len(specs))]
    table = _TABLE | {"precision": precision, "kv_cache_precision": kv, "adapters": listed}
    made = recipes.parse(table, Path("tiny.toml"))
    (folder / "engine").mkdir()
    checkpoint = open_checkpoint(folder / "model")
    compile_cpu.compile_cpu(checkpoint, made, folder / "engine", lambda line: None)
    names = tuple(entry["name"] for entry in listed)
    ids = AdapterIds(names, config["vocab_size"], compile_cpu.adapter_first_token_id(checkpoint, made))
    return folder / "engine", compile_cpu.properties(made), ids, [base, *fused]


def open_pipeline(engine: Path, properties: dict[str, str]) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks, scheduler.max_num_batched_tokens, scheduler.dynamic_split_fuse = 64, 16, True
    scheduler.enable_prefix_caching = True
    return genai.ContinuousBatchingPipeline(str(engine), scheduler, "CPU", properties)


def generate(pipeline, prompts: list[list[int]], tokens: int = 16, **settings: float) -> list[list[int]]:
    config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, **settings)
    handles = [pipeline.add_request(at, ov.Tensor(np.array([ids])), config) for at, ids in enumerate(prompts)]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return [[token for output in handle.read_all() for token in output.generated_ids] for handle in handles]


ODD = [
    {"rank": 1},
    {"rank": 7, "targets": ("q_proj", "v_proj"), "size": 1.5},
    {"rank": 13, "targets": ("down_proj", "o_proj")},
]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama_gqa", "fp32"),
        ("llama_bias_llama3_rope", "bf16"),
        ("qwen3", "bf16"),
        ("llama_mha_tied", "int8"),
        ("qwen2", "int4"),
    ],
)
def test_texts_in_a_mixed_batch_equal_those_of_fused_models(tmp_path, name, precision):
    config = checkpoints.CONFIGS[name]
    engine, properties, ids, fused = build(tmp_path, config, precision, ODD)
    pipeline = open_pipeline(engine, properties)
    prompts = [*CHATS, *TEXTS]
    plan = [0, 1, 2, 3, 0, 1, 3, 2, 1]
    expected = [numpy_llama.greedy(config, fused[a], p, 16) for p, a in zip(prompts, plan, strict=True)]
    plain = [numpy_llama.greedy(config, fused[0], p, 16) for p in prompts]
    assert sum(x != y for x, y in zip(expected, plain, strict=True)) >= 6  # the adapters matter
    for _ in range(2):  # the second time from the prefix cache
        marked = [ids.mark(np.array(p), a).tolist() for p, a in zip(prompts, plan, strict=True)]
        assert generate(pipeline, marked) == expected


parts = st.lists(st.tuples(st.integers(1, 2000), st.integers(0, 200)), min_size=1, max_size=3)


@given(parts)
def test_matrices_share_a_product_where_that_leaves_few_zeros(sizes):
    found = [lora_graph._Part(np.empty((ranks, 1)), np.empty((rows, ranks)), [0] * ranks) for rows, ranks in sizes]
    groups = lora_graph._groups(found)
    assert [part for group in groups for part in found[group]] == found  # each once, in order

    def zeros(own: list[tuple[int, int]]) -> int:
        rows, ranks = (sum(values) for values in zip(*own, strict=True))
        return rows * ranks - sum(rows * ranks for rows, ranks in own)

    for group in groups:
        assert group.stop > group.start and zeros(sizes[group]) <= lora_graph._MOST_ZEROS
    for group in groups[1:]:  # none was parted without need
        assert zeros(sizes[groups[groups.index(group) - 1].start : group.start + 1]) > lora_graph._MOST_ZEROS


EXACT = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


VALUES_ONLY = [{"rank": 7, "targets": ("v_proj",), "size": 1.5} for _ in ODD]


@pytest.mark.parametrize(
    ("precision", "most_zeros", "few_ranks", "specs"),
    [
        ("bf16", 65536, 64, ODD),
        ("int8", 65536, 64, ODD),
        ("bf16", 0, 64, ODD),
        ("int8", 0, 0, ODD),
        ("int8", 0, 0, VALUES_ONLY),
        ("int8", 200, 0, VALUES_ONLY),
    ],
)
def test_the_fast_form_is_the_same_function_but_for_the_rounding_of_the_adapters(
    tmp_path, monkeypatch, precision, most_zeros, few_ranks, specs
):
    monkeypatch.setattr(lora_graph, "_MOST_ZEROS", most_zeros)
    monkeypatch.setattr(lora_graph, "_FEW_RANKS", few_ranks)
    config = checkpoints.CONFIGS["llama_bias_llama3_rope"]
    engine, _, ids, fused = build(tmp_path, config, precision, specs, kv="u8")
    request = ov.Core().compile_model(str(engine / "openvino_model.xml"), "CPU", EXACT).create_infer_request()
    for adapter, prompt in ((0, TEXTS[1]), (1, CHATS[2]), (2, TEXTS[1]), (3, CHATS[2])):
        request.reset_state()
        inputs = {"input_ids": ids.mark(np.array(prompt), adapter)[None], "beam_idx": np.zeros(1, np.int32)}
        inputs |= {"attention_mask": np.ones((1, len(prompt)), np.int64), "position_ids": np.arange(len(prompt))[None]}
        found = request.infer(inputs)["logits"][0]
        expected = numpy_llama.logits(config, fused[adapter], prompt)
        assert (found[:, config["vocab_size"] :] < -1e6).all()
        error = np.sqrt(np.mean((found[:, : config["vocab_size"]] - expected) ** 2)) / expected.std()
        assert error < (1e-4 if adapter == 0 else 0.05), (adapter, error)
        if adapter:  # far from the other models
            other = numpy_llama.logits(config, fused[0], prompt)
            assert np.sqrt(np.mean((other - expected) ** 2)) / expected.std() > 0.3


def test_penalties_count_the_ids_of_a_prompt_under_an_adapter(tmp_path):
    config = checkpoints.CONFIGS["llama_mha_tied"]
    engine, properties, ids, fused = build(tmp_path, config, "fp32", ODD[:1])
    values = fused[1]
    checkpoints.write(tmp_path / "fused", config, dtype="F32")
    checkpoints.write_weights(tmp_path / "fused", values, dtype="F32")
    made = recipes.parse({**_TABLE, "precision": "fp32"}, Path("fused.toml"))
    (tmp_path / "alone").mkdir()
    compile_cpu.compile_cpu(open_checkpoint(tmp_path / "fused"), made, tmp_path / "alone", lambda line: None)
    prompt = [*CHATS[1], checkpoints.BOS, 7]  # the marked id itself counts only where it stands again
    settings = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    expected = generate(open_pipeline(tmp_path / "alone", properties), [prompt], **settings)
    assert generate(open_pipeline(engine, properties), [ids.mark(np.array(prompt), 1).tolist()], **settings) == expected
