"""From what an engine was made: the part of its manifest that recipe, checkpoint and code decide."""

import dataclasses
import json
import platform
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from build.base import digest, layout
from build.base.checkpoint import Checkpoint
from build.base.encoder_checkpoint import EncoderCheckpoint
from build.model import lora_adapter
from build.recipe.recipe import Recipe
from build.recipe.schema import CPU, EncoderRecipe
from contract.manifest import EngineManifest


def manifest(recipe: Recipe, checkpoint: Checkpoint, versions: Mapping[str, str]) -> EngineManifest:
    """The engine's manifest without what comes last: ``files``, ``properties``, ``evaluation``, …"""
    gpu = recipe.kind != CPU
    return common(
        recipe,
        checkpoint,
        declared(recipe),
        versions,
        kv_cache_precision=recipe.kv_cache_precision,
        max_seq_len=recipe.max_seq_len or checkpoint.architecture.max_positions,
        kv_cache_tokens=recipe.kv_cache_tokens,
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        pad_token_id=checkpoint.pad_token_id,
        sm=recipe.sm if gpu else None,
        image=recipe.image if gpu else None,
        adapters=tuple(lora_adapter.record(adapter.name, adapter.path) for adapter in recipe.adapters),
    )


def declared(recipe: Recipe) -> dict[str, object]:
    """The recipe as the manifest holds it and is read back: a tuple is a list."""
    fields = {key: value for key, value in dataclasses.asdict(recipe).items() if key != "given"}
    return dict(json.loads(json.dumps(fields)))


def common(
    recipe: Recipe | EncoderRecipe,
    checkpoint: Checkpoint | EncoderCheckpoint,
    content: dict[str, object],
    versions: Mapping[str, str],
    **others: Any,
) -> EngineManifest:
    """A manifest with the fields that engines of all kinds fill in alike, and ``others``. content: of the recipe."""
    absent: dict[str, Any] = {"kv_cache_tokens": None, "eos_token_ids": (), "bos_token_id": None, "pad_token_id": None}
    return EngineManifest(
        name=str(recipe.name),
        kind=recipe.kind,
        model=recipe.model,
        architecture=checkpoint.architecture.name,
        checkpoint_sha256=checkpoint.sha256(),
        recipe=content,
        recipe_sha256=digest.sha256_json(content),
        precision=recipe.precision,
        max_batch_size=recipe.max_batch_size,
        max_num_tokens=recipe.max_num_tokens,
        vocab_size=checkpoint.architecture.vocab_size,
        tokenizer_sha256=digest.sha256_file(checkpoint.folder / "tokenizer.json"),
        versions=versions,
        created="",
        files={},
        **(absent | others),
    )


def now() -> str:
    """The time that ``EngineManifest.created`` has."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def texts_sha256(dataset: str) -> str | None:
    """Of the files of a local calibration set, by name; None for one that is known by its name alone."""
    path = layout.given(dataset)
    return files_sha256(path) if path.exists() else None


def files_sha256(path: Path) -> str:
    """Of a file, or of every file below a folder: names and contents."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return digest.sha256_json({str(file.relative_to(path)): digest.sha256_file(file) for file in files})


def versions(sources: Iterable[str]) -> dict[str, str]:
    """Of this project. ``builder`` stands for its code (``sources``, in build/), which moves between releases."""
    project = re.search(r'^version = "(.+)"', (layout.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    hashes = {name: digest.sha256_file(layout.ROOT / "build" / name) for name in sources}
    return {
        "trident": project.group(1) if project else "unknown",
        "builder": digest.sha256_json(hashes)[:16],
        "python": platform.python_version(),
    }
