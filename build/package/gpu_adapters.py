"""LoRA adapters of a GPU engine as its kind reads them, in ``engines/<engine>/adapters/<number>/``.

TensorRT-LLM's C++ backend reads the layout of NVIDIA's ``hf_lora_convert.py``, one row per matrix, and splits the
matrices over the ranks itself. The LLM API reads PEFT's own files.

    model.lora_weights.npy    [1, rows, width], float16 or bfloat16: A [r, in], B [out, r] scaled by alpha, zeros
    model.lora_config.npy     int32[1, rows, 3]: id of the module, layer, r
"""

import shutil
from pathlib import Path

import numpy as np

from build.base import json_fields, layout, numerics
from build.base.checkpoint import Checkpoint
from build.model import lora_adapter
from build.recipe import commands
from build.recipe.recipe import Recipe
from build.recipe.schema import LLMAPI
from contract.errors import InvalidArgument
from python_backends.adapters import BF16, CONFIG_FILE, WEIGHTS_FILE, adapter_folder


def package(recipe: Recipe, model: Checkpoint, engine: Path, dtype: str) -> list[Path]:
    """Writes the recipe's adapters into the engine's folder, in place of earlier ones. dtype: of the model.

    Raises InvalidArgument as ``lora_adapter.open_adapter``, and where the kind cannot read what the adapter holds.
    """
    shutil.rmtree(engine / "adapters", ignore_errors=True)
    files: list[Path] = []
    for number, declared in enumerate(recipe.adapters, 1):
        adapter, field = lora_adapter.open_adapter(declared.name, declared.path, model), f"adapters.{declared.name}"
        source, folder = layout.given(declared.path), adapter_folder(engine, number)
        if recipe.kind == LLMAPI:
            if json_fields.read_object(source / lora_adapter.CONFIG).get("alpha_pattern"):
                raise InvalidArgument(field, "alpha_pattern must be empty: the LLM API scales every module alike")
            shutil.copytree(source, folder, ignore=lambda _, names: {*names} - lora_adapter.FILES)
        else:
            weights, config = arrays(adapter)
            if dtype == "float16" and (largest := np.abs(weights).max()) > np.finfo(np.float16).max:
                raise InvalidArgument(field, f"holds {largest:g}, beyond float16: build with dtype bfloat16")
            folder.mkdir(parents=True)
            stored = np.float16(weights) if dtype == "float16" else numerics.f32_to_bf16(weights).view(BF16)
            np.save(folder / WEIGHTS_FILE, stored)
            np.save(folder / CONFIG_FILE, config)
        files += sorted(folder.iterdir())
    return files


def arrays(adapter: lora_adapter.LoraAdapter) -> tuple[np.ndarray, np.ndarray]:
    """The adapter's ``lora_weights``, in f32, and ``lora_config``."""
    rows, config = [], []
    for tensor, matrix in adapter.matrices.items():  # model.layers.0.self_attn.q_proj.weight
        _, _, layer, _, projection, _ = tensor.split(".")
        config.append((commands.PROJECTIONS.index(projection) + 1, int(layer), matrix.a.shape[0]))
        rows.append(np.concatenate([matrix.a.reshape(-1), matrix.b.reshape(-1)]))
    width = max(row.size for row in rows)
    return np.stack([np.pad(row, (0, width - row.size)) for row in rows])[None], np.array([config], np.int32)
