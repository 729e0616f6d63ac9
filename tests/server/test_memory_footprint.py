"""What preflight counts is what the plan says."""

import json
from dataclasses import asdict

import gpu_recipes
import pytest

from build.base import shape as shapes
from build.recipe import memory, schema
from build.recipe import recipe as recipes
from contract.manifest import EngineManifest
from server.memory_footprint import memory_footprint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def manifest(recipe: recipes.Recipe) -> EngineManifest:
    digest = "0" * 64
    return EngineManifest(
        name=recipe.name,
        kind=recipe.kind,
        model=recipe.model,
        architecture="LlamaForCausalLM",
        checkpoint_sha256=digest,
        recipe=asdict(recipe),
        recipe_sha256=digest,
        precision=recipe.precision,
        kv_cache_precision=recipe.kv_cache_precision,
        max_batch_size=recipe.max_batch_size,
        max_num_tokens=recipe.max_num_tokens,
        max_seq_len=recipe.max_seq_len,
        kv_cache_tokens=recipe.kv_cache_tokens,
        vocab_size=CONFIG["vocab_size"],
        eos_token_ids=(0,),
        bos_token_id=None,
        pad_token_id=None,
        tokenizer_sha256=digest,
        versions={},
        created="2026-01-01T00:00:00Z",
        files={},
    )


CPU = recipes.Recipe("mine", schema.CPU, "m", "int8", "u8", 64, 512, 4096, kv_cache_tokens=262144)


@pytest.mark.parametrize(
    "recipe",
    [
        CPU,
        recipes.Recipe("mine", schema.CPU, "m", "bf16", "f32", 8, 1024, 4096, kv_cache_tokens=32768),
        gpu_recipes.make(kv_cache_tokens=65536),
        gpu_recipes.make(tp=2, kv_cache_tokens=65536),
        gpu_recipes.make(tp=2, pp=2, kv_cache_precision="auto", precision="bf16", kv_cache_tokens=32768),
    ],
    ids=["cpu int8 u8", "cpu bf16 f32", "gpu", "gpu tp 2", "gpu tp 2 pp 2"],
)
def test_pool_and_workspace_are_the_plans(recipe, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arch = shapes.from_config("mine", CONFIG, "test").architecture
    planned = memory.footprint(recipe, arch)
    found = memory_footprint(manifest(recipe), tmp_path)
    context = 0 if recipe.kind == schema.CPU else planned.context_bytes
    assert found.workspace_bytes == planned.activation_bytes + planned.buffer_bytes + context
    assert found.pool_bytes == recipe.kv_cache_tokens * planned.kv_bytes_per_token


def test_without_a_known_config_what_the_manifest_says_is_counted(tmp_path):
    assert memory_footprint(manifest(CPU), tmp_path).workspace_bytes == 0
    assert memory_footprint(manifest(gpu_recipes.make(kv_cache_tokens=32)), tmp_path).workspace_bytes > 0
