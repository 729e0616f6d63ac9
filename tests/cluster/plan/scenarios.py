"""Scenarios and replicas of the planner's tests."""

from __future__ import annotations

from typing import Any

from cluster.plan.engine import Replica
from contract.step_model import StepModel

STEP = StepModel(
    manifest_sha256="",
    machine="a machine",
    source="measured",
    made="",
    step_s=0.01,
    sequence_s=0.001,
    prefill_token_s=0.0001,
    context_token_s=1e-7,
    request_s=0.005,
)
REPLICA = Replica(STEP, slots=16, chunk_tokens=256, kv_tokens=8192)


def table(**pool: Any) -> dict[str, Any]:
    """Return a scenario of an estimated replica."""
    model = {"parameters": 8.0, "layers": 32, "kv_heads": 8, "head_dim": 128}
    estimate = {"card": "h100", **model, "max_batch_size": 16}  # few requests fill it
    one = {"name": "chat", "requests_per_s": 20.0, "input": 200, "output": {"p50": 50, "p95": 100, "most": 200}}
    given = {"estimate": estimate, "classes": [one], "slo": {"ttft_s": 1.0, "itl_s": 0.1}, "price": {"on_demand": 2.0}}
    return {"pools": {"main": given | pool}}
