"""From a calibrated model in memory to a checkpoint on disk, by ModelOpt: for trtllm-build, or for the LLM API."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from build.base.architecture import Architecture
from build.base.checkpoint import TOKENIZER_FILES, Checkpoint
from build.recipe.quantization import QFORMATS, Quantization
from contract.errors import EngineFailed


def export_trtllm(model: Any, job: Quantization, opened: Checkpoint, folder: Path) -> None:
    """``config.json`` and one ``rank{N}.safetensors`` per rank."""
    import torch
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    arch = opened.architecture
    ranks = {"inference_tensor_parallel": job.tp_size, "inference_pipeline_parallel": 1}
    with translated("export"), exporter_modules(arch):
        export_tensorrt_llm_checkpoint(model, arch.family, getattr(torch, job.dtype), export_dir=folder, **ranks)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", complete_config(config, job, opened.config, arch))


def export_hf(model: Any, opened: Checkpoint, folder: Path) -> None:
    """A Hugging Face folder with quantised weights, ``hf_quant_config.json`` and the model's own tokenizer."""
    from modelopt.torch.export import export_hf_checkpoint

    with translated("export"):
        export_hf_checkpoint(model, export_dir=folder)
    for name in ("generation_config.json", *TOKENIZER_FILES):
        if (opened.folder / name).is_file():
            shutil.copyfile(opened.folder / name, folder / name)


def link_model(opened: Checkpoint, folder: Path) -> None:
    """The model itself, for an engine that takes it whole: no second copy of the weights where a link will do."""
    for path in opened.files():
        try:
            os.link(path.resolve(), folder / path.name)
        except OSError:  # another file system
            shutil.copyfile(path, folder / path.name)


@contextlib.contextmanager
def exporter_modules(arch: Architecture) -> Iterator[None]:
    """Lets ModelOpt's exporter write a family that its own table lacks (Qwen), where tensorrt_llm is not installed.

    The exporter asks ``tensorrt_llm.models.MODEL_MAP`` for a configuration class. Three small modules answer in its
    place and are taken away afterwards; ``complete_config`` adds what the real class would have known.
    """
    if arch.family == "llama" or importlib.util.find_spec("tensorrt_llm") is not None:
        yield
        return

    class Given:
        """Stands for Mapping, QuantConfig and the family's configuration: keeps what it is given."""

        def __init__(self, values: Mapping[str, object]) -> None:
            self.values = dict(values)

        @classmethod
        def from_dict(cls, values: Mapping[str, object]) -> Given:
            return cls(values)

        @classmethod
        def from_hugging_face(cls, dtype: str, mapping: Given, quant_config: Given, **_: object) -> Given:
            return cls({"dtype": dtype, "mapping": mapping.values, "quantization": quant_config.values})

        def to_dict(self) -> dict[str, object]:
            return self.values

    names = ("tensorrt_llm", "tensorrt_llm.models", "tensorrt_llm.models.modeling_utils")
    root, models, modeling_utils = map(types.ModuleType, names)
    vars(root).update(__version__="0", models=models)  # the exporter only asks whether it is 0.8 or 0.9
    known = {arch.name: types.SimpleNamespace(config_class=Given)}
    vars(models).update(modeling_utils=modeling_utils, MODEL_MAP=known)
    vars(modeling_utils).update(Mapping=Given, QuantConfig=Given)
    ours = {module.__name__: module for module in (root, models, modeling_utils)}
    before = {name: sys.modules[name] for name in ours if name in sys.modules}
    sys.modules.update(ours)
    try:
        yield
    finally:
        for name in ours:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def complete_config(exported: Mapping, job: Quantization, hf_config: Mapping, arch: Architecture) -> dict:
    """config.json with what the exporter leaves out without the real tensorrt_llm. Without ``attn_bias`` and
    ``mlp_bias`` the builder makes a network without biases and merely warns that their tensors are unused."""
    config = dict(exported)
    config["architecture"] = hf_config["architectures"][0]
    config["model_type"] = hf_config.get("model_type")
    config["norm_epsilon"] = arch.rms_norm_eps
    config["intermediate_size"] = arch.intermediate_size
    config["rotary_base"] = arch.rope.theta
    config["rotary_scaling"] = rope_scaling(hf_config)
    config["attn_bias"] = arch.qkv_bias
    config["mlp_bias"] = arch.mlp_bias
    if arch.family == "qwen":
        config["qwen_type"] = hf_config["model_type"]
    quantization = dict(config["quantization"])
    quantization["quant_algo"] = QFORMATS[job.qformat][1]
    if job.kv_cache_dtype is None:
        quantization["kv_cache_quant_algo"] = None
    config["quantization"] = quantization
    return config


def rope_scaling(hf_config: Mapping) -> dict | None:
    """The scaling block in the spelling of transformers 4, which TensorRT-LLM 1.2 reads; None without scaling."""
    block = dict(hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {})
    block.pop("rope_theta", None)
    kind = block.get("rope_type") or block.get("type") or "default"
    return None if kind == "default" else {**block, "rope_type": kind}


@contextlib.contextmanager
def translated(step: str) -> Iterator[None]:
    """ModelOpt's errors, whatever their class, as one sentence; its chatter goes to stderr."""
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("default")  # never errors, also under PYTHONWARNINGS=error (rule R35)
            # Both are wrong here: lm_head is left alone, and complete_config stands in for tensorrt_llm.
            warnings.filterwarnings("ignore", "Enable lm_head quantization")
            warnings.filterwarnings("ignore", "Cannot export tensorrt_llm checkpoint config")
            yield
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as exc:
        raise EngineFailed(f"ModelOpt could not {step} this model: {type(exc).__name__}: {exc}") from exc


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
