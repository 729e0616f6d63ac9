"""Rotary position embedding frequencies, from the ``rope`` keys of a Hugging Face config.

``inverse_frequencies`` follows the formulas of the papers and of transformers' ``modeling_rope_utils``:
default (RoFormer), linear (position interpolation), llama3 (Llama 3.1, by wavelength) and yarn.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from build.base.json_fields import BadField, Fields, shown

DEFAULT_THETA = 10_000.0
LEAST, MOST = 1e-6, 1e15  # of every number of a scaling block: beyond, frequencies are zero or infinite
_NOT_SCALING = ("rope_type", "type", "partial_rotary_factor", "rope_theta")
SUPPORTED_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """theta: the base. scaling: the config's own scaling block, ``{}`` when there is none."""

    theta: float
    kind: str
    scaling: Mapping[str, object]

    def need(self, key: str) -> float:
        value = self.scaling.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            problem = f"rope type {self.kind!r} needs a positive number {key!r}; config.json has {shown(value)}"
            raise BadField(f"config.json: {problem}")
        if not LEAST <= value <= MOST:
            raise BadField(f"config.json: rope {key!r} must be {LEAST:g} to {MOST:g}, got {shown(value)}")
        return float(value)

    def option(self, key: str, default: float) -> float:
        return default if self.scaling.get(key) is None else self.need(key)


def from_config(config: Mapping[str, object]) -> Rope:
    """Reads ``rope_theta`` + ``rope_scaling`` (transformers 4) or ``rope_parameters`` (5). Raises BadField."""
    top = Fields(config, "config.json")
    fields = top.table("rope_parameters" if top.get("rope_parameters") else "rope_scaling")
    kind = fields.text("rope_type") or fields.text("type") or "default"
    if kind not in SUPPORTED_TYPES:
        supported = ", ".join(SUPPORTED_TYPES)
        raise BadField(f"config.json: rope type {shown(kind)} is not supported; supported are {supported}")
    for partial in (fields.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if partial not in (None, 1):
            problem = f"partial_rotary_factor {shown(partial)} is not supported; only 1.0 (the whole head) is"
            raise BadField(f"config.json: {problem}")
    source = fields if fields.get("rope_theta") is not None else top
    theta = source.number("rope_theta", DEFAULT_THETA, above=1.0, high=MOST)
    block = {key: value for key, value in fields.values.items() if key not in _NOT_SCALING}
    # transformers reads the pre-training length from the block and falls back to the model's own length.
    block.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return Rope(theta, kind, block)


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """(f32[head_dim / 2] inverse frequencies, factor by which cos and sin are multiplied)."""
    base = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return (base / rope.need("factor")).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, base).astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base, head_dim)
    return base.astype(np.float32), 1.0


def _llama3(rope: Rope, base: np.ndarray) -> np.ndarray:
    """Long waves are stretched by ``factor``, short ones kept, those between blended linearly in turns."""
    factor, low, high = rope.need("factor"), rope.need("low_freq_factor"), rope.need("high_freq_factor")
    turns = rope.need("original_max_position_embeddings") * base / (2 * math.pi)
    if high <= low:
        problem = f"rope type 'llama3' needs high_freq_factor > low_freq_factor; got {high} and {low}"
        raise BadField(f"config.json: {problem}")
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * base + (1 - keep) * base / factor


def _yarn(rope: Rope, base: np.ndarray, head_dim: int) -> tuple[np.ndarray, float]:
    """YaRN, arXiv 2309.00071: a ramp over the dimensions between ``beta_fast`` and ``beta_slow`` turns."""
    factor, length = rope.need("factor"), rope.need("original_max_position_embeddings")

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.option("beta_fast", 32.0)), dimension_of(rope.option("beta_slow", 1.0))
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    frequencies = (1 - ramp) * base + ramp * base / factor
    return frequencies.astype(np.float32), _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: Rope, factor: float) -> float:
    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.scaling.get("attention_factor") is not None:
        return rope.need("attention_factor")
    if rope.scaling.get("mscale") and rope.scaling.get("mscale_all_dim"):
        return scale(rope.need("mscale")) / scale(rope.need("mscale_all_dim"))
    return scale(1.0)
