"""LoRA adapters on the real server: mixed in one batch, each text is that of its own fused model."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
import tritonclient.grpc.aio as triton
from triton_requests import ask, metric, metrics, responses

from build import engine as builder
from build.base.checkpoint import open_checkpoint
from build.package import compile_cpu
from build.recipe import recipe as recipes
from contract import manifest as manifests
from server.replica import running
from tests.fakes import adapters

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "build" / "demo_model" / "checkpoint"
CHAT = json.dumps([{"role": "user", "content": "Write a function that adds two numbers."}])
TEXT = "def fibonacci(n):\n"
UNUSUAL = [500, 600, 700, 800]  # texts and chats begin with another id
TOKENS = 24
LIMITS = {"max_batch_size": 8, "max_num_tokens": 128, "max_seq_len": 512, "kv_cache_tokens": 4096}
TABLE = {"kind": "cpu", "precision": "bf16", "kv_cache_precision": "f32", **LIMITS}


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """The folder of engines, and by adapter the values of its fused model."""
    folder = tmp_path_factory.mktemp("adapted")
    values = {name: np.array(tensor.f32()) for name, tensor in open_checkpoint(MODEL).tensors.items()}
    poet = adapters.write(folder / "poet", values, rank=5, seed=1, size=0.2)
    lawyer = adapters.write(folder / "lawyer", values, rank=3, seed=2, size=0.5, targets=("q_proj", "up_proj"))
    listed = [{"name": name, "path": str(folder / name)} for name in ("poet", "lawyer")]
    made = recipes.parse(TABLE | {"model": str(MODEL), "adapters": listed}, "adapted.toml")
    builder.build(made, folder / "engines", lambda line: None)
    return folder, {"": values, "poet": poet, "lawyer": lawyer}


@pytest.fixture(scope="module")
def replica(fused):
    with running("adapted", engines_dir=fused[0] / "engines", canary_interval_s=3600, stall_s=3600) as server:
        yield server


@pytest.fixture
async def client(replica):
    async with triton.InferenceServerClient(replica.grpc_url) as connection:
        yield connection


@pytest.fixture(scope="module")
def expected(fused, tmp_path_factory):
    """(adapter, prompt's ids) -> greedy ids of the model with that adapter fused, in an engine of its own."""
    folder, values = fused
    pipelines = {}

    @functools.cache
    def generate(adapter: str, ids: tuple[int, ...]) -> list[int]:
        if adapter not in pipelines:
            model, engine = folder / f"model-{adapter}", folder / f"engine-{adapter}"
            model.mkdir()
            engine.mkdir()
            for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
                (model / name).write_bytes((MODEL / name).read_bytes())
            adapters.save(model / "model.safetensors", values[adapter])
            made = recipes.parse(TABLE | {"model": str(model), "precision": "fp32"}, "fused.toml")
            compile_cpu.compile_cpu(open_checkpoint(model), made, engine, lambda line: None)
            scheduler = genai.SchedulerConfig()
            scheduler.num_kv_blocks = 32
            opened = genai.ContinuousBatchingPipeline(str(engine), scheduler, "CPU", compile_cpu.properties(made))
            pipelines[adapter] = opened
        config = genai.GenerationConfig(max_new_tokens=TOKENS, ignore_eos=True)
        handle = pipelines[adapter].add_request(0, ov.Tensor(np.array([ids])), config)
        while pipelines[adapter].has_non_finished_requests():
            pipelines[adapter].step()
        return [token for output in handle.read_all() for token in output.generated_ids]

    return generate


def test_the_manifest_names_the_adapters_and_the_same_recipe_builds_nothing_again(fused):
    folder, _ = fused
    manifest = manifests.load(folder / "engines" / "adapted")
    assert [(one.name, one.rank) for one in manifest.adapters] == [("poet", 5), ("lawyer", 3)]
    lines = []
    listed = [{"name": name, "path": str(folder / name)} for name in ("poet", "lawyer")]
    made = recipes.parse(TABLE | {"model": str(MODEL), "adapters": listed}, "adapted.toml")
    builder.build(made, folder / "engines", lines.append)
    assert len(lines) == 1 and "is up to date" in lines[0]


async def test_mixed_requests_have_the_texts_of_their_own_models(client, expected):
    choices = [{}, {"lora_task_id": 1}, {"lora_name": "lawyer"}, {"lora_task_id": 0}, {"lora_name": "poet"}]
    prompts = [{"messages": CHAT}, {"text_input": TEXT}, {"input_ids": UNUSUAL}]
    asked = [{**prompt, **choice} for choice in choices for prompt in prompts]
    common = {"max_tokens": TOKENS, "ignore_eos": True, "exclude_input_in_output": False}
    answers = await asyncio.gather(*(ask(client, {**one, **common}) for one in [*asked, *asked]))
    names = {1: "poet", 0: ""}
    texts = set()
    for one, answer in zip([*asked, *asked], answers, strict=True):
        assert not answer.error
        prompt, new = answer.ids[:-TOKENS], answer.ids[-TOKENS:]
        assert max(answer.ids) < 4096 and answer.outputs["num_input_tokens"].item() == len(prompt)
        adapter = one.get("lora_name", names[one.get("lora_task_id", 0)])
        assert new == expected(adapter, tuple(prompt)), one
        texts.add((adapter, answer.text))
    assert len(texts) == 9  # three models, three prompts


async def test_log_probs_and_penalties_go_with_an_adapter(client):
    asked = {"messages": CHAT, "lora_name": "poet", "max_tokens": 8, "ignore_eos": True}
    scored = await ask(client, {**asked, "return_log_probs": True, "num_top_log_probs": 3})
    assert len(scored.log_probs) == 8 and max(scored.log_probs) <= 0 and not scored.error
    assert (scored.outputs["top_log_probs_ids"] < 4096).all()
    assert (await ask(client, asked)).ids == scored.ids
    penalised = await ask(client, {**asked, "repetition_penalty": 1.3, "presence_penalty": 0.5})
    assert not penalised.error and len(penalised.ids) == 8


async def test_a_schema_holds_under_an_adapter(client):
    schema = json.dumps({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]})
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": schema}
    for adapter in ({}, {"lora_name": "poet"}, {"lora_name": "lawyer"}):
        answer = await ask(client, {"messages": CHAT, "max_tokens": 40, **guide, **adapter})
        assert not answer.error and json.loads(answer.text)["n"] in (1, 2), adapter


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"lora_task_id": 3}, "lora_task_id: must be 0 (none) or one of 1 (poet), 2 (lawyer), got 3"),
        ({"lora_name": "nobody"}, "lora_name: must be left out or one of poet, lawyer, got 'nobody'"),
        (
            {"lora_name": "poet", "lora_task_id": 2},
            "lora_task_id: must be 1 or left out beside lora_name 'poet', got 2",
        ),
        (
            {"input_ids": UNUSUAL, "lora_task_id": 2, "repetition_penalty": 1.1},
            "repetition_penalty: must be 1 under a LoRA adapter",
        ),
    ],
)
async def test_a_wrong_adapter_is_refused_with_what_is_allowed(client, inputs, says):
    prompt = {} if "input_ids" in inputs else {"text_input": TEXT}
    assert says in (await ask(client, {**prompt, "max_tokens": 4, **inputs})).error


async def test_the_metrics_tell_which_adapters_run(client, replica):
    before = metric(metrics(replica.metrics_url), "trident_adapter_requests_total", adapter="lawyer")
    asked = {"text_input": TEXT, "lora_name": "lawyer", "max_tokens": 400, "ignore_eos": True, "stream": True}
    running = set()
    async for _result, error in responses(client, asked):
        assert not error
        if 1.0 not in running:
            page = await asyncio.to_thread(metrics, replica.metrics_url)
            running.add(metric(page, "trident_adapter_requests", adapter="lawyer", state="running"))
    assert 1.0 in running
    page = await asyncio.to_thread(metrics, replica.metrics_url)
    assert metric(page, "vllm:lora_requests_info", running_lora_adapters="poet,lawyer", max_lora="2") > 1e9
    assert metric(page, "trident_adapter_requests_total", adapter="lawyer") == before + 1
