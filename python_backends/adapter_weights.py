"""The tensors of LoRA adapters for TensorRT-LLM's C++ backend, which build/package/gpu_adapters.py wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np

WEIGHTS_FILE, CONFIG_FILE = "model.lora_weights.npy", "model.lora_config.npy"
BF16 = np.dtype("V2")  # as TensorRT-LLM stores bfloat16 in .npy files, since numpy has no such type


def adapter_folder(engine_dir: Path, number: int) -> Path:
    """Return the folder of the adapter ``number``, from 1."""
    return engine_dir / "adapters" / str(number)


def adapter_tensors(engine_dir: Path, number: int) -> dict[str, np.ndarray]:
    """Return ``lora_weights``, f16 or BF16 [1, matrices, width], and ``lora_config``, int32[1, matrices, 3]."""
    folder = adapter_folder(engine_dir, number)
    weights = np.load(folder / WEIGHTS_FILE, mmap_mode="c")  # DLPack takes nothing that is read-only
    return {"lora_weights": weights, "lora_config": np.load(folder / CONFIG_FILE)}
