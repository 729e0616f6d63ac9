"""The cards an engine can be built for, what their compute capability supports, and what this machine has.

``SUPPORT`` joins two sources: the TensorRT-LLM support matrix (numerical formats by GPU family) and what the engine
builder refuses (rule R4). A format missing from a row is refused on that row.
"""

import csv
import io
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

GENERATIONS = {80: "Ampere", 86: "Ampere", 89: "Ada", 90: "Hopper"} | dict.fromkeys((100, 103, 120), "Blackwell")
SMS = tuple(GENERATIONS)


@dataclass(frozen=True)
class Gpu:
    """sm: compute capability times ten. memory_gib: what the driver reports. tflops: dense bf16, from datasheets."""

    name: str
    sm: int
    memory_gib: float
    tflops: float

    @property
    def generation(self) -> str:
        return GENERATIONS[self.sm]


_CGROUP_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")  # v2, v1
# The first card of a compute capability is its reference card: it stands in when a recipe gives only `sm`.
CARDS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80gb", 80, 80.0, 312),
        Gpu("a100-40gb", 80, 40.0, 312),
        Gpu("a30", 80, 24.0, 165),
        Gpu("a10", 86, 22.5, 125),
        Gpu("a10g", 86, 22.5, 70),
        Gpu("a40", 86, 45.0, 150),
        Gpu("l40s", 89, 45.0, 362),
        Gpu("l40", 89, 45.0, 181),
        Gpu("l4", 89, 22.5, 121),
        Gpu("rtx-4090", 89, 24.0, 165),
        Gpu("h100", 90, 79.1, 989),
        Gpu("h100-nvl", 90, 93.6, 835),
        Gpu("gh200", 90, 95.6, 989),
        Gpu("h200", 90, 140.4, 989),
        Gpu("b200", 100, 179.0, 2250),
        Gpu("gb200", 100, 184.0, 2500),
        Gpu("b300", 103, 268.0, 2250),
        Gpu("rtx-pro-6000", 120, 95.0, 500),
        Gpu("rtx-5090", 120, 31.8, 210),
    )
}
ALIASES = {"a100": "a100-80gb", "gh200-480gb": "gh200", "h100-80gb": "h100", "rtx4090": "rtx-4090"}

_AMPERE = frozenset({"bf16", "int4_awq", "int8_sq", "int8_wo", "int4_wo"})
SUPPORT: dict[int, frozenset[str]] = {
    80: _AMPERE,
    86: _AMPERE,
    89: _AMPERE | {"fp8", "w4a8_awq"},
    90: _AMPERE | {"fp8", "fp8_pc_pt", "w4a8_awq"},
    **dict.fromkeys((100, 103, 120), frozenset({"bf16", "fp8", "nvfp4"})),
}
# An FP8 KV cache is storage: attention converts what it reads. NVIDIA's hardware matrix for quantization
# (TensorRT-LLM 1.2 documentation, features/quantization) lists "FP8 KV Cache" for Ampere, which has no FP8 weights, and
# builder.py keeps it below SM 89 while it switches off paged context attention (R3). The older reference/support-matrix
# page names no FP8 for Ampere; it lists precisions of computation.
KV_SUPPORT = {sm: {"auto", "fp8", "int8"} if sm < 100 else {"auto", "fp8"} for sm in SMS}
# What a card is best served with, best first: (weights, KV cache).
OFFERED: dict[int, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys((80, 86), (("int4_awq", "auto"),)),
    **dict.fromkeys((89, 90), (("fp8", "fp8"), ("int4_awq", "auto"), ("w4a8_awq", "fp8"))),
    **dict.fromkeys((100, 103, 120), (("fp8", "fp8"), ("nvfp4", "fp8"))),
}


def canonical(name: str) -> str:
    """``NVIDIA H100 80GB HBM3`` and ``H100`` → ``h100``; the name itself in small letters where nothing is known."""
    word = re.sub(r"[\s_]+", "-", name.strip().lower())
    word = re.sub(r"^(nvidia-)?(geforce-)?|-(hbm\w*|pcie|sxm\d*)(?=-|$)|-blackwell.*$", "", word)
    return ALIASES.get(word, word)


def known(name: str) -> bool:
    """Whether ``name`` is a card of this table."""
    return canonical(name) in CARDS


def find(name: str) -> Gpu:
    """The card called ``name``; KeyError unless it is ``known``."""
    return CARDS[canonical(name)]


def reference(sm: int) -> Gpu:
    """The card that stands for a compute capability."""
    return next(gpu for gpu in CARDS.values() if gpu.sm == sm)


def supporting(precision: str) -> tuple[int, ...]:
    """Compute capabilities that run ``precision``."""
    return tuple(sm for sm in SMS if precision in SUPPORT[sm])


def present() -> list[tuple[str, int]]:
    """Name and SM of the NVIDIA cards of this machine, by ``nvidia-smi``; an empty list where there are none."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        table = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []  # no such tool, or the tool is there and the driver is not: no usable card
    rows = csv.reader(io.StringIO(table), skipinitialspace=True)
    known = (row for row in rows if len(row) == 2 and re.fullmatch(r"\d+\.\d", row[1]))
    return [(name, int(capability.replace(".", ""))) for name, capability in known]


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory of the machine, or of the container where that is less; None where the kernel does not say."""
    limits = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                limits.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass  # not Linux: nothing is known
    for name in _CGROUP_LIMITS:
        try:
            limits.append(int((root / name).read_text()))
        except (OSError, ValueError):
            continue  # no such limit, or "max"
    return min(limits, default=None)
