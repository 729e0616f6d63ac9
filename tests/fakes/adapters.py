"""Random LoRA adapters in PEFT's files, for a checkpoint of ``checkpoints.py``, and the model they make."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(
    folder: Path,
    values: dict[str, np.ndarray],
    *,
    rank: int = 4,
    alpha: float = 8,
    targets: tuple[str, ...] = ALL,
    seed: int = 0,
    size: float = 0.3,
    files: dict[str, np.ndarray] | None = None,
    **config: object,
) -> dict[str, np.ndarray]:
    """Writes the folder and returns ``values`` with the adapter fused.

    size: of the adapter's part of a matrix, relative to the matrix. files: tensors to write beside the adapter's.
    config: further keys of adapter_config.json; rank_pattern, alpha_pattern and use_rslora are obeyed.
    """
    random = np.random.default_rng(seed)
    saved: dict[str, np.ndarray] = {}
    fused = dict(values)
    for name, matrix in values.items():
        module = name.removesuffix(".weight")
        if module.split(".")[-1] not in targets:
            continue
        of_this = int(_patterned(config.get("rank_pattern"), module, rank))
        scale = _patterned(config.get("alpha_pattern"), module, alpha)
        scale /= math.sqrt(of_this) if config.get("use_rslora") else of_this
        a = random.standard_normal((of_this, matrix.shape[1])).astype(np.float32)
        b = random.standard_normal((matrix.shape[0], of_this)).astype(np.float32)
        b *= size * np.abs(matrix).mean() / (np.abs(b @ a).mean() * scale)
        saved |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        fused[name] = matrix + np.float32(scale) * (b @ a)
    folder.mkdir(parents=True, exist_ok=True)
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    save(folder / "adapter_model.safetensors", saved | (files or {}))
    return fused


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file of f32 tensors."""
    tensors = {name: np.ascontiguousarray(tensor, "<f4") for name, tensor in tensors.items()}
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    body = b"".join(tensor.tobytes() for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def _patterned(patterns: object, module: str, default: float) -> float:
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default
