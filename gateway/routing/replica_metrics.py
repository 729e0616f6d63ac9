"""Read a replica's load from its metrics, in the families of TensorRT-LLM's backend (docs/metrics.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from contract import failpoint, packed_delta, prometheus, step_model
from contract.errors import InvalidArgument
from contract.step_model import StepModel

_REQUESTS = "nv_trt_llm_request_metrics"
_KV_CACHE = "nv_trt_llm_kv_cache_block_metrics"
_GENERAL = "nv_trt_llm_general_metrics"
_ENGINE = "trident_engine_info"
_ADAPTERS = "vllm:lora_requests_info"
# Larger numbers of requests are errors of the reporter.
MAX_REQUESTS = 2**31


@dataclass(frozen=True)
class ReplicaMetrics:
    """The load that a replica reports; 0 or "" for what it does not report.

    running, waiting, max_running: requests. kv_usage: fraction of the KV blocks in use, 0 to 1.
    steps: iterations of the engine so far. engine: SHA-256 of its manifest. kind: cpu, llmapi or trtllm.
    adapters: names of its LoRA adapters. step: how long its steps take, if it was calibrated.
    packed: it has the model ``ensemble_packed``.
    """

    running: int = 0
    waiting: int = 0
    max_running: int = 0
    kv_usage: float = 0.0
    steps: float = 0.0
    engine: str = ""
    kind: str = ""
    adapters: tuple[str, ...] = ()
    step: StepModel | None = None
    packed: bool = False


def read(text: str) -> ReplicaMetrics:
    """Read the load from one scrape. Raises ValueError for text that is not Prometheus' format, and for values out of
    range."""
    names = (_REQUESTS, _KV_CACHE, _GENERAL, _ENGINE, _ADAPTERS, step_model.METRIC, packed_delta.METRIC)
    metrics = prometheus.parse(text, names)
    engine = next((labels for labels, _ in metrics.matching(_ENGINE)), {})
    lora = next((labels for labels, _ in metrics.matching(_ADAPTERS)), {})
    slots = failpoint.value("metrics.lie")
    if slots is not None:
        return ReplicaMetrics(max_running=int(slots))
    return ReplicaMetrics(
        running=int(_bounded(metrics, _REQUESTS, MAX_REQUESTS, request_type="scheduled")),
        waiting=int(_bounded(metrics, _REQUESTS, MAX_REQUESTS, request_type="waiting")),
        max_running=int(_bounded(metrics, _REQUESTS, MAX_REQUESTS, request_type="max")),
        kv_usage=min(1.0, _bounded(metrics, _KV_CACHE, MAX_REQUESTS, kv_cache_block_type="fraction")),
        steps=_bounded(metrics, _GENERAL, math.inf, general_type="iteration_counter"),
        engine=engine.get("manifest_sha256", ""),
        kind=engine.get("kind", ""),
        adapters=tuple(filter(None, lora.get("running_lora_adapters", "").split(","))),
        step=_step(metrics, engine.get("manifest_sha256", "")),
        packed=metrics.value(packed_delta.METRIC) == 1,
    )


def _step(metrics: prometheus.Metrics, engine: str) -> StepModel | None:
    terms = metrics.by_label(step_model.METRIC, "term")
    if not terms:
        return None
    try:
        return StepModel.of_exported(engine, terms)
    except InvalidArgument as exc:
        raise ValueError(f"{step_model.METRIC}: {exc}") from exc


def _bounded(metrics: prometheus.Metrics, name: str, limit: float, **labels: str) -> float:
    value = metrics.value(name, **labels)
    if not 0 <= value < limit:  # NaN is not
        raise ValueError(f"{name}, {', '.join(labels.values())}: must be at least 0 and below {limit:g}, got {value}")
    return value
