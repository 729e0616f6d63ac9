"""A LoRA adapter in PEFT's format, opened and checked: what it adds to which matrices of a checkpoint.

    adapter_config.json          rank, alpha, rsLoRA, patterns of ranks and alphas
    adapter_model.safetensors    base_model.model.<module>.lora_{A,B}.weight

What changes a model in another way than ``W + scale * B A`` on its linear layers (DoRA, biases, embeddings, whole
modules, a base changed by the initialisation) is refused by name.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from build.base import digest, layout, shards
from build.base.checkpoint import Checkpoint
from build.base.json_fields import BadField, Fields, read_object, shown
from build.base.shards import StoredTensor
from contract.errors import InvalidArgument
from contract.manifest import Adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG, WEIGHTS}
MAX_RANK = 512
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj")
_ADAPTED = "must adapt only q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj of the model's layers"
# Keys of adapter_config.json with the values under which they change nothing (beside null, false and empty ones).
_UNSUPPORTED: dict[str, tuple[object, ...]] = dict.fromkeys(
    "use_dora lora_bias modules_to_save trainable_token_indices layer_replication fan_in_fan_out target_parameters "
    "alora_invocation_tokens use_qalora use_bdlora".split(),
    (),
)
_UNSUPPORTED |= {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),  # the others subtract from the base's weights
}


@dataclass(frozen=True)
class LoraMatrix:
    """What an adapter adds to one matrix: ``b @ a``. a: f32[r, in]. b: f32[out, r], scaled by alpha already."""

    a: np.ndarray
    b: np.ndarray


@dataclass(frozen=True)
class LoraAdapter:
    """An opened adapter. matrices: by the name of the base's tensor. record: its part of the manifest."""

    record: Adapter
    matrices: Mapping[str, LoraMatrix]


def record(name: str, path: str) -> Adapter:
    """What the manifest says of an adapter, from its files alone. path: its folder, from the repository's root.

    Raises InvalidArgument, which names the adapter.
    """
    widest = max(ranks(name, path).values())
    files = {file: digest.sha256_file(layout.given(path) / file) for file in (CONFIG, WEIGHTS)}
    return Adapter(name, digest.sha256_json(files), widest)


def ranks(name: str, path: str) -> dict[str, int]:
    """The widest rank of each projection ("q_proj"), from the file's header. Raises InvalidArgument as ``record``."""
    found: dict[str, int] = {}
    try:
        _config(layout.given(path))
        for (module, part), tensor in _tensors(layout.given(path)).items():
            projection, rank = module.rpartition(".")[2], tensor.shape[0] if part == "A" and tensor.shape else 1
            found[projection] = max(rank, found.get(projection, 1))
    except BadField as exc:
        raise InvalidArgument(f"adapters.{name}", str(exc)) from exc
    return found


def open_adapter(name: str, path: str, checkpoint: Checkpoint) -> LoraAdapter:
    """An adapter's matrices. Raises InvalidArgument as ``record``, and where they do not fit the checkpoint."""
    recorded, folder = record(name, path), layout.given(path)
    try:
        config, tensors = _config(folder), _tensors(folder)
        matrices = {}
        for module in sorted({module for module, _ in tensors}):
            tensor = f"{module}.weight"
            if tensor not in checkpoint.tensors:
                raise BadField(f"{folder / WEIGHTS}: {_ADAPTED}, got {module}")
            matrices[tensor] = _matrix(config, tensors, module, checkpoint.tensors[tensor].shape, folder / WEIGHTS)
    except BadField as exc:
        raise InvalidArgument(f"adapters.{name}", str(exc)) from exc
    return LoraAdapter(recorded, matrices)


def _config(folder: Path) -> Fields:
    path = folder / CONFIG
    try:
        config = Fields(read_object(path), str(path))
    except FileNotFoundError as exc:
        raise BadField(f"{path} is missing; an adapter is a folder that PEFT saved") from exc
    if config.text("peft_type") != "LORA":
        raise config.bad("peft_type", "'LORA'")
    for key, neutral in _UNSUPPORTED.items():
        value = config.get(key)
        if value not in (None, False, *neutral) and value != [] and value != {}:
            raise config.bad(key, f"{neutral[0]!r}" if neutral else "null, false or empty: it is not supported")
    config.integer("r", high=MAX_RANK)
    config.number("lora_alpha")
    return config


def _tensors(folder: Path) -> dict[tuple[str, str], StoredTensor]:
    """By module ("model.layers.0.self_attn.q_proj") and part, A or B."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise BadField(f"{path} is missing; adapter_model.bin is not read: save the adapter as safetensors")
    found = {}
    for name, tensor in shards.read_header(path).items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise BadField(f"{path}: must hold only lora_A and lora_B of linear layers, got {name}")
        if not _LINEAR.fullmatch(match[1]):
            raise BadField(f"{path}: {_ADAPTED}, got {match[1]}")
        if tensor.dtype not in shards.DTYPES:
            raise BadField(f"{path}: {name} must be one of {', '.join(shards.DTYPES)}, got {tensor.dtype}")
        found[match[1], match[2]] = tensor
    if not found:
        raise BadField(f"{path}: holds no tensors")
    return found


def _matrix(
    config: Fields, tensors: Mapping[tuple[str, str], StoredTensor], module: str, shape: tuple[int, ...], path: Path
) -> LoraMatrix:
    a, b = tensors.get((module, "A")), tensors.get((module, "B"))
    if a is None or b is None:
        there, lacking = ("B", "A") if a is None else ("A", "B")
        raise BadField(f"{path}: {module} has lora_{there} and not lora_{lacking}")
    rank = int(_patterned(config, "rank_pattern", module, config.integer("r")))
    if a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
        allowed = f"[{rank}, {shape[1]}] and [{shape[0]}, {rank}] for this model and rank {rank}"
        raise BadField(f"{path}: A and B of {module} must be {allowed}, got {list(a.shape)} and {list(b.shape)}")
    alpha = _patterned(config, "alpha_pattern", module, config.number("lora_alpha"))
    scale = alpha / (math.sqrt(rank) if config.boolean("use_rslora", False) else rank)
    values = LoraMatrix(np.array(a.f32()), b.f32() * np.float32(scale))
    if not (np.isfinite(values.a).all() and np.isfinite(values.b).all()):
        raise BadField(f"{path}: {module} holds NaN or infinity; the adapter is damaged or its training diverged")
    return values


def _patterned(config: Fields, key: str, module: str, default: float) -> float:
    """PEFT's rule: the first pattern that matches the module's name, or its end after a dot."""
    for pattern in config.table(key).values:
        try:
            matches = re.fullmatch(rf"(.*\.)?({pattern})", module)
        except re.error as exc:
            problem = f"{key} has {shown(pattern)}, which is no regular expression: {exc}"
            raise BadField(f"{config.where}: {problem}") from exc
        if matches:
            return config.table(key).number(pattern)
    return default
