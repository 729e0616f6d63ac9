"""Write a Hugging Face Llama checkpoint with 8-bit weights, in the form of compressed-tensors that vLLM reads.

Every projection gets a scale for each row; activations are quantised by token while it runs (W8A8). Embeddings, head
and norms stay bf16.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from benchmarks.gguf_checkpoint import tensors

_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": _BITS | {"strategy": "token", "dynamic": True},
        }
    },
}


def quantised(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return i8[rows, columns] and the scales f32[rows, 1] of f32[rows, columns]."""
    scale = np.maximum(np.abs(weight).max(1, keepdims=True) / 127, np.finfo("<f4").tiny).astype("<f4")
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale


def write(checkpoint: Path, out: Path) -> None:
    """Write the checkpoint's copy. Raises ValueError for a dtype other than F32, F16, BF16."""
    stored: dict[str, np.ndarray] = {}
    for name, values in tensors(checkpoint / "model.safetensors"):
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale"] = quantised(values)
        else:
            stored[name] = values.astype(bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.glob("*.json"):
        shutil.copy(file, out)
    config = json.loads((checkpoint / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    save_file(stored, out / "unfinished")  # a copy is there only when it is whole
    (out / "unfinished").replace(out / "model.safetensors")
