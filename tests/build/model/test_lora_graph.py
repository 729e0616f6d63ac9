"""Texts of an engine with adapters equal those of separately fused models, whatever runs in the batch."""

from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest

from build.base.checkpoint import open_checkpoint
from build.model.weights import quantize_int4, quantize_int8
from build.package import compile_cpu
from build.recipe import recipe as recipes
from python_backends.adapter_ids import AdapterIds
from tests.fakes import adapters, checkpoints, numpy_llama

pytestmark = pytest.mark.slow

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
            found[name] = (quantize_int4(value, 32) if four else quantize_int8(value)).dequantized()
    return found


def build(folder: Path, config: dict, precision: str, specs: list[dict], kv: str = "f32"):
    """(engine folder, properties, ids of the adapters, [values without an adapter, with the first, ...])."""
    base = stored(checkpoints.write(folder / "model", config), precision)
    fused = [adapters.write(folder / f"lora-{at}", base, seed=at, **spec) for at, spec in enumerate(specs)]
    listed = [{"name": f"lora-{at}", "path": str(folder / f"lora-{at}")} for at in range(len(specs))]
    table = {"kind": "cpu", "model": "m", "precision": precision, "kv_cache_precision": kv, "adapters": listed}
    limits = {"max_batch_size": 8, "max_num_tokens": 64, "max_seq_len": 256, "kv_cache_tokens": 2048, "group_size": 32}
    made = recipes.parse(table | limits, Path("tiny.toml"))
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
