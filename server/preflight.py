"""Checks before any model loads whether this machine can serve an engine, from the engine's manifest.

A mismatch would show later as a crash, a failed allocation, or wrong text; here it is one error that tells what to do.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil

from contract import encoder
from contract import manifest as manifests
from contract.errors import EngineFailed, Unavailable
from contract.manifest import EngineManifest
from server import machine as machines
from server.machine import Gpu, Machine
from server.memory_footprint import memory_footprint, parallelism

GIB = 1024**3
CPU_PACKAGES = {"openvino": "openvino", "openvino_genai": "openvino-genai"}  # by key in the manifest
RESERVE_BYTES = 256 * 1024**2  # the server's processes beside weights and KV pool
CGROUP = Path("/sys/fs/cgroup")  # in a container its own
# The limit, the use, and the start of the names in memory.stat: cgroup v2, v1.
CGROUP_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),
)


def free_memory_bytes() -> int:
    """Return the memory available without swapping, on this machine and within a container's limit."""
    free = psutil.virtual_memory().available
    for limit, used, start in CGROUP_FILES:
        try:
            within = int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text())
            lines = (CGROUP / limit).with_name("memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # another version of cgroups, or no limit
            continue
        # Files that were read count as used until something else needs the memory.
        cached = {f"{start}inactive_file", f"{start}active_file"}
        within += sum(int(size) for name, size in map(str.split, lines) if name in cached)
        free = min(free, within)
    return free


def check(manifest: EngineManifest, folder: Path) -> None:
    """Check the tokenizer's digest, and the machine's hardware, versions and free memory.

    Raises EngineFailed: the tokenizer is not the one the model was built with.
    Raises Unavailable: the machine cannot serve the engine.
    """
    _check_tokenizer(manifest, folder)
    if manifest.kind in ("cpu", *encoder.KINDS):
        problem = _problem_on_cpu(manifest, folder)
    else:
        problem = _problem_on_gpu(manifest, folder, machines.inspect()) or _import_problem(manifest)
    if problem:
        raise Unavailable(f"engine {manifest.name} cannot be served here: {problem}")


def _check_tokenizer(manifest: EngineManifest, folder: Path) -> None:
    if "tokenizer.json" not in manifest.files:
        return  # no text is tokenized for this engine
    path = folder / "tokenizer.json"
    if not path.is_file() or manifests.sha256_file(path) != manifest.tokenizer_sha256:
        raise EngineFailed(
            f"{path}: must be the tokenizer that the model was built with, got another one, with other token ids; "
            f"build it with `make build-engine ENGINE={manifest.name}`"
        )


def _problem_on_cpu(manifest: EngineManifest, folder: Path) -> str | None:
    rebuild = f"`make build-engine ENGINE={manifest.name}` builds and verifies it for what is installed"
    for name, distribution in CPU_PACKAGES.items():
        built, here = manifest.versions.get(name), machines.package(distribution)
        if built is not None and here is None:
            return f"{distribution} is not installed; `make setup` installs it"
        if built is not None and here != built:
            return f"it was built and verified with {distribution} {built}, and {here} is installed; {rebuild}"
    available = free_memory_bytes()
    need = _cpu_bytes(manifest, folder)
    if need <= available:
        return None
    take = f"take {need / GIB:.1f} GiB, and {available / GIB:.1f} GiB"
    if manifest.kind in encoder.KINDS:
        return f"weights and activations {take} of memory are free; lower max_num_tokens or the precision in its recipe"
    return (
        f"weights, activations and {manifest.kv_cache_tokens} tokens of KV cache {take} "
        "of memory are free; lower kv_cache_tokens or the precision in its recipe"
    )


def _cpu_bytes(manifest: EngineManifest, folder: Path) -> int:
    """Memory by the build plan; without one, the sum of weights, KV pool, activations and the server's processes."""
    if manifest.memory_bytes is not None:
        return manifest.memory_bytes
    weights = sum(path.stat().st_size for path in folder.glob("*.bin"))
    beside = memory_footprint(manifest, folder)
    return weights + beside.pool_bytes + beside.workspace_bytes + RESERVE_BYTES


def _problem_on_gpu(manifest: EngineManifest, folder: Path, machine: Machine) -> str | None:
    tp, pp = parallelism(manifest)
    ranks = tp * pp
    problem = (
        _gpu_problem(manifest, machine, ranks)
        or _version_problem(manifest, machine)
        or _memory_problem(manifest, folder, machine, ranks)
    )
    return problem and f"{problem}; serve it in {manifest.image} on {ranks} x SM {manifest.sm}"


def _import_problem(manifest: EngineManifest) -> str | None:
    """An engine on the LLM API is a Python model that imports TensorRT-LLM; the C++ backend brings its library."""
    if manifest.kind != "llmapi" or machines.package("tensorrt_llm") is not None:
        return None
    python = f"{machines.IMAGE_ENVIRONMENT}/bin/python3"
    return f"{sys.executable}, which runs its model, has no TensorRT-LLM; run the server with the image's own {python}"


def _gpu_problem(manifest: EngineManifest, machine: Machine, ranks: int) -> str | None:
    if not machine.gpus:
        return f"it needs {ranks} GPU(s) of SM {manifest.sm}, and the driver of this machine lists none"
    matching = _matching(manifest, machine)
    if not matching:
        here = ", ".join(sorted({f"{gpu.name} (SM {gpu.sm})" for gpu in machine.gpus}))
        return f"it was built for SM {manifest.sm}, and this machine has {here}"
    if len(matching) < ranks:
        return f"it is split over {ranks} GPUs of SM {manifest.sm}, and this machine has {len(matching)}"
    return None


def _version_problem(manifest: EngineManifest, machine: Machine) -> str | None:
    built = manifest.versions
    driver = built.get("driver")
    if driver and machine.driver and _numbers(machine.driver)[:1] < _numbers(driver)[:1]:
        return f"the driver here is {machine.driver}, older than {driver}, with which it was built"
    required, here = built.get("tensorrt_llm"), machine.tensorrt_llm
    if here is None:
        return "TensorRT-LLM is not installed here"
    if manifest.kind == "llmapi":
        older = required is not None and _numbers(here)[:2] < _numbers(required)[:2]
        return f"TensorRT-LLM here is {here}, older than the {required} it was made for" if older else None
    if required is not None and here != required:
        return f"it is an engine of TensorRT-LLM {required}, which no other version loads, and {here} is installed"
    required = built.get("tensorrt")
    if required is not None and _numbers(machine.tensorrt or "")[:3] != _numbers(required)[:3]:
        have = f"{machine.tensorrt} is installed" if machine.tensorrt else "there is none here"
        return f"it was compiled by TensorRT {required}, which no other version loads, and {have}"
    return None


def _memory_problem(manifest: EngineManifest, folder: Path, machine: Machine, ranks: int) -> str | None:
    pattern = "engine/*.engine" if manifest.kind == "trtllm" else "checkpoint/*.safetensors"
    weights = sum(path.stat().st_size for path in folder.glob(pattern)) // ranks
    most_free = sorted(_matching(manifest, machine), key=lambda gpu: gpu.free_bytes, reverse=True)[:ranks]
    smallest = most_free[-1]
    beside = memory_footprint(manifest, folder)
    need = weights + beside.pool_bytes + beside.workspace_bytes
    if need <= smallest.free_bytes:
        return None
    return (
        f"it takes {need / GIB:.1f} GiB of each GPU ({weights / GIB:.1f} weights, {beside.workspace_bytes / GIB:.1f} "
        f"workspace, {beside.pool_bytes / GIB:.1f} for {beside.pool_tokens} tokens of KV cache), and {smallest.name} "
        f"has {smallest.free_bytes / GIB:.1f} GiB free of {smallest.total_bytes / GIB:.1f}"
    )


def _matching(manifest: EngineManifest, machine: Machine) -> list[Gpu]:
    return [gpu for gpu in machine.gpus if gpu.sm == manifest.sm]


def _numbers(version: str) -> tuple[int, ...]:
    """``10.14.1.48`` → (10, 14, 1, 48); a suffix such as ``rc15`` is dropped."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
