"""What can be wrong with an engine's configuration: the C++ ``tensorrtllm`` backend's contract and parse rules.

Parameters are strings the backend parses itself: what it cannot parse it mostly takes for unset, with a log line. So a
value that looks set and is not is a fault here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache

from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from build.base import layout
from build.base.option_table import nearest
from build.lint.repository import ERROR, WARNING, Fault, Model, type_name
from contract import tensors

CONTRACT = layout.OPTION_TABLES / "triton_contract_1.x.json"
BACKENDS = ("tensorrtllm", "python")
INFLIGHT = ("inflight_batching", "inflight_fused_batching")
MUST_EXIST = (
    "gpt_model_type",
    "gpt_model_path",
    "tokenizer_dir",
    "guided_decoding_backend",
    "xgrammar_tokenizer_info_path",
)
DEAD = {"worker_path": "executor_worker_path took its place", "enable_trt_overlap": "nothing took its place"}
BOOLEANS = ("True", "true", "TRUE", "1", "False", "false", "FALSE", "0")
BOOLEAN_KEYS = (
    "kv_cache_onboard_blocks",
    "enable_kv_cache_reuse",
    "exclude_input_in_output",
    "normalize_log_probs",
    "enable_chunked_context",
    "multi_block_mode",
    "enable_context_fmha_fp32_acc",
    "cuda_graph_mode",
    "speculative_decoding_fast_logits",
)
CHOICES = {
    "batch_scheduler_policy": ("guaranteed_no_evict", "max_utilization"),
    "decoding_mode": ("top_k", "top_p", "top_k_top_p", "beam_search", "medusa", "redrafter", "lookahead", "eagle"),
}
INTEGER_KEYS = (
    "max_beam_width",
    "max_tokens_in_paged_kv_cache",
    "kv_cache_host_memory_bytes",
    "sink_token_length",
    "cancellation_check_period_ms",
    "stats_check_period_ms",
    "iter_stats_max_iterations",
    "request_stats_max_iterations",
    "num_nodes",
    "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size",
    "lora_cache_host_memory_bytes",
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
    "cuda_graph_cache_size",
    "recv_poll_period_ms",
)
SHARE_KEYS = (
    "kv_cache_free_gpu_mem_fraction",
    "cross_kv_cache_fraction",
    "lora_cache_gpu_memory_fraction",
    "gpu_weights_percent",
)
LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")
READ_BUT_UNLISTED = ("recv_poll_period_ms",)
BROKEN_INPUTS = {
    "runtime_top_p_min": "the backend reads it under another name, so it is silently ignored",
    "early_stopping": "the backend reads the boolean as a 32-bit integer, so its value is undefined",
}


@lru_cache
def contract() -> dict:
    """Tensors by side and name, and the parameter names, of the 1.x ``tensorrt_llm`` model."""
    table = json.loads(CONTRACT.read_text(encoding="utf-8"))["tensorrt_llm"]
    return {
        "input": {tensor["name"]: tensor for tensor in table["inputs"]},
        "output": {tensor["name"]: tensor for tensor in table["outputs"]},
        "parameters": tuple(table["parameters"]),
    }


def is_engine(model: Model) -> bool:
    """Token ids in, token ids out."""
    inputs, outputs = ({tensor.name for tensor in side} for side in (model.config.input, model.config.output))
    return {"input_ids", "request_output_len"} <= inputs and "output_ids" in outputs


def is_tensorrtllm(model: Model) -> bool:
    """An engine of the C++ backend, or one that wants to be (the sample leaves its backend to a placeholder)."""
    return model.config.backend == "tensorrtllm" or "gpt_model_type" in model.config.parameters


def engine_faults(model: Model) -> Iterator[Fault]:
    """Every fault of an engine's configuration."""
    if is_tensorrtllm(model):
        yield from _tensors(model)
        yield from _parameters(model)
        yield from _scheduling(model)
    else:
        yield from _python_engine(model)


def _tensors(model: Model) -> Iterator[Fault]:
    for side in ("input", "output"):
        known = contract()[side]
        there = {tensor.name: tensor for tensor in getattr(model.config, side)}
        for name, tensor in there.items():
            if name not in known:
                near = nearest(name, tuple(known))
                yield Fault(model.name, "contract", ERROR, f"the backend has no {side} {name!r}; nearest is {near!r}")
            else:
                yield from _tensor(model, side, tensor, known[name])
    for name in ("input_lengths", "request_output_len"):
        if name not in {tensor.name for tensor in model.config.input}:
            yield Fault(model.name, "contract", ERROR, f"required input {name!r} is missing")
    for name in ("output_ids", "sequence_length"):
        if name not in {tensor.name for tensor in model.config.output}:
            yield Fault(model.name, "contract", ERROR, f"output {name!r} is missing: the backend throws without it")
    for tensor in model.config.input:
        if tensor.name in BROKEN_INPUTS:
            yield Fault(
                model.name, "contract", WARNING, f"input {tensor.name!r} is offered, but {BROKEN_INPUTS[tensor.name]}"
            )


def _tensor(model: Model, side: str, tensor, theirs: dict) -> Iterator[Fault]:
    there, name = type_name(tensor.data_type), tensor.name
    if theirs["data_type"].startswith("${"):
        if "logits" in theirs["data_type"] and there != "TYPE_FP32":
            message = f"{side} {name!r} is {there}; engines are built with float32 logits, so allowed is TYPE_FP32"
            yield Fault(model.name, "contract", ERROR, message)
    elif there != theirs["data_type"]:
        yield Fault(
            model.name, "contract", ERROR, f"{side} {name!r} is {there}; the backend's is {theirs['data_type']}"
        )
    if list(tensor.dims) != theirs["dims"]:
        message = f"{side} {name!r} has dims {list(tensor.dims)}; the backend's are {theirs['dims']}"
        yield Fault(model.name, "contract", ERROR, message)
    if tensor.HasField("reshape") != theirs["reshape_scalar"] or list(tensor.reshape.shape):
        expected = "reshape { shape: [ ] }" if theirs["reshape_scalar"] else "no reshape"
        yield Fault(model.name, "contract", ERROR, f"{side} {name!r} needs {expected}")
    if side == "input" and not tensor.optional and theirs["optional"]:
        yield Fault(model.name, "contract", WARNING, f"input {name!r} is required here and optional in the backend")


def _value(model: Model, key: str) -> str:
    return model.config.parameters[key].string_value if key in model.config.parameters else ""


def _parameters(model: Model) -> Iterator[Fault]:
    given = set(model.config.parameters)
    for key in MUST_EXIST:
        if key not in given:
            yield Fault(model.name, "parameter", ERROR, f"parameter {key} must be there: the backend throws without it")
    kind = _value(model, "gpt_model_type")
    if "gpt_model_type" in given and kind not in INFLIGHT and not kind.startswith("${"):
        why = "batching is static" if kind in ("V1", "v1") else "the backend throws"
        message = f"in-flight batching is off: gpt_model_type is {kind!r} ({why}); allowed is {' or '.join(INFLIGHT)}"
        yield Fault(model.name, "in-flight", ERROR, message)
    if "gpt_model_path" in given and not _value(model, "gpt_model_path"):
        yield Fault(model.name, "parameter", ERROR, "gpt_model_path is empty: there is no engine to load")
    for key in sorted(given):
        yield from _parameter(model, key, _value(model, key))
    if _value(model, "decoding_mode") == "lookahead":
        for key in LOOKAHEAD:
            if not _value(model, key):
                yield Fault(model.name, "parameter", ERROR, f"decoding_mode lookahead throws without {key}")
    echo = _value(model, "exclude_input_in_output")
    if echo not in ("True", "true", "TRUE", "1") and not echo.startswith("${"):
        message = "exclude_input_in_output is not true: an answer that is not streamed repeats its prompt"
        yield Fault(model.name, "parameter", WARNING, message)


def _parameter(model: Model, key: str, value: str) -> Iterator[Fault]:
    if key in DEAD:
        yield Fault(model.name, "parameter", WARNING, f"parameter {key} is no longer read; {DEAD[key]}")
        return
    known = (*contract()["parameters"], *READ_BUT_UNLISTED)
    if key not in known:
        yield Fault(
            model.name,
            "parameter",
            WARNING,
            f"the backend reads no parameter {key}; nearest is {nearest(key, known)!r}",
        )
        return
    wrong = _unparsable(key, value)
    if wrong and value and not value.startswith("${"):
        yield Fault(model.name, "parameter", ERROR, f"{key} = {value!r} counts as unset; allowed is {wrong}")


def _unparsable(key: str, value: str) -> str:
    """What ``key`` allows if ``value`` is not it, else nothing."""
    if key in BOOLEAN_KEYS:
        return "" if value in BOOLEANS else "true or false"
    if key in CHOICES:
        return "" if value in CHOICES[key] else f"one of {', '.join(CHOICES[key])}"
    if key in INTEGER_KEYS:
        return "" if re.fullmatch(r"\d+", value) else "a whole number"
    if key in SHARE_KEYS:
        share = re.fullmatch(r"\d*\.?\d+", value)
        return "" if share and 0 < float(value) <= 1 else "a share above 0 and at most 1"
    return ""


def _scheduling(model: Model) -> Iterator[Fault]:
    config = model.config
    if config.backend not in BACKENDS and not config.backend.startswith("${"):
        message = f"backend is {config.backend!r}; must be tensorrtllm, or python (slower)"
        yield Fault(model.name, "backend", ERROR, message)
    if not model.decoupled:
        message = "it is not decoupled: streaming requests and request batches over 1 are errors"
        yield Fault(model.name, "decoupled", ERROR, message)
    if config.HasField("dynamic_batching") and config.dynamic_batching.max_queue_delay_microseconds:
        delay = config.dynamic_batching.max_queue_delay_microseconds
        message = f"max_queue_delay_microseconds {delay} only delays: the executor batches in flight; set 0"
        yield Fault(model.name, "queue", WARNING, message)
    if not config.HasField("dynamic_batching"):
        message = (
            "without dynamic_batching there is no max_queue_size: Triton's and the executor's queues are unbounded"
        )
        yield Fault(model.name, "queue", ERROR, message)
    yield from _one_instance(model)


def _python_engine(model: Model) -> Iterator[Fault]:
    """Our own engines: the contract's tensors, streams, one instance."""
    for side, expected in (("input", tensors.ENGINE_INPUTS), ("output", tensors.ENGINE_OUTPUTS)):
        there = {tensor.name: tensor for tensor in getattr(model.config, side)}
        for ours in expected:
            datatype = "TYPE_STRING" if ours.datatype == "BYTES" else f"TYPE_{ours.datatype}"
            tensor = there.pop(ours.name, None)
            if tensor is None:
                yield Fault(model.name, "contract", ERROR, f"{side} {ours.name!r} of contract/tensors.py is missing")
            elif type_name(tensor.data_type) != datatype or tuple(tensor.dims) != ours.dims:
                found = f"{type_name(tensor.data_type)} {list(tensor.dims)}"
                message = f"{side} {ours.name!r} is {found}; the contract says {datatype} {list(ours.dims)}"
                yield Fault(model.name, "contract", ERROR, message)
        for name in there:
            yield Fault(model.name, "contract", WARNING, f"{side} {name!r} is not in contract/tensors.py")
    if not model.decoupled:
        yield Fault(
            model.name, "decoupled", ERROR, "it is not decoupled, so nothing can be streamed or batched in flight"
        )
    yield from _one_instance(model)


def _one_instance(model: Model) -> Iterator[Fault]:
    groups = model.config.instance_group
    if model.instances != 1 or any(group.kind != ModelInstanceGroup.KIND_CPU for group in groups):
        message = "say instance_group KIND_CPU count 1: a second instance is a second engine, and a stop may miss"
        yield Fault(model.name, "instances", ERROR, message)
