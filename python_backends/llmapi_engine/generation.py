"""What the LLM API is told and what it answers, in its own words: the only importer of ``tensorrt_llm``.

Ids in, ids out: no tokenizer is opened. The stop ids are the whole truth about what ends a sequence and stay in its
output, as with the CPU engine; so the LLM's own end id is switched off.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

from contract.generation import SamplingParams
from contract.manifest import EngineManifest
from python_backends.cpu_engine.top_log_probs import TopLogProbs
from python_backends.ensemble.stream_state import StreamEvent
from python_backends.ensemble.worker_messages import AddSequence, StepOutput

NO_END_ID = -1
EVENTS = {"stop": StreamEvent.STOP, "length": StreamEvent.LENGTH, "cancelled": StreamEvent.CANCELLED}


def llm_arguments(engine_dir: Path, manifest: EngineManifest) -> dict[str, object]:
    """Arguments of ``tensorrt_llm.LLM``; only such as are left in 1.3, where engines are gone."""
    recipe = manifest.recipe
    return {
        "model": str(engine_dir / "checkpoint"),
        "skip_tokenizer_init": True,
        "tensor_parallel_size": int(recipe["tp"]),
        "pipeline_parallel_size": int(recipe["pp"]),
        "max_batch_size": manifest.max_batch_size,
        "max_num_tokens": manifest.max_num_tokens,
        "max_seq_len": manifest.max_seq_len,
        "enable_chunked_prefill": bool(recipe["chunked_context"]),
        "enable_iter_perf_stats": True,
    }


def kv_cache_arguments(manifest: EngineManifest) -> dict[str, object]:
    """Arguments of ``KvCacheConfig``."""
    recipe = manifest.recipe
    return {
        "enable_block_reuse": bool(recipe["prefix_reuse"]),
        "free_gpu_memory_fraction": float(recipe["kv_cache_fraction"]),
        "max_tokens": manifest.kv_cache_tokens,
        "dtype": manifest.kv_cache_precision,
    }


def open_llm(engine_dir: Path, manifest: EngineManifest):
    """Loads the checkpoint onto the GPUs: minutes for a large one."""
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import KvCacheConfig

    kv_cache = KvCacheConfig(**kv_cache_arguments(manifest))
    return LLM(**llm_arguments(engine_dir, manifest), kv_cache_config=kv_cache)


def generate(llm, command: AddSequence):
    """Starts the sequence; the answer is iterated for its outputs, and ``abort()`` ends it."""
    from tensorrt_llm import SamplingParams as LlmSamplingParams

    sampling = LlmSamplingParams(**sampling_arguments(command))
    # 1.2 has no priorities: there the order in which admission lets requests in is all there is.
    known = "priority" in inspect.signature(llm.generate_async).parameters
    urgent = {"priority": command.priority} if known else {}
    return llm.generate_async(command.input_ids.tolist(), sampling_params=sampling, streaming=True, **urgent)


def sampling_arguments(command: AddSequence) -> dict[str, object]:
    """Arguments of the LLM API's ``SamplingParams``."""
    sampling = command.sampling
    arguments: dict[str, object] = {
        "max_tokens": command.max_tokens,
        "end_id": NO_END_ID,
        "stop_token_ids": sorted(command.stop_ids) or None,
        "include_stop_str_in_output": True,
        "detokenize": False,
        "min_tokens": min(sampling.min_tokens, command.max_tokens) or None,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.top_log_probs or sampling.log_probs:
        arguments["logprobs"] = max(1, sampling.top_log_probs)
    if sampling.greedy:
        return arguments | {"top_k": 1}
    chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
    chosen |= {"top_k": sampling.top_k} if sampling.top_k else {}
    return arguments | chosen | ({} if sampling.seed is None else {"seed": sampling.seed})


class Reading:
    """What of one sequence has been passed on. The LLM API repeats all ids with every answer."""

    def __init__(self, id: int, sampling: SamplingParams) -> None:
        self._id = id
        self._sampling = sampling
        self._seen = 0

    @property
    def begun(self) -> bool:
        return self._seen > 0

    def output(self, completion) -> StepOutput:
        """The new part of a ``CompletionOutput``, and how the sequence stands after it."""
        ids = list(completion.token_ids)[self._seen :]
        entries = list(completion.logprobs or [])[self._seen : self._seen + len(ids)]
        self._seen += len(ids)
        event, rejected = StreamEvent.RUNNING, ""
        if completion.finish_reason is not None:
            event = EVENTS.get(completion.finish_reason, StreamEvent.ERROR)
            rejected = f"the LLM API ended it with {completion.finish_reason!r}" if event is StreamEvent.ERROR else ""
        likeliest = [_top(id, entry, self._sampling.top_log_probs) for id, entry in zip(ids, entries, strict=False)]
        chosen = [entry.chosen for entry in likeliest]
        return StepOutput(self._id, ids, chosen, event, likeliest if self._sampling.top_log_probs else [], rejected)


def _top(id: int, entry: Mapping, count: int) -> TopLogProbs:
    """entry: ``Logprob`` by id, of the chosen one and the likeliest."""
    best = sorted(entry, key=lambda other: -entry[other].logprob)[:count]
    return TopLogProbs(entry[id].logprob, best, [entry[other].logprob for other in best])


def cache_usage(stats: Mapping) -> float:
    """Fraction of KV blocks in use, from one of ``get_stats_async``'s dictionaries; 0 where it does not say."""
    blocks = stats.get("kvCacheStats") or {}
    most = blocks.get("maxNumBlocks") or 0
    return blocks.get("usedNumBlocks", 0) / most if most else 0.0
