"""A quantised Hugging Face checkpoint, as ModelOpt writes it for TensorRT-LLM's LLM API, read back.

Beside each weight stand its scales (``weight_scale``, ``weight_scale_2``, ``input_scale``, ``pre_quant_scale``), and
``hf_quant_config.json`` says what they mean. Where AWQ could, it multiplied ``pre_quant_scale`` into the norm before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from build.base import architecture as architectures
from build.base import shards
from build.base.architecture import Architecture
from build.base.json_fields import BadField, read_object
from build.base.shards import StoredTensor
from build.model.decoder import Decoder, Linear, Round, assembled
from build.quantise import quantised_linear
from build.quantise.quantised_linear import AWQ, BadCheckpoint, Tensors, stored_array

QUANT_CONFIG = "hf_quant_config.json"
QUANT_ALGOS = [algo for algo in quantised_linear.QUANT_ALGOS if algo not in (None, *quantised_linear.WEIGHT_ONLY_BITS)]


@dataclass(frozen=True)
class QuantisedCheckpoint:
    """``tensors`` by name; each is loaded when it is read. quant_algo and kv_cache_quant_algo as TensorRT-LLM's."""

    folder: Path
    architecture: Architecture
    quant_algo: str
    kv_cache_quant_algo: str | None
    tensors: Mapping[str, StoredTensor]

    @property
    def weight_bytes(self) -> int:
        return sum(path.stat().st_size for path in {tensor.path for tensor in self.tensors.values()})

    def f32(self, name: str) -> np.ndarray:
        return quantised_linear.as_f32(stored_array(self.tensors[name]), self.tensors[name].dtype)

    def decoder(self) -> Decoder:
        """The engine's numerics, as in ``trtllm_checkpoint``."""
        return assembled(self.architecture, self.f32, self.linear, self._round_kv)

    def linear(self, *modules: str) -> Linear:
        """A module, or query, key and value above each other, which see one input and must round it alike."""
        parts = [self._linear(module) for module in modules]
        for kind in ("input_scale", "pre_quant_scale") if len(parts) > 1 else ():
            names = [f"{module}.{kind}" for module in modules]
            there = [self.f32(name) for name in names if name in self.tensors]
            if there and not (len(there) == len(names) and all(np.array_equal(scale, there[0]) for scale in there)):
                raise BadCheckpoint(str(self.folder), f"{', '.join(names)} are not equal")
        biases = [part.bias for part in parts if part.bias is not None]
        weight = np.concatenate([part.weight for part in parts]) if len(parts) > 1 else parts[0].weight
        bias = np.concatenate(biases) if biases else None
        return replace(parts[0], weight=weight, bias=bias)

    def _linear(self, module: str) -> Linear:
        def optional(kind: str) -> np.ndarray | None:
            name = f"{module}.{kind}"
            return np.atleast_1d(self.f32(name)) if name in self.tensors else None

        weight = stored_array(self.tensors[f"{module}.weight"])
        return quantised_linear.linear(
            self.quant_algo,
            weight.view(np.int8) if self.quant_algo in AWQ else weight,
            scale=optional("weight_scale"),
            scale_2=optional("weight_scale_2"),
            input_scale=optional("input_scale"),
            prequant=optional("pre_quant_scale"),
            bias=optional("bias"),
        )

    def _round_kv(self, at: str) -> Round | None:
        def scale() -> np.ndarray:
            return np.maximum(*(self.f32(f"{at}.self_attn.{side}_proj.{side}_scale") for side in "kv"))

        return quantised_linear.kv_cache_rounding(self.kv_cache_quant_algo, scale)


def read(folder: Path | str) -> QuantisedCheckpoint:
    """Opens a checkpoint; tensor values are not looked at. Raises BadCheckpoint for what is missing or does not fit."""
    folder = Path(folder)
    config, quantization = _json(folder / "config.json"), _json(folder / QUANT_CONFIG).get("quantization", {})
    quantised_linear.check_quantization(str(folder / QUANT_CONFIG), quantization, QUANT_ALGOS)
    algo, kv = quantization["quant_algo"], quantization.get("kv_cache_quant_algo")
    try:
        arch = architectures.from_config({key: value for key, value in config.items() if key != "quantization_config"})
        files = sorted(folder.glob("*.safetensors"))
        stored = {name: tensor for file in files for name, tensor in shards.read_header(file).items()}
    except BadField as exc:
        raise BadCheckpoint(str(folder), str(exc)) from exc
    _check(folder, stored, arch, algo, kv, int(quantization.get("group_size") or 0))
    return QuantisedCheckpoint(folder, arch, algo, kv, stored)


def _json(path: Path) -> dict:
    try:
        return read_object(path)
    except (OSError, ValueError) as exc:
        raise BadCheckpoint(str(path), f"cannot be read: {exc}") from exc


def _check(folder: Path, stored: Mapping, arch: Architecture, algo: str, kv: str | None, block: int) -> None:
    needed: Tensors = {}
    optional: Tensors = {}
    for name, shape in arch.expected_tensors().items():
        if not name.endswith("_proj.weight"):
            needed[name] = (None, shape)  # in the model's own dtype
            continue
        module, (rows, columns) = name.removesuffix(".weight"), shape
        needed |= {f"{module}.{kind}": entry for kind, entry in _scales(algo, rows, columns, block).items()}
        if algo in AWQ or algo == "W8A8_SQ_PER_CHANNEL":
            optional[f"{module}.pre_quant_scale"] = (None, (columns,))
    for layer in range(arch.num_layers if kv is not None else 0):
        for side in "kv":
            needed[f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"] = ("F32", ())
    quantised_linear.check_tensors(str(folder), stored, needed, optional)


def _scales(algo: str, rows: int, columns: int, block: int) -> Tensors:
    if algo == "FP8":
        return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", ()), "input_scale": ("F32", ())}
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", (rows,))}
    if algo == "W8A8_SQ_PER_CHANNEL":
        return {"weight": ("I8", (rows, columns)), "weight_scale": ("F32", (rows,)), "input_scale": ("F32", ())}
    awq: Tensors = {"weight": ("U8", (rows // 2, columns)), "weight_scale": ("F32", (rows, columns // block))}
    return awq | ({"weight_scale_2": ("F32", ()), "input_scale": ("F32", ())} if algo == "W4A8_AWQ" else {})
