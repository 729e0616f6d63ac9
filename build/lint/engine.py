"""What can be wrong with an engine's configuration: the C++ ``tensorrtllm`` backend's contract and parse rules.

Parameters are strings the backend parses itself: what it cannot parse it mostly takes for unset, with a log line. So a
value that looks set and is not is a fault here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from tritonclient.grpc.model_config_pb2 import ModelInput, ModelInstanceGroup, ModelOutput

from build.base import layout
from build.base.option_table import nearest
from build.lint.repository import Fault, Model, type_name
from contract import tensors

CONTRACT = layout.OPTION_TABLES / "triton_contract_1.x.json"
INFLIGHT = ("inflight_batching", "inflight_fused_batching")
MUST_EXIST = (
    "gpt_model_type",
    "gpt_model_path",
    "tokenizer_dir",
    "guided_decoding_backend",
    "xgrammar_tokenizer_info_path",
)
READ_BUT_UNLISTED = ("recv_poll_period_ms",)
# Keys, the pattern of a value that the backend takes, and what that is in words. Shares must also be in (0, 1].
VALUES = (
    (
        "kv_cache_onboard_blocks enable_kv_cache_reuse exclude_input_in_output normalize_log_probs "
        "enable_chunked_context multi_block_mode enable_context_fmha_fp32_acc cuda_graph_mode "
        "speculative_decoding_fast_logits",
        "True|true|TRUE|1|False|false|FALSE|0",
        "true or false",
    ),
    (
        "max_beam_width max_tokens_in_paged_kv_cache kv_cache_host_memory_bytes sink_token_length "
        "cancellation_check_period_ms stats_check_period_ms iter_stats_max_iterations request_stats_max_iterations "
        "num_nodes lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_host_memory_bytes "
        "lookahead_window_size lookahead_ngram_size lookahead_verification_set_size cuda_graph_cache_size "
        "recv_poll_period_ms",
        r"\d+",
        "a whole number",
    ),
    (
        "kv_cache_free_gpu_mem_fraction cross_kv_cache_fraction lora_cache_gpu_memory_fraction gpu_weights_percent",
        r"0*1(\.0*)?|0*\.\d*[1-9]\d*",
        "a share above 0 and at most 1",
    ),
    (
        "batch_scheduler_policy",
        "guaranteed_no_evict|max_utilization",
        "guaranteed_no_evict or max_utilization",
    ),
    (
        "decoding_mode",
        "top_k|top_p|top_k_top_p|beam_search|medusa|redrafter|lookahead|eagle",
        "top_k, top_p, top_k_top_p, beam_search, medusa, redrafter, lookahead or eagle",
    ),
)
LOOKAHEAD = ("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size")


@lru_cache
def contract() -> dict:
    """Tensors by side and name, and the parameter names, of the 1.x ``tensorrt_llm`` model."""
    table = json.loads(CONTRACT.read_text(encoding="utf-8"))["tensorrt_llm"]
    return {
        "input": {tensor["name"]: tensor for tensor in table["inputs"]},
        "output": {tensor["name"]: tensor for tensor in table["outputs"]},
        "parameters": (*table["parameters"], *READ_BUT_UNLISTED),
    }


def engine_faults(model: Model) -> Iterator[Fault]:
    """Every fault of an engine's configuration."""
    if model.config.backend == "python":
        yield from _python_tensors(model)
    else:
        if model.config.backend != "tensorrtllm":
            yield model.error("backend", f"backend must be tensorrtllm or python, got {model.config.backend!r}")
        yield from _tensors(model)
        yield from _parameters(model)
        if model.config.dynamic_batching.max_queue_delay_microseconds:
            yield model.warning("queue", "max_queue_delay_microseconds only delays: the executor batches in flight")
        if not model.batches:
            problem = "without dynamic_batching there is no max_queue_size"
            yield model.error("queue", f"{problem}: Triton's and the executor's queues are unbounded")
    if not model.decoupled:
        yield model.error("decoupled", "it is not decoupled, so nothing can be streamed or batched in flight")
    groups = model.config.instance_group
    if model.instances != 1 or any(group.kind != ModelInstanceGroup.KIND_CPU for group in groups):
        problem = "say instance_group KIND_CPU count 1: a second instance is a second engine, and a stop may miss"
        yield model.error("instances", problem)


def _tensors(model: Model) -> Iterator[Fault]:
    for side, required in (
        ("input", ("input_lengths", "request_output_len")),
        ("output", ("output_ids", "sequence_length")),
    ):
        known = contract()[side]
        there = {tensor.name: tensor for tensor in getattr(model.config, side)}
        for name, tensor in there.items():
            if name in known:
                yield from _tensor(model, side, tensor, known[name])
            else:
                near = nearest(name, tuple(known))
                yield model.error("contract", f"the backend has no {side} {name!r}; nearest is {near!r}")
        for name in (name for name in required if name not in there):
            yield model.error("contract", f"required {side} {name!r} is missing: the backend throws without it")


def _tensor(model: Model, side: str, tensor: ModelInput | ModelOutput, theirs: Mapping[str, object]) -> Iterator[Fault]:
    there, expected, name = type_name(tensor.data_type), str(theirs["data_type"]), tensor.name
    if expected.startswith("${"):  # the engine decides; the recipes build float32 logits
        expected = "TYPE_FP32" if "logits" in expected else there
    if there != expected:
        yield model.error("contract", f"{side} {name!r} is {there}; the backend's is {expected}")
    if list(tensor.dims) != theirs["dims"]:
        yield model.error(
            "contract", f"{side} {name!r} has dims {list(tensor.dims)}; the backend's are {theirs['dims']}"
        )
    if tensor.HasField("reshape") != theirs["reshape_scalar"] or list(tensor.reshape.shape):
        needed = "reshape { shape: [ ] }" if theirs["reshape_scalar"] else "no reshape"
        yield model.error("contract", f"{side} {name!r} needs {needed}")
    if isinstance(tensor, ModelInput) and theirs["optional"] and not tensor.optional:
        yield model.warning("contract", f"input {name!r} is required here and optional in the backend")


def _parameters(model: Model) -> Iterator[Fault]:
    given = {key: parameter.string_value for key, parameter in model.config.parameters.items()}
    for key in (key for key in MUST_EXIST if key not in given):
        yield model.error("parameter", f"parameter {key} must be there: the backend throws without it")
    if (kind := given.get("gpt_model_type", INFLIGHT[0])) not in INFLIGHT:
        yield model.error("in-flight", f"gpt_model_type: must be {' or '.join(INFLIGHT)}, got {kind!r}")
    if given.get("gpt_model_path") == "":
        yield model.error("parameter", "gpt_model_path is empty: there is no engine to load")
    for key in sorted(given.keys() - set(contract()["parameters"])):
        near = nearest(key, contract()["parameters"])
        yield model.warning("parameter", f"the backend reads no parameter {key}; nearest is {near!r}")
    for keys, pattern, allowed in VALUES:
        for key in (key for key in keys.split() if given.get(key)):
            if not re.fullmatch(pattern, given[key]):
                yield model.error("parameter", f"{key}: must be {allowed}, got {given[key]!r}, which counts as unset")
    for key in LOOKAHEAD if given.get("decoding_mode") == "lookahead" else ():
        if not given.get(key):
            yield model.error("parameter", f"decoding_mode lookahead throws without {key}")
    if given.get("exclude_input_in_output") not in ("True", "true", "TRUE", "1"):
        problem = "exclude_input_in_output is not true: an answer that is not streamed repeats its prompt"
        yield model.warning("parameter", problem)


def _python_tensors(model: Model) -> Iterator[Fault]:
    """Our own engines have the contract's tensors."""
    for side, expected in (("input", tensors.ENGINE_INPUTS), ("output", tensors.ENGINE_OUTPUTS)):
        there = {tensor.name: tensor for tensor in getattr(model.config, side)}
        for ours in expected:
            tensor = there.pop(ours.name, None)
            if tensor is None:
                yield model.error("contract", f"{side} {ours.name!r} of contract/tensors.py is missing")
            else:
                yield from contract_faults(model, side, tensor, ours)
        for name in there:
            yield model.warning("contract", f"{side} {name!r} is not in contract/tensors.py")


def contract_faults(model: Model, side: str, tensor: ModelInput | ModelOutput, ours: tensors.Tensor) -> Iterator[Fault]:
    """A tensor of another type or other dims than contract/tensors.py has."""
    expected = f"TYPE_{ours.datatype.replace('BYTES', 'STRING')} {list(ours.dims)}"
    there = f"{type_name(tensor.data_type)} {list(tensor.dims)}"
    if there != expected:
        yield model.error("contract", f"{side} {ours.name!r} is {there}; the contract says {expected}")
