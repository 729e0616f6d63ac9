"""Memory that an engine needs beside its weights: KV pool and workspace, from its manifest and its config.json.

``build.recipe.memory`` explains the formulas. They are repeated here because ``build/`` is absent where engines are
only served; a test compares the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contract.manifest import EngineManifest

KV_BYTES = {"u8": 1, "fp8": 1, "int8": 1, "f16": 2, "bf16": 2, "auto": 2, "f32": 4}
U8_SCALE_BYTES = 8  # per head and token: scale and zero point
CONTEXT_BYTES = int(0.76 * 1024**3)
WORKSPACE_BYTES = 32 * 1024**2
SEQUENCE_BYTES, SEQUENCE_VOCAB_BYTES = 650_000, 24.8
ACTIVATIONS_IN_8_BITS = ("fp8", "fp8_pc_pt", "w4a8_awq", "int8_sq", "nvfp4")


@dataclass(frozen=True)
class MemoryFootprint:
    """Memory on the rank that needs most; on the CPU, of the engine process.

    pool_tokens: KV tokens that must fit.
    pool_bytes, workspace_bytes: in bytes.
    """

    pool_tokens: int
    pool_bytes: int
    workspace_bytes: int


def memory_footprint(manifest: EngineManifest, folder: Path) -> MemoryFootprint:
    """Return the memory that the engine in ``folder`` needs beside its weights.

    An engine that sizes its pool when it loads needs one for a sequence of max_seq_len at least. Without a known
    config.json in the folder only the values of the manifest are counted.
    """
    tokens = manifest.kv_cache_tokens or (0 if manifest.kind == "cpu" else manifest.max_seq_len)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        per_token = _kv_bytes_per_token(manifest, config)
        activations = _activation_bytes(manifest, config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        per_token = activations = 0
    beside = 0 if manifest.kind == "cpu" else CONTEXT_BYTES + _buffer_bytes(manifest)
    return MemoryFootprint(tokens, tokens * per_token, activations + beside)


def _head_size(config: Mapping[str, int]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _kv_heads(config: Mapping[str, int]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _kv_bytes_per_token(manifest: EngineManifest, config: Mapping[str, int]) -> int:
    tp, pp = parallelism(manifest)
    scale = U8_SCALE_BYTES if manifest.kv_cache_precision == "u8" else 0
    per_head = _head_size(config) * KV_BYTES[manifest.kv_cache_precision] + scale
    return 2 * -(-config["num_hidden_layers"] // pp) * max(1, _kv_heads(config) // tp) * per_head


def _activation_bytes(manifest: EngineManifest, config: Mapping[str, int]) -> int:
    tp, _ = parallelism(manifest)
    hidden = config["hidden_size"]
    attention = (2 * config["num_attention_heads"] + 2 * _kv_heads(config)) * _head_size(config)
    widest = max(config.get("intermediate_size", 0), attention // 2) / tp
    if manifest.kind == "cpu":
        per_token = 4 * (2 * widest + 5 * hidden)
        return int(manifest.max_num_tokens * per_token + manifest.max_batch_size * manifest.vocab_size * 4)
    copies = 5 if manifest.precision in ACTIVATIONS_IN_8_BITS else 2
    per_token = 2 * (2 * widest + copies * hidden)
    options = manifest.recipe.get("build") or {}
    gathered = any(options.get(key) for key in ("gather_context_logits", "gather_all_token_logits"))
    rows = manifest.max_num_tokens if gathered else _sequences(manifest)
    return int(WORKSPACE_BYTES + manifest.max_num_tokens * per_token + rows * manifest.vocab_size / tp * 2)


def _buffer_bytes(manifest: EngineManifest) -> int:
    return int(_sequences(manifest) * (SEQUENCE_BYTES + SEQUENCE_VOCAB_BYTES * manifest.vocab_size))


def _sequences(manifest: EngineManifest) -> int:
    return manifest.max_batch_size * int(manifest.recipe.get("max_beam_width") or 1)


def parallelism(manifest: EngineManifest) -> tuple[int, int]:
    """Return the numbers of tensor-parallel and of pipeline-parallel ranks."""
    return int(manifest.recipe.get("tp") or 1), int(manifest.recipe.get("pp") or 1)
