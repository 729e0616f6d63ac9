"""The OpenVINO GenAI pipelines of an engine folder, sized by its manifest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai

from contract.manifest import DRAFT, EngineManifest
from contract.scheduling import BLOCK_TOKENS
from python_backends.cpu_engine.drafting import Drafting
from python_backends.limits import EngineLimits


def open_pipeline(
    engine_dir: Path, manifest: EngineManifest, properties: dict[str, object] | None = None, blocks: int | None = None
) -> genai.ContinuousBatchingPipeline:
    """Load the weights and allocate the KV cache: 0.4 s for a 10M-parameter model, about 1 s for 160M.

    properties: beside those of the manifest.
    blocks: of the KV cache, if not those of the manifest.
    """
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = blocks or EngineLimits.from_manifest(manifest).kv_cache_blocks
    scheduler.max_num_seqs = manifest.max_batch_size
    scheduler.max_num_batched_tokens = manifest.max_num_tokens
    # Chunked prefill: a long prompt does not hold up running streams.
    scheduler.dynamic_split_fuse = bool(manifest.recipe["chunked_context"])
    scheduler.enable_prefix_caching = bool(manifest.recipe["prefix_reuse"])
    together = {**manifest.properties, **(properties or {})}
    return genai.ContinuousBatchingPipeline(str(engine_dir), scheduler, "CPU", together)


def open_drafting(engine_dir: Path, manifest: EngineManifest) -> Drafting:
    """Return the rule of an engine; its ``load`` loads the weights a second time, into the pipeline that drafts."""
    limits, declared = EngineLimits.from_manifest(manifest), manifest.recipe.get("speculative_decoding")
    if not declared:
        return Drafting(None, limits)
    lookup = declared["mode"] == "prompt_lookup"
    ngram_size = declared["ngram_size"] if lookup else 0

    def load() -> genai.ContinuousBatchingPipeline:
        properties: dict[str, object] = {"prompt_lookup": True}
        if not lookup:
            properties = {"draft_model": genai.draft_model(str(engine_dir / DRAFT), "CPU", **manifest.properties)}
        pipeline = open_pipeline(engine_dir, manifest, properties, limits.draft_pool_blocks)
        # A pipeline's first token takes a third of a second longer, for 135M parameters. The prompt is one whole block:
        # requests that start together corrupt a block that the prefix cache holds in part.
        config = genai.GenerationConfig(max_new_tokens=1, num_assistant_tokens=1, max_ngram_size=ngram_size)
        handle = pipeline.add_request(0, ov.Tensor(np.zeros((1, BLOCK_TOKENS), np.int64)), config)
        while handle.get_status() == genai.GenerationStatus.RUNNING:
            pipeline.step()
        return pipeline

    drafting = Drafting(None, limits, ngram_size)
    drafting.load_with(load)
    return drafting
