"""A GGUF file: metadata and tensors, read by the ``gguf`` library, as a checkpoint's own names and values.

llama.cpp's converter turns the rows of each query and key head of *llama* models from halves to pairs (its rotary
embedding pairs neighbours); they are turned back here. Weights stay where they are: an index beside the side files says
where each lies, and a tensor is dequantised when it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from build.base.json_fields import CheckpointError, Fields, line_of, read_object
from build.base.numerics import f32_to_bf16
from build.base.shards import StoredTensor

if TYPE_CHECKING:
    from gguf import ReaderTensor

INDEX = "gguf_tensors.json"  # in the folder that stands for the file
PERMUTED = ("llama",)  # architectures whose query and key rows are in pairs
ROPE_FREQS = "rope_freqs.weight"
_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Gguf:
    """metadata: keys as they stand in the file. tensors: by their Hugging Face names. rope_freqs: f32[head_dim / 2], by
    which the rotary frequencies are divided, or None."""

    path: Path
    metadata: Fields
    tensors: Mapping[str, GgufTensor]
    rope_freqs: np.ndarray | None


@dataclass(frozen=True)
class GgufTensor(StoredTensor):
    """dtype: BF16 or F16 where the file stores that, else F32, which holds every dequantised value exactly.

    kind: the type in the file (``Q4_K``). size: bytes in the file. heads: of rows to turn back, or 0.
    """

    kind: str
    size: int
    heads: int

    def raw(self) -> np.ndarray:
        values = self.f32()
        if self.dtype == "BF16":
            return f32_to_bf16(values)
        return values.astype(np.float16) if self.dtype == "F16" else values

    def f32(self) -> np.ndarray:
        values = self._rows(math.prod(self.shape[:-1])).reshape(self.shape)
        return from_pairs(values, self.heads) if self.heads else values

    def require_readable(self) -> None:
        """Raises CheckpointError for a type that the library cannot dequantise."""
        try:
            self._rows(1)
        except (NotImplementedError, ValueError, KeyError) as exc:
            problem = f"{self.name} is stored as {self.kind}, which cannot be dequantised: {line_of(exc)}"
            raise CheckpointError(f"{self.path}: {problem}") from exc

    def _rows(self, count: int) -> np.ndarray:
        """f32[count, columns]: the first rows."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        size = count * self.size // math.prod(self.shape[:-1])
        stored = np.memmap(self.path, dtype=np.uint8, mode="r", offset=self.offset, shape=(size,))
        values: np.ndarray = dequantize(stored.reshape(count, -1), GGMLQuantizationType[self.kind])
        return values


def from_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """f32[heads * d, ...]: in each head, rows 0, 2, 4, ... then 1, 3, 5, ..."""
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def open_gguf(path: Path) -> Gguf:
    """Reads metadata and the places of the tensors. Raises CheckpointError, one sentence naming file, key or tensor."""
    from gguf import GGUFReader

    try:
        if path.stat().st_size < 24:
            raise ValueError("it is shorter than a header")
        reader = GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as exc:  # the library checks little: a damaged file gives any of Python's errors
        raise CheckpointError(f"{path} is truncated, damaged or no GGUF file: {line_of(exc)}") from exc
    metadata = Fields(values, str(path))
    architecture = metadata.text("general.architecture") or "none"
    heads = {}
    if architecture in PERMUTED:
        q = metadata.integer(f"{architecture}.attention.head_count")
        heads = {"attn_q": q, "attn_k": metadata.integer(f"{architecture}.attention.head_count_kv", q)}
    tensors, rope_freqs = {}, None
    readable: set[str] = set()
    for tensor in reader.tensors:
        if tensor.name == ROPE_FREQS:
            rope_freqs = np.array(tensor.data, dtype=np.float32)
            continue
        stored = _tensor(path, tensor, heads)
        if stored.kind not in readable:
            stored.require_readable()
            readable.add(stored.kind)
        tensors[stored.name] = stored
    return Gguf(path, metadata, tensors, rope_freqs)


def _tensor(path: Path, tensor: ReaderTensor, heads: Mapping[str, int]) -> GgufTensor:
    stem, _, ending = tensor.name.rpartition(".")
    part, at = stem, ""
    if stem.startswith("blk."):
        _, layer, part = (stem.split(".", 2) + ["", ""])[:3]
        at = f"model.layers.{layer}."
    name = (_LAYER if at else _GLOBAL).get(part)
    if name is None or ending not in ("weight", "bias"):
        raise CheckpointError(f"{path}: tensor {tensor.name} has no place in a dense Llama or Qwen model")
    shape = tuple(int(n) for n in reversed(tensor.shape))  # columns come first in the file
    kind = tensor.tensor_type.name
    turned = heads.get(part, 0)
    if turned and shape[0] % (2 * turned):
        raise CheckpointError(f"{path}: tensor {tensor.name} has {shape[0]} rows, which {turned} heads cannot share")
    dtype = kind if kind in ("BF16", "F16") else "F32"
    offset, size = int(tensor.data_offset), int(tensor.n_bytes)
    return GgufTensor(path, f"{at}{name}.{ending}", dtype, shape, offset, kind, size, turned)


def write_index(folder: Path, opened: Gguf) -> None:
    """Says where each tensor lies, so that the file's metadata need not be read again."""
    entries = []
    for tensor in opened.tensors.values():
        entry = asdict(tensor)
        del entry["path"]
        entries.append(entry)
    (folder / INDEX).write_text(json.dumps({"file": str(opened.path), "tensors": entries}), encoding="utf-8")


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """The tensors by name. ``folder`` was written by ``write_index``."""
    index = read_object(folder / INDEX)
    path, entries = Path(str(index["file"])), index["tensors"]
    assert isinstance(entries, list)
    tensors = [GgufTensor(path=path, **{**entry, "shape": tuple(entry["shape"])}) for entry in entries]
    return {tensor.name: tensor for tensor in tensors}
