"""Before any model loads: can this machine serve this engine? The manifest says what it needs, the machine what it has.

Every mismatch would show itself later as a crash, an allocation that fails, or text that is wrong; here it is one
sentence that says what to do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from contract import manifest as manifests
from contract.errors import EngineFailed, Unavailable
from contract.manifest import EngineManifest
from server import machine as machines
from server.footprint import footprint
from server.machine import Card, Machine

GIB = 1024**3
CPU_PACKAGES = {"openvino": "openvino", "openvino_genai": "openvino-genai"}  # by their name in the manifest
SPARE_BYTES = 256 * 1024**2  # the server's own processes beside weights and KV pool


def check(
    manifest: EngineManifest,
    folder: Path,
    *,
    look: Callable[[], Machine] = machines.look,
    package: Callable[[str], str | None] = machines.package,
    available_bytes: Callable[[], int | None] = machines.available_memory_bytes,
) -> None:
    """Raises EngineFailed for a tokenizer that is not the model's, Unavailable for a machine that is not the engine's.

    look, package, available_bytes: how the machine is asked; a CPU engine asks no GPU's driver.
    """
    _check_tokenizer(manifest, folder)
    problem = (
        _problem_on_cpu(manifest, folder, package, available_bytes())
        if manifest.kind == "cpu"
        else _problem_on_gpu(manifest, folder, look()) or _import_problem(manifest, package)
    )
    if problem:
        raise Unavailable(f"engine {manifest.name} cannot be served here: {problem}")


def _check_tokenizer(manifest: EngineManifest, folder: Path) -> None:
    if "tokenizer.json" not in manifest.files:
        return  # not an engine for text: nothing here reads words into its ids
    path = folder / "tokenizer.json"
    if not path.is_file() or manifests.sha256_file(path) != manifest.tokenizer_sha256:
        raise EngineFailed(
            f"{path} is not the tokenizer the model was built with, so its ids would mean other words; "
            f"build it with `make build-engine ENGINE={manifest.name}`"
        )


def _problem_on_cpu(
    manifest: EngineManifest, folder: Path, package: Callable[[str], str | None], available: int | None
) -> str | None:
    again = f"`make build-engine ENGINE={manifest.name}` builds and verifies it for what is installed"
    for name, distribution in CPU_PACKAGES.items():
        built, here = manifest.versions.get(name), package(distribution)
        if built is not None and here is None:
            return f"{distribution} is not installed; `make setup` installs it"
        if built is not None and here != built:
            return f"it was built and verified with {distribution} {built}, and {here} is installed; {again}"
    need = _cpu_bytes(manifest, folder)
    if available is not None and need > available:
        return (
            f"weights, activations and {manifest.kv_cache_tokens} tokens of KV cache take {need / GIB:.1f} GiB, and "
            f"{available / GIB:.1f} GiB of memory are free; lower kv_cache_tokens or the precision in its recipe"
        )
    return None


def _cpu_bytes(manifest: EngineManifest, folder: Path) -> int:
    """What the plan computed; of an engine that does not record it, weights, KV pool, activations, server."""
    if manifest.memory_bytes is not None:
        return manifest.memory_bytes
    weights = sum(path.stat().st_size for path in folder.glob("*.bin"))
    beside = footprint(manifest, folder)
    return weights + beside.pool_bytes + beside.workspace_bytes + SPARE_BYTES


def _problem_on_gpu(manifest: EngineManifest, folder: Path, machine: Machine) -> str | None:
    ranks = int(manifest.recipe.get("tp", 1)) * int(manifest.recipe.get("pp", 1))
    problem = (
        _card_problem(manifest, machine, ranks)
        or _version_problem(manifest, machine)
        or _memory_problem(manifest, folder, machine, ranks)
    )
    return f"{problem}; serve it in {manifest.image} on {ranks} x SM {manifest.sm}" if problem else None


def _import_problem(manifest: EngineManifest, package: Callable[[str], str | None]) -> str | None:
    """The C++ backend brings its library; an engine on the LLM API is a Python model and imports TensorRT-LLM."""
    if manifest.kind != "llmapi" or package("tensorrt_llm") is not None:
        return None
    own = f"{machines.IMAGE_ENVIRONMENT}/bin/python3"
    return f"{sys.executable}, which runs its model, has no TensorRT-LLM; run the server with the image's own {own}"


def _card_problem(manifest: EngineManifest, machine: Machine, ranks: int) -> str | None:
    if not machine.cards:
        return f"it needs {ranks} GPU(s) of SM {manifest.sm}, and this machine has none that its driver lists"
    fitting = _fitting(manifest, machine)
    if not fitting:
        here = ", ".join(sorted({f"{card.name} (SM {card.sm})" for card in machine.cards}))
        return f"it was built for SM {manifest.sm}, and this machine has {here}"
    if len(fitting) < ranks:
        return f"it is split over {ranks} GPUs of SM {manifest.sm}, and this machine has {len(fitting)}"
    return None


def _version_problem(manifest: EngineManifest, machine: Machine) -> str | None:
    built = manifest.versions
    driver = built.get("driver")
    if driver and machine.driver and _numbers(machine.driver)[:1] < _numbers(driver)[:1]:
        return f"the driver here is {machine.driver}, older than {driver}, with which it was built"
    wanted, here = built.get("tensorrt_llm"), machine.tensorrt_llm
    if here is None:
        return "TensorRT-LLM is not installed here"
    if manifest.kind == "llmapi":
        older = wanted is not None and _numbers(here)[:2] < _numbers(wanted)[:2]
        return f"TensorRT-LLM here is {here}, older than the {wanted} it was made for" if older else None
    if wanted is not None and here != wanted:
        return f"it is an engine of TensorRT-LLM {wanted}, which no other version loads, and {here} is installed"
    wanted = built.get("tensorrt")
    if wanted is not None and _numbers(machine.tensorrt or "")[:3] != _numbers(wanted)[:3]:
        have = f"{machine.tensorrt} is installed" if machine.tensorrt else "there is none here"
        return f"it was compiled by TensorRT {wanted}, which no other version loads, and {have}"
    return None


def _memory_problem(manifest: EngineManifest, folder: Path, machine: Machine, ranks: int) -> str | None:
    pattern = "engine/*.engine" if manifest.kind == "trtllm" else "checkpoint/*.safetensors"
    weights = sum(path.stat().st_size for path in folder.glob(pattern)) // ranks
    roomiest = sorted(_fitting(manifest, machine), key=lambda card: card.free_bytes, reverse=True)[:ranks]
    tightest = roomiest[-1]
    beside = footprint(manifest, folder)
    need = weights + beside.pool_bytes + beside.workspace_bytes
    if need <= tightest.free_bytes:
        return None
    return (
        f"it takes {need / GIB:.1f} GiB of each GPU ({weights / GIB:.1f} weights, {beside.workspace_bytes / GIB:.1f} "
        f"workspace, {beside.pool_bytes / GIB:.1f} for {beside.pool_tokens} tokens of KV cache), and {tightest.name} "
        f"has {tightest.free_bytes / GIB:.1f} GiB free of {tightest.total_bytes / GIB:.1f}"
    )


def _fitting(manifest: EngineManifest, machine: Machine) -> list[Card]:
    return [card for card in machine.cards if card.sm == manifest.sm]


def _numbers(version: str) -> tuple[int, ...]:
    """``10.14.1.48`` → (10, 14, 1, 48); what follows a number that is none (``rc15``) is left out."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
