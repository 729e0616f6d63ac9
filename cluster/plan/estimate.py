"""Step models of replicas that were not measured: a roofline, held to published figures where there are any.

A step reads all weights (bandwidth) while every token costs two operations for each parameter (compute), and reads the
sequences' KV cache besides. What a card reaches of its data sheet is that of measured steps of one H100, or fitted to
published throughputs of TensorRT-LLM (build/trtllm/perf_anchors.json).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from cluster.plan.engine import Replica
from contract import step_model
from contract.errors import InvalidArgument
from contract.step_model import StepModel
from contract.toml_table import Positive, Table

ANCHORS = Path(__file__).resolve().parents[2] / "build" / "trtllm" / "perf_anchors.json"
# Memory in GB, bandwidth in TB/s, dense bf16 and fp8 TFLOPS, of the data sheets; the column of the published table.
CARDS: Mapping[str, tuple[float, float, float, float, str]] = {
    "a100-80gb": (80, 2.04, 312, 312, "A100-80GB FP16"),
    "l40s": (45, 0.864, 362, 733, "L40S FP8"),
    "h100": (79, 3.35, 989, 1979, "H100 80GB FP8"),
    "gh200": (95, 4.0, 989, 1979, "GH200 FP8"),
    "h200": (140, 4.8, 989, 1979, "H200 141GB FP8"),
    "b200": (179, 8.0, 2250, 4500, ""),
}
BANDWIDTH, COMPUTE = 0.85, 0.6  # what one card reaches of the data sheet: tests/cluster/plan/h100_steps.json
EXCHANGE = 0.3  # n cards reach 1 / n ** EXCHANGE of that; of the published throughputs of 2, 4 and 8 with NVLink
LAYER_S = 25e-6  # of a layer, beyond bytes and operations: its kernels in a CUDA graph; measured there, too
LAUNCH_S = 0.002  # of a step: the engine's scheduler; of the published ITL of TensorRT-LLM in Triton on one H100
FITTED = 3  # published throughputs, at least, that parts of the data sheet are fitted to
KV_PART = 0.9  # of the memory beside weights that the KV cache gets


class Accelerator(Table):
    """A replica that is not built yet: its model and what it runs on.

    card: by name. cards: of one replica (tensor parallel). published: a model of the TensorRT-LLM tables, or "".
    parameters: in units of 10^9. weight_bytes, kv_bytes: of one parameter, and of one number in the KV cache.
    """

    card: str
    cards: Annotated[int, Field(ge=1, le=64)] = 1
    published: str = ""
    parameters: Positive
    layers: Annotated[int, Field(ge=1, le=1000)]
    kv_heads: Annotated[int, Field(ge=1, le=1024)]
    head_dim: Annotated[int, Field(ge=1, le=1024)]
    weight_bytes: Annotated[float, Field(ge=0.25, le=4)] = 2.0
    kv_bytes: Annotated[float, Field(ge=0.25, le=4)] = 2.0
    max_batch_size: Annotated[int, Field(ge=1, le=2048)] = 256  # a plan of more takes minutes
    max_num_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 8192


@dataclass(frozen=True, kw_only=True)
class Roofline(StepModel):
    """A step computes while it reads the weights: the longer of the two counts, not their sum. weights: the part of
    step_s in which weights are read."""

    weights: float

    def engine_s(self, sequences: float, context_tokens: float, prefill_tokens: float, drafted: float = 0) -> float:
        computed_s = self.sequence_s * sequences + self.prefill_token_s * prefill_tokens
        both_s = super().engine_s(sequences, context_tokens, prefill_tokens, drafted)
        return both_s - min(self.weights * self.step_s, computed_s)


def replica(given: Accelerator, place: str) -> Replica:
    """Return the estimate. place: of the table, for errors. Raises InvalidArgument."""
    if given.card not in CARDS:
        raise InvalidArgument(f"{place}.card", f"must be one of {', '.join(CARDS)}, got {given.card!r}")
    memory_gb = CARDS[given.card][0] * given.cards
    weights_gb = given.parameters * given.weight_bytes
    kv_tokens = int(KV_PART * (memory_gb - weights_gb) * 1e9 / _kv_bytes_per_token(given))
    if kv_tokens < 1:
        problem = f"must hold {weights_gb:.0f} GB of weights and a KV cache beside them, {memory_gb:.0f} GB do not"
        raise InvalidArgument(f"{place}.cards", f"{problem}; got {given.cards} of {given.card}")
    if kv_tokens < given.max_num_tokens:
        problem = f"must be at most {kv_tokens}, as the KV cache beside the weights, got {given.max_num_tokens}"
        raise InvalidArgument(f"{place}.max_num_tokens", problem)
    if given.published:
        model = _fitted(given, kv_tokens, place)
    else:
        together = given.cards**-EXCHANGE
        model = _roofline(given, BANDWIDTH * together, COMPUTE * together, step_model.ROOFLINE)
    return Replica(model, given.max_batch_size, given.max_num_tokens, kv_tokens)


def _kv_bytes_per_token(given: Accelerator) -> float:
    return 2 * given.layers * given.kv_heads * given.head_dim * given.kv_bytes


def _roofline(given: Accelerator, bandwidth: float, compute: float, source: str) -> Roofline:
    """bandwidth, compute: parts of the data sheet that are reached."""
    _, tb_per_s, bf16, fp8, _ = CARDS[given.card]
    bytes_per_s = tb_per_s * 1e12 * given.cards * bandwidth
    token_s = 2 * given.parameters * 1e9 / ((fp8 if given.weight_bytes <= 1 else bf16) * 1e12 * given.cards * compute)
    weights_s = given.parameters * 1e9 * given.weight_bytes / bytes_per_s
    step_s, context_token_s = LAUNCH_S + LAYER_S * given.layers + weights_s, _kv_bytes_per_token(given) / bytes_per_s
    terms: dict[str, Any] = {"step_s": step_s, "sequence_s": token_s, "prefill_token_s": token_s, "request_s": 0.01}
    terms |= {"context_token_s": context_token_s, "weights": weights_s / step_s}
    return Roofline(manifest_sha256="", machine=f"{given.cards} x {given.card}", source=source, made="", **terms)


@cache
def _published_table() -> Any:
    return json.loads(ANCHORS.read_text("utf-8"))["trt_engine_flow_v0.17"]


def _published(model: str, card: str, cards: int) -> dict[tuple[int, int], float]:
    """Return output tokens per second at full load by (prompt, answer) tokens."""
    table, column = _published_table(), CARDS[card][4]
    rows = table.get(f"{model} tp{cards}", {}) if column else {}
    found = ((lengths.split("/"), values[table["columns"].index(column)]) for lengths, values in rows.items())
    return {(int(prompt), int(answer)): value for (prompt, answer), value in found if value}


def _fitted(given: Accelerator, kv_tokens: int, place: str) -> StepModel:
    """Return the roofline with the parts of bandwidth and of compute that have the least error over published rows."""
    rows = _published(given.published, given.card, given.cards)
    if len(rows) < FITTED:
        cards = f" tp{given.cards}"
        models = [name.removesuffix(cards) for name in _published_table() if name.endswith(cards)]
        known = [model for model in models if len(_published(model, given.card, given.cards)) >= FITTED]
        allowed = f"one of {', '.join(known)}" if known else 'left out or ""'
        problem = f"must be {allowed} for {given.cards} x {given.card}, got {given.published!r}"
        raise InvalidArgument(f"{place}.published", problem)

    def errors(parts: tuple[float, float]) -> list[float]:
        model = _roofline(given, *parts, step_model.PUBLISHED)
        return [full_load(model, kv_tokens, *lengths) / known - 1 for lengths, known in rows.items()]

    parts = [n / 20 for n in range(3, 21)]
    best = min(itertools.product(parts, parts), key=lambda each: sum(error * error for error in errors(each)))
    percent = sorted(100 * abs(error) for error in errors(best))
    p50, p95 = percent[len(percent) // 2], percent[round(0.95 * (len(percent) - 1))]
    return replace(_roofline(given, *best, step_model.PUBLISHED), error_p50_percent=p50, error_p95_percent=p95)


def full_load(model: StepModel, kv_tokens: int, input_tokens: int, output_tokens: int) -> float:
    """Return output tokens per second with as many sequences as the KV cache holds, at most 2048."""
    context = input_tokens + output_tokens / 2
    sequences = max(1, min(2048, kv_tokens // (input_tokens + output_tokens)))
    return sequences / model.seconds(sequences, sequences * context, sequences * input_tokens / output_tokens)
