"""The engine's metrics on :8002/metrics.

TensorRT-LLM's families, so that routers and dashboards made for them work, and what these lack: latency histograms, the
phases of the first token, cancellations and errors by kind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from contract.scheduling import BLOCK_TOKENS
from python_backends.cpu_engine.stream import Stream
from python_backends.ensemble.token_increment import StreamEvent, TokenIncrement
from python_backends.ensemble.worker_messages import StepReport
from python_backends.metrics import (
    COALESCING_BUCKETS,
    DURATION_BUCKETS,
    PHASES,
    PHASES_HELP,
    TPOT_BUCKETS,
    TTFT_BUCKETS,
    AdapterMetrics,
    Metrics,
)

_SAMPLED = 4  # responses whose latencies one update observes: each is a call to the server process
_LENGTHS = (10, 50, 100, 500, 1000)  # tokens

CANCEL_REASONS = ("client", "stop_request", "deadline", "shutdown")


@dataclass(frozen=True)
class EngineLoad:
    """A snapshot of the engine.

    running, waiting, slots: requests.
    blocks: size of the KV cache.
    running_adapters, waiting_adapters: requests by LoRA adapter, those without one left out.
    """

    running: int
    waiting: int
    slots: int
    blocks: int
    last_step: StepReport
    steps: int
    running_adapters: Mapping[str, int] = field(default_factory=dict)
    waiting_adapters: Mapping[str, int] = field(default_factory=dict)


class EngineMetrics:
    """Update the engine's metrics. Any thread may call it, except ``show``."""

    def __init__(
        self, metrics: Metrics, model: str, version: str, adapters: Sequence[str] = (), drafts: bool = False
    ) -> None:
        """adapters: names of the engine's LoRA adapters. drafts: whether it decodes speculatively."""
        self._metrics = metrics
        names = {"model": model, "version": version}
        histogram: Callable[..., Callable[..., None]] = partial(metrics.histogram, model=model, version=version)
        counter: Callable[..., Callable[..., None]] = partial(metrics.counter, model=model, version=version)
        self._gauges = {
            (family, value): metrics.gauge(family, what, **names, **{label: value})
            for (family, what, label), figures in _figures(EngineLoad(0, 0, 0, 0, StepReport(0, 0), 0)).items()
            for value in figures
        }
        name, what = "nv_llm_input_token_len", "Prompt tokens per request"
        self._input_length = histogram(name, what, _LENGTHS, response_metric_type="total_input_tokens")
        name, what = "nv_llm_output_token_len", "Generated tokens per request"
        self._output_length = histogram(name, what, _LENGTHS, response_metric_type="total_output_tokens")
        name, what = "gen_ai_server_time_to_first_token_seconds", "From arrival to the first token's response"
        self._ttft = histogram(name, what, TTFT_BUCKETS)
        name, what = "gen_ai_server_time_per_output_token_seconds", "Mean time per token after the first, per request"
        self._tpot = histogram(name, what, TPOT_BUCKETS)
        name, what = "gen_ai_server_request_duration_seconds", "From arrival to the last token's response"
        self._duration = histogram(name, what, DURATION_BUCKETS)
        name, what = "trident_inter_token_latency_seconds", "Time between responses over tokens in the later, sampled"
        self._itl = histogram(name, what, TPOT_BUCKETS)
        name, what = "trident_coalescing_wait_seconds", "How long the oldest token of a response waited, sampled"
        self._waited = histogram(name, what, COALESCING_BUCKETS)
        self._sent_s: list[tuple[float, float]] = []  # of a response: since the one before, by tokens; oldest's wait
        self._phases = {
            phase: metrics.histogram(PHASES, PHASES_HELP, TTFT_BUCKETS, model=model, phase=phase)
            for phase in ("tokenize", "queue", "prefill", "first_decode", "detokenize")
        }
        self.decoded = self._phases["detokenize"]  # of a first token's text, for streams that the engine decodes
        self._input_tokens = counter("trident_input_tokens_total", "Tokens of accepted prompts")
        self._output_tokens = counter("trident_output_tokens_total", "Generated tokens")
        name, what = "trident_cached_prompt_tokens_total", "Prompt tokens found in the prefix cache"
        self._cached_tokens = counter(name, what)
        name, what = "trident_requests_total", "Finished requests by finish_reason"
        self._finished = {
            event: counter(name, what, finish_reason=event.name.lower()) for event in StreamEvent if event.last
        }
        name, what = "trident_cancellations_total", "Requests ended early, by reason"
        self._cancellations = {reason: counter(name, what, reason=reason) for reason in CANCEL_REASONS}
        self.refused = metrics.errors(**names)
        if drafts:
            self._draft_steps = counter("trident_speculative_steps_total", "Steps of sequences that draft")
            what = "Draft tokens accepted; over trident_speculative_steps_total: the tokens gained per step"
            self._accepted_drafts = counter("trident_speculative_accepted_tokens_total", what)
        self._adapters = AdapterMetrics(metrics, adapters, **names)
        name, what = "trident_adapter_requests", "Requests by LoRA adapter and state"
        self._adapter_requests = {
            (adapter, state): metrics.gauge(name, what, **names, adapter=adapter, state=state)
            for adapter in adapters
            for state in ("running", "waiting")
        }

    def accepted(self, stream: Stream) -> None:
        """Count an accepted request."""
        self._input_tokens(stream.request.prompt_ids.size)
        self._input_length(stream.request.prompt_ids.size)
        if stream.request.adapter:
            self._adapters.accepted(stream.request.adapter)

    def drafted(self, steps: int, accepted: int) -> None:
        """Count what speculative decoding gained in one engine step."""
        self._draft_steps(steps)
        self._accepted_drafts(accepted)

    def cancelled(self, reason: str) -> None:
        """Count a request that ended early; ``reason`` is one of CANCEL_REASONS."""
        self._cancellations[reason](1)

    def sent(self, responses: Iterable[tuple[Stream, TokenIncrement]]) -> None:
        """Observe the latencies of responses with tokens."""
        for stream, increment in responses:
            state = increment.state
            if state.first:
                request = stream.request
                self._ttft((state.sent_ns - request.arrival_ns) / 1e9)
                self._phases["tokenize"]((request.tokenized_ns - request.arrival_ns) / 1e9)
                self._phases["queue"]((stream.first_scheduled_ns - request.tokenized_ns) / 1e9)
                self._phases["prefill"]((stream.first_token_ns - stream.first_scheduled_ns) / 1e9)
                self._phases["first_decode"]((state.sent_ns - stream.first_token_ns) / 1e9)
            elif stream.since_last_ns and increment.token_ids:
                gap_s = stream.since_last_ns / 1e9 / len(increment.token_ids)
                self._sent_s.append((gap_s, stream.waited_ns / 1e9))

    def finished(self, stream: Stream, now_ns: int) -> None:
        """Observe a stream that has ended."""
        self._finished[stream.event](1)
        if stream.error is not None:
            self.refused(stream.error)
        made = stream.num_output_tokens - stream.request.continued  # by this replica
        self._output_tokens(made)
        self._output_length(made)
        self._cached_tokens(min(stream.num_cached_tokens, stream.request.prompt_ids.size))
        self._duration((now_ns - stream.request.arrival_ns) / 1e9)
        if made > 1:
            self._tpot((stream.last_token_ns - stream.first_token_ns) / 1e9 / (made - 1))

    def show(self, load: EngineLoad) -> None:
        """Set the gauges and send everything pending to Triton; called by the ticker only."""
        sent_s, self._sent_s = self._sent_s, []
        for gap_s, waited_s in random.sample(sent_s, min(len(sent_s), _SAMPLED)):
            self._itl(gap_s)
            self._waited(waited_s)
        for (family, _, _), figures in _figures(load).items():
            for value, figure in figures.items():
                self._gauges[family, value](figure)
        for (adapter, state), show in self._adapter_requests.items():
            show((load.running_adapters if state == "running" else load.waiting_adapters).get(adapter, 0))
        self._metrics.flush()


def _figures(load: EngineLoad) -> dict[tuple[str, str, str], dict[str, float]]:
    """Return the values of the gauges by (family, description, label) and by the label's value.

    Requests come last as they are sent last, while a page lists their family first: a page that says that nothing runs
    has the steps and blocks of what ran.
    """
    step = load.last_step
    used = round(step.cache_usage * load.blocks)
    return {
        ("nv_trt_llm_kv_cache_block_metrics", "KV cache blocks", "kv_cache_block_type"): {
            "max": load.blocks,
            "free": load.blocks - used,
            "used": used,
            "tokens_per": BLOCK_TOKENS,
            "fraction": step.cache_usage,
        },
        ("nv_trt_llm_inflight_batcher_metrics", "The last engine step", "inflight_batcher_specific_metric"): {
            "total_context_tokens": step.context_tokens,
            "generation_requests": sum(1 for output in step.outputs if output.token_ids),
            "micro_batch_id": 0,
            "paused_requests": 0,
        },
        ("nv_trt_llm_general_metrics", "Engine steps", "general_type"): {
            "timestamp": step.end_ns // 1000,
            "iteration_counter": load.steps,
        },
        ("nv_trt_llm_request_metrics", "Requests by state", "request_type"): {
            "active": load.running + load.waiting,
            "max": load.slots,
            "scheduled": load.running,
            "context": step.context,
            "waiting": load.waiting,
        },
    }
