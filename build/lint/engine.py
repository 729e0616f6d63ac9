"""What can be wrong with an engine's configuration, ours or one that was written for TensorRT-LLM's C++ backend.

The latter's tensors and parameters are written from the backend's own contract (``build/package``); checked here is
what decides whether it loads and streams.
"""

from collections.abc import Iterator

from tritonclient.grpc.model_config_pb2 import ModelInput, ModelInstanceGroup, ModelOutput

from build.lint.repository import Fault, Model, type_name
from contract import tensors

INFLIGHT = ("inflight_batching", "inflight_fused_batching")
MUST_EXIST = """
    gpt_model_type gpt_model_path tokenizer_dir guided_decoding_backend xgrammar_tokenizer_info_path
""".split()


def engine_faults(model: Model) -> Iterator[Fault]:
    """Every fault of an engine's configuration."""
    if model.config.backend == "python":
        yield from _python_tensors(model)
    else:
        if model.config.backend != "tensorrtllm":
            yield model.error("backend", f"backend must be tensorrtllm or python, got {model.config.backend!r}")
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


def _parameters(model: Model) -> Iterator[Fault]:
    given = {key: parameter.string_value for key, parameter in model.config.parameters.items()}
    for key in (key for key in MUST_EXIST if key not in given):
        yield model.error("parameter", f"parameter {key} must be there: the backend throws without it")
    if (kind := given.get("gpt_model_type", INFLIGHT[0])) not in INFLIGHT:
        yield model.error("in-flight", f"gpt_model_type: must be {' or '.join(INFLIGHT)}, got {kind!r}")
    if given.get("gpt_model_path") == "":
        yield model.error("parameter", "gpt_model_path is empty: there is no engine to load")


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
