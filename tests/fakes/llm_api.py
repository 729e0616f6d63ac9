"""The few calls of TensorRT-LLM's LLM API that our engine makes, with their names, types and manners.

``install`` puts them where ``import tensorrt_llm`` finds them. A sequence generates the ids 1, 2, 3, … one per turn of
the event loop; every answer repeats all ids so far, as the real one's does. Unknown arguments are TypeErrors.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class SamplingParams:
    end_id: int | None = None
    max_tokens: int = 32
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None


@dataclass
class GuidedDecodingParams:
    json: str | dict | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass
class KvCacheConfig:
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float | None = None
    dtype: str = "auto"


@dataclass
class LoraConfig:
    lora_dir: list[str] = field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = field(default_factory=list)
    max_loras: int | None = None
    max_cpu_loras: int | None = None


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if not Path(self.lora_path).is_dir():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """What ``generate_async`` returns: iterate it for its states."""

    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    pause: asyncio.Event | None = None
    outputs: list[CompletionOutput] = field(default_factory=lambda: [CompletionOutput()])
    finished: bool = False
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True
        if self.pause is not None:
            self.pause.set()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        output, sampling = self.outputs[0], self.sampling_params
        if 13 in self.prompt_token_ids:
            raise RuntimeError("Traceback\nthe executor refuses 13")
        while not self.finished:
            await asyncio.sleep(0)
            if self.pause is not None and len(output.token_ids) == 2:
                await self.pause.wait()
            if self.aborted:
                output.finish_reason = "cancelled"
            else:
                id = len(output.token_ids) + 1
                output.token_ids.append(id)
                if sampling.logprobs is not None:
                    likeliest = {id: Logprob(-0.5, 1), id + 100: Logprob(-1.5, 2), id + 200: Logprob(-2.5, 3)}
                    output.logprobs = [*(output.logprobs or []), dict(list(likeliest.items())[: sampling.logprobs + 1])]
                if id in (sampling.stop_token_ids or []):
                    output.finish_reason, output.stop_reason = "stop", id
                elif id >= sampling.max_tokens:
                    output.finish_reason = "length"
            self.finished = output.finish_reason is not None
            yield self


class LLM:
    """paused: sequences stop after two ids until they are aborted."""

    paused = False
    fails_to_load = ""
    opened: list[LLM] = []

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        guided_decoding_backend: str | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        max_seq_len: int | None = None,
        enable_chunked_prefill: bool = False,
        enable_iter_perf_stats: bool = False,
        kv_cache_config: KvCacheConfig | None = None,
        enable_lora: bool = False,
        lora_config: LoraConfig | None = None,
    ) -> None:
        if self.fails_to_load:
            raise RuntimeError(self.fails_to_load)
        self.arguments = {key: value for key, value in locals().items() if key not in ("self", "__class__")}
        self.asked: list[SamplingParams] = []
        self.lora_requests: list[LoRARequest | None] = []
        self.prompts: list[list[int]] = []
        self.is_shut_down = False
        LLM.opened.append(self)

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        *,
        streaming: bool = False,
    ) -> RequestOutput:
        assert streaming and all(type(id) is int for id in inputs)
        assert lora_request is None or self.arguments["lora_config"] is not None
        self.lora_requests.append(lora_request)
        self.prompts.append(inputs)
        sampling_params = sampling_params or SamplingParams()
        self.asked.append(sampling_params)
        return RequestOutput(list(inputs), sampling_params, asyncio.Event() if self.paused else None)

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict]:
        yield {"kvCacheStats": {"maxNumBlocks": 8, "usedNumBlocks": 2}}

    def shutdown(self) -> None:
        self.is_shut_down = True


class LLM13(LLM):
    """As from 1.3 on: with priorities."""

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        *,
        streaming: bool = False,
        priority: float = 0.5,
    ) -> RequestOutput:
        self.priorities = [*getattr(self, "priorities", []), priority]
        return super().generate_async(inputs, sampling_params, streaming=streaming)


def install(monkeypatch) -> type[LLM]:
    """The fake under the real names, fresh, until the test ends."""
    root, llmapi = types.ModuleType("tensorrt_llm"), types.ModuleType("tensorrt_llm.llmapi")
    fresh = type("LLM", (LLM,), {"opened": []})
    monkeypatch.setattr(LLM, "opened", fresh.opened)
    llmapi.GuidedDecodingParams = GuidedDecodingParams
    executor, helper = types.ModuleType("tensorrt_llm.executor"), types.ModuleType("tensorrt_llm.lora_helper")
    executor.LoRARequest, helper.LoraConfig = LoRARequest, LoraConfig
    for module in (executor, helper):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    root.LLM, root.SamplingParams, llmapi.KvCacheConfig, root.llmapi = fresh, SamplingParams, KvCacheConfig, llmapi
    monkeypatch.setitem(sys.modules, "tensorrt_llm", root)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", llmapi)
    return fresh
