"""Requests and outputs of TensorRT-LLM's LLM API: the only importer of ``tensorrt_llm``.

Ids in, ids out: a tokenizer is opened for grammars only. Only the request's stop ids end a sequence, and they stay in
its output, as with the CPU engine; so the LLM's own end id is switched off.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from contract.generation import Guide, SamplingParams
from contract.manifest import EngineManifest
from python_backends.adapters import AdapterIds, adapter_folder
from python_backends.ensemble.token_increment import StreamEvent, TopLogProbs
from python_backends.ensemble.worker_messages import AddSequence, StepOutput
from python_backends.grammar.checker import TOKENIZER_INFO

NO_END_ID = -1
Named = Callable[[np.ndarray], tuple[np.ndarray, dict[str, object]]]
EVENTS = {"stop": StreamEvent.STOP, "length": StreamEvent.LENGTH, "cancelled": StreamEvent.CANCELLED}


def llm_arguments(engine_dir: Path, manifest: EngineManifest) -> dict[str, object]:
    """Return the arguments of ``tensorrt_llm.LLM``: only those that 1.3, which has no compiled engines, still has."""
    recipe: Mapping[str, Any] = manifest.recipe
    vocabulary: dict[str, object] = {"skip_tokenizer_init": True}
    if (engine_dir / TOKENIZER_INFO).is_file():  # grammars need one; texts never reach it
        vocabulary = {"tokenizer": str(engine_dir), "guided_decoding_backend": "xgrammar"}
    return vocabulary | {
        "model": str(engine_dir / "checkpoint"),
        "tensor_parallel_size": int(recipe["tp"]),
        "pipeline_parallel_size": int(recipe["pp"]),
        "max_batch_size": manifest.max_batch_size,
        "max_num_tokens": manifest.max_num_tokens,
        "max_seq_len": manifest.max_seq_len,
        "enable_chunked_prefill": bool(recipe["chunked_context"]),
        "enable_iter_perf_stats": True,
    }


def kv_cache_arguments(manifest: EngineManifest) -> dict[str, object]:
    """Return the arguments of ``KvCacheConfig``."""
    recipe: Mapping[str, Any] = manifest.recipe
    return {
        "enable_block_reuse": bool(recipe["prefix_reuse"]),
        "free_gpu_memory_fraction": float(recipe["kv_cache_fraction"]),
        "max_tokens": manifest.kv_cache_tokens,
        "dtype": manifest.kv_cache_precision,
    }


def open_llm(engine_dir: Path, manifest: EngineManifest) -> Any:
    """Load the checkpoint onto the GPUs; takes minutes for a large one."""
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import KvCacheConfig

    kv_cache = KvCacheConfig(**kv_cache_arguments(manifest))
    if not manifest.adapters:
        return LLM(**llm_arguments(engine_dir, manifest), kv_cache_config=kv_cache)
    from tensorrt_llm.lora_helper import LoraConfig

    modules, count = manifest.properties["lora_target_modules"].split(), len(manifest.adapters)
    rank = max(adapter.rank for adapter in manifest.adapters)
    lora = LoraConfig(lora_target_modules=modules, max_lora_rank=rank, max_loras=count, max_cpu_loras=count)
    return LLM(**llm_arguments(engine_dir, manifest), kv_cache_config=kv_cache, enable_lora=True, lora_config=lora)


def named_adapter(engine_dir: Path, adapters: AdapterIds, marked: np.ndarray) -> tuple[np.ndarray, dict[str, object]]:
    """Return a prompt's ids without the mark of an adapter, and the arguments that name it to ``generate_async``."""
    number, ids = adapters.unmark(marked)
    if not number:
        return ids, {}
    from tensorrt_llm.executor import LoRARequest

    return ids, {"lora_request": LoRARequest(adapters.name(number), number, str(adapter_folder(engine_dir, number)))}


def generate(llm: Any, command: AddSequence, named: Named = lambda ids: (ids, {})) -> Any:
    """Start the sequence. Iterating the result gives its outputs; ``abort()`` ends it. named: as ``named_adapter``."""
    from tensorrt_llm import SamplingParams as LlmSamplingParams
    from tensorrt_llm.llmapi import GuidedDecodingParams

    given = None if command.guide is None else GuidedDecodingParams(**guide_arguments(command.guide))
    guided = {} if given is None else {"guided_decoding": given}
    sampling = LlmSamplingParams(**sampling_arguments(command), **guided)
    # 1.2 has no priorities: there only the order in which the scheduler starts requests follows them.
    has_priority = "priority" in inspect.signature(llm.generate_async).parameters
    priority_argument = {"priority": command.priority} if has_priority else {}
    ids, lora = named(command.input_ids)
    return llm.generate_async(ids.tolist(), sampling_params=sampling, streaming=True, **priority_argument, **lora)


def sampling_arguments(command: AddSequence) -> dict[str, object]:
    """Return the arguments of the LLM API's ``SamplingParams``."""
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


def guide_arguments(guide: Guide) -> dict[str, object]:
    """Return the arguments of ``GuidedDecodingParams``: checked guides are grammars or structural tags."""
    return {"structural_tag" if guide.kind == "structural_tag" else "grammar": guide.text}


class CompletionReader:
    """Read the new part of each output of one sequence; the LLM API repeats all earlier ids in every output."""

    def __init__(self, id: int, sampling: SamplingParams) -> None:
        self._id = id
        self._sampling = sampling
        self._read = 0

    @property
    def started(self) -> bool:
        """Whether an id was read."""
        return self._read > 0

    def read(self, completion: Any) -> StepOutput:
        """Return the new ids of a ``CompletionOutput`` and whether they end the sequence."""
        ids = list(completion.token_ids)[self._read :]
        entries = list(completion.logprobs or [])[self._read : self._read + len(ids)]
        self._read += len(ids)
        event, error = StreamEvent.RUNNING, ""
        if completion.finish_reason is not None:
            event = EVENTS.get(completion.finish_reason, StreamEvent.ERROR)
            error = f"the LLM API ended it with {completion.finish_reason!r}" if event is StreamEvent.ERROR else ""
        chosen = [entry[id].logprob for id, entry in zip(ids, entries, strict=False)]
        k = self._sampling.top_log_probs
        top = [_top(entry, k) for entry in entries] if k else []
        return StepOutput(self._id, ids, chosen, event, top, error)


def _top(entry: Mapping[int, Any], k: int) -> TopLogProbs:
    """entry: ``Logprob`` by id, of the chosen id and the likeliest."""
    best = sorted(entry, key=lambda id: -entry[id].logprob)[:k]
    return TopLogProbs(best, [entry[id].logprob for id in best])


def cache_usage(stats: Mapping[str, Any]) -> float:
    """Return the fraction of KV blocks in use from one of ``get_stats_async``'s dictionaries; 0 if it is not there."""
    blocks = stats.get("kvCacheStats") or {}
    most = blocks.get("maxNumBlocks") or 0
    return blocks.get("usedNumBlocks", 0) / most if most else 0.0
