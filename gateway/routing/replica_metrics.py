"""What a replica's metrics page says of its load, in the families TensorRT-LLM's backend names (docs/metrics.md)."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_REQUESTS = "nv_trt_llm_request_metrics"
_KV_CACHE = "nv_trt_llm_kv_cache_block_metrics"
_STEPS = 'general_type="iteration_counter"'
_ENGINE = "trident_engine_info"
MOST = 2**31


@dataclass(frozen=True)
class PageLoad:
    """running, waiting, max_running: requests; the last is 0 where the page does not say it. kv_usage: fraction of the
    KV blocks in use. steps: the engine's iterations so far, 0 if unsaid. engine: the hash of its manifest, kind: cpu,
    llmapi or trtllm; "" if unsaid."""

    running: int = 0
    waiting: int = 0
    max_running: int = 0
    kv_usage: float = 0.0
    steps: float = 0.0
    engine: str = ""
    kind: str = ""


def read(page: str) -> PageLoad:
    """The load in the page; zeros where it says nothing. Raises ValueError for a page that is none, or that says what
    cannot be."""
    # The page is large and nearly all of it is about something else: the parser sees these families only.
    lines = [line for line in page.splitlines() if line.startswith((_REQUESTS, _KV_CACHE, _ENGINE)) or _STEPS in line]
    values: dict[tuple[str, str], float] = defaultdict(float)
    engine = engine_kind = ""
    steps = 0.0
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.labels.get("general_type") == "iteration_counter":
                steps += sample.value
                if not 0 <= steps < math.inf:
                    raise ValueError(f"{sample.name}, iteration_counter: got {steps}; allowed is a number from 0")
                continue
            kind = sample.labels.get("request_type") or sample.labels.get("kv_cache_block_type") or ""
            values[sample.name, kind] += sample.value
            engine = sample.labels.get("manifest_sha256", engine)
            if sample.name == _ENGINE:
                engine_kind = sample.labels.get("kind", "")
    for (name, kind), value in values.items():
        if not 0 <= value < MOST:  # as NaN is not
            raise ValueError(f"{name}, {kind}: got {value}; allowed is 0 or more, below {MOST}")
    return PageLoad(
        running=int(values[_REQUESTS, "scheduled"]),
        waiting=int(values[_REQUESTS, "waiting"]),
        max_running=int(values[_REQUESTS, "max"]),
        kv_usage=min(1.0, values[_KV_CACHE, "fraction"]),
        steps=steps,
        engine=engine,
        kind=engine_kind,
    )
