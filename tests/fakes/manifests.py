"""Engine manifests for tests that need one and build no engine."""

from __future__ import annotations

import dataclasses

from contract.manifest import EngineManifest

DIGEST = "0" * 64


def manifest(**changes: object) -> EngineManifest:
    """Return a small CPU engine's manifest with some fields changed."""
    small = EngineManifest(
        name="tiny",
        kind="cpu",
        model="some/model",
        architecture="LlamaForCausalLM",
        checkpoint_sha256=DIGEST,
        recipe={"precision": "int8", "max_seq_len": 512},
        recipe_sha256=DIGEST,
        precision="int8",
        kv_cache_precision="u8",
        max_batch_size=8,
        max_num_tokens=512,
        max_seq_len=1024,
        kv_cache_tokens=32_768,
        vocab_size=4096,
        eos_token_ids=(0,),
        bos_token_id=None,
        pad_token_id=None,
        tokenizer_sha256=DIGEST,
        versions={"openvino": "2026.4.1-1", "openvino_genai": "2026.4.1.0"},
        created="2026-01-01T00:00:00+00:00",
        files={"config.json": DIGEST, "tokenizer.json": DIGEST},
    )
    return dataclasses.replace(small, **changes)  # type: ignore[arg-type]
