"""Safetensors files, read by memory map: header checked, no tensor is copied before it is read.

Format: u64 little-endian header length, JSON header ``{name: {dtype, shape, data_offsets}}``, raw bytes.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from build.base.json_fields import BadField, shown
from build.base.numerics import bf16_to_f32

DTYPES: dict[str, np.dtype] = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
MAX_HEADER_BYTES = 100_000_000


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
        bits = np.asarray(self.raw())
        return bf16_to_f32(bits) if self.dtype == "BF16" else bits.astype(np.float32, copy=False)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one file by name. Raises BadField for one that is truncated or whose header and bytes disagree."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise BadField(f"{path} is truncated or is no safetensors file ({size} bytes)")
            text = file.read(length)
    except OSError as exc:
        raise BadField(f"{path} cannot be read: {exc.strerror or exc}") from exc
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _without_repeats(path, pairs))
    except BadField:
        raise
    except (ValueError, RecursionError) as exc:
        raise BadField(f"{path} has a header that is not JSON; is it a safetensors file?") from exc
    if not isinstance(header, dict):
        raise BadField(f"{path} has a header that is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _without_repeats(path: Path, pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Raises BadField for a name that stands twice: it is unknown which one is meant."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadField(f"{path}: the header has {shown(twice)} twice")
    return table


def _stored(path: Path, name: str, entry: Any, data_start: int, size: int) -> StoredTensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        counts = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
        if not isinstance(dtype, str) or not counts or not (isinstance(begin, int) and isinstance(end, int)):
            raise TypeError
    except (KeyError, TypeError, ValueError) as exc:
        raise BadField(f"{path}: the header entry of {shown(name)[1:-1]} is malformed") from exc
    if not 0 <= begin <= end <= size - data_start:
        raise BadField(f"{path} is truncated: {name} should end at byte {data_start + end}, the file has {size}")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise BadField(f"{path}: {name} is {dtype} {list(shape)} but has {end - begin} bytes")
    return StoredTensor(path, name, dtype, shape, data_start + begin)
