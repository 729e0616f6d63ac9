"""Safetensors files, read by memory map: header checked, no tensor copied until somebody looks at it.

Format: u64 little-endian header length, JSON header ``{name: {dtype, shape, data_offsets}}``, raw bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DTYPES = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
MAX_HEADER_BYTES = 100_000_000


class BadShard(ValueError):
    """A safetensors file is truncated, or its header and its bytes disagree."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. ``dtype`` is safetensors' name (BF16, F16, F32, ...); ``offset`` in the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def raw(self) -> np.ndarray:
        """A read-only view of the mapped file; bf16 arrives as its bits in u16."""
        return np.memmap(self.path, dtype=DTYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape)

    def f32(self) -> np.ndarray:
        """An f32 array with exactly the stored values (a copy unless stored as F32)."""
        bits = self.raw()
        if self.dtype == "BF16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(bits, dtype=np.float32)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file by name. Raises BadShard naming the file and what is wrong with it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise BadShard(f"{path} is truncated or is no safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except ValueError as exc:
            raise BadShard(f"{path} has a header that is not JSON; is it a safetensors file?") from exc
    if not isinstance(header, dict):
        raise BadShard(f"{path} has a header that is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: object, data_start: int, size: int) -> StoredTensor:
    try:
        dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])  # type: ignore[index]
        begin, end = (int(n) for n in entry["data_offsets"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as exc:
        raise BadShard(f"{path}: the header entry of {name} is malformed") from exc
    if not 0 <= begin <= end <= size - data_start:
        raise BadShard(f"{path} is truncated: {name} should end at byte {data_start + end}, the file has {size}")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise BadShard(f"{path}: {name} is {dtype} {list(shape)} but has {end - begin} bytes")
    return StoredTensor(path, name, dtype, shape, data_start + begin)
