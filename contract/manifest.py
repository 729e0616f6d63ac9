"""``manifest.json``: the contents, origin and limits of an engine folder.

Every folder under ``engines/`` has one, written last; a folder without it is half-built and not served. ``verify``
returns the manifest of a folder whose files are those that were built.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from contract import encoder
from contract.errors import EngineFailed, NotFound
from contract.scheduling import BLOCK_TOKENS

FILE_NAME = "manifest.json"
DRAFT = "draft"  # folder of the draft model in an engine's folder
FORMAT = 1
KINDS = ("cpu", "trtllm", "llmapi", *encoder.KINDS)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter inside an engine. sha256: over its files. rank: of its widest matrix."""

    name: str
    sha256: str
    rank: int


@dataclass(frozen=True)
class EngineManifest:
    """One engine.

    name: of the recipe and of the folder.
    kind: cpu (OpenVINO IR), trtllm (TensorRT-LLM engine), llmapi (quantised checkpoint), embedding or rerank (OpenVINO
        IR of an encoder).
    model: the hub id or folder that the recipe names.
    architecture: the class in the model's config.json.
    checkpoint_sha256: over weights, config and tokenizer.
    recipe: the recipe's content.
    recipe_sha256: over the recipe.
    precision: of the weights.
    kv_cache_precision: of keys and values.
    max_batch_size: sequences at once.
    max_num_tokens: tokens per step over all sequences.
    max_seq_len: tokens of prompt and output of one sequence.
    kv_cache_tokens: size of the KV pool, None if it is sized at load.
    vocab_size: of the logits.
    eos_token_ids: every id that ends a text, the usual one first.
    tokenizer_sha256: of tokenizer.json.
    versions: of the tools that shaped the files (trident, openvino, tensorrt_llm, tensorrt, cuda, driver, …).
    created: UTC, ISO 8601.
    files: sha256 by path relative to the folder, without the manifest.
    properties: OpenVINO properties of the device; lora_target_modules of a GPU engine with adapters.
    evaluation: scores of the quality gate, None if it did not run.
    sm: compute capability times ten, GPU engines only.
    image: container that built the engine and must serve it, GPU engines only.
    memory_bytes: memory of a CPU engine's process with its whole KV pool, as planned; None for other kinds and for
        engines built before it was recorded.
    adapters: LoRA adapters that requests can name, in the order of their numbers, from 1.
    adapter_first_token_id: the id that most prompts begin with (python_backends/adapters.py); None without adapters.
    encoder: fields of contract.encoder.Encoder, of an embedding or rerank engine only.
    """

    name: str
    kind: str
    model: str
    architecture: str
    checkpoint_sha256: str
    recipe: Mapping[str, Any]
    recipe_sha256: str
    precision: str
    kv_cache_precision: str
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    kv_cache_tokens: int | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    tokenizer_sha256: str
    versions: Mapping[str, str]
    created: str
    files: Mapping[str, str]
    properties: Mapping[str, str] = field(default_factory=dict)
    evaluation: Mapping[str, object] | None = None
    sm: int | None = None
    image: str | None = None
    memory_bytes: int | None = None
    adapters: tuple[Adapter, ...] = ()
    adapter_first_token_id: int | None = None
    encoder: Mapping[str, Any] | None = None

    @property
    def kv_cache_blocks(self) -> int:
        """Blocks of the KV cache. One that is sized when the engine loads has as many as its batch may need."""
        if self.kv_cache_tokens is not None:
            return self.kv_cache_tokens // BLOCK_TOKENS
        return self.max_batch_size * -(-self.max_seq_len // BLOCK_TOKENS)

    @property
    def draft_tokens(self) -> int:
        """Draft tokens that a step of a CPU engine may verify beside each sequence's own; 0 if it never drafts."""
        drafting = self.recipe.get("speculative_decoding") if self.kind == "cpu" else None
        most: int = (drafting or {}).get("max_draft_len", 0)
        measured: Any = (self.evaluation or {}).get("draft_length") or {}
        return min(most, measured.get("chosen", most))

    def save(self, folder: Path) -> None:
        """Write manifest.json atomically and sync it to the disk."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=2, sort_keys=True) + "\n"
        write_atomically(folder / FILE_NAME, text)


def load(folder: Path) -> EngineManifest:
    """Read and check manifest.json, without the other files.
    Raises NotFound: there is no such engine.
    Raises EngineFailed: the folder is half-built, or its manifest is damaged or of another format.
    """
    if not folder.is_dir():
        raise NotFound(f"there is no engine at {folder}; {_how_to_build(folder)}{_others(folder)}")
    path = folder / FILE_NAME
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise EngineFailed(f"{folder} is half-built (it has no {FILE_NAME}); {_how_to_build(folder)}") from exc
    except (OSError, ValueError) as exc:
        raise EngineFailed(f"{path} cannot be read ({exc}); {_how_to_build(folder)}") from exc
    problem = _problem(table)
    if problem:
        raise EngineFailed(f"{path}: {problem}; {_how_to_build(folder)}")
    table.pop("format")
    adapters = tuple(Adapter(**entry) for entry in table["adapters"])
    return EngineManifest(**table | {"eos_token_ids": tuple(table["eos_token_ids"]), "adapters": adapters})


def verify(folder: Path, digest: Callable[[Path], str] | None = None) -> EngineManifest:
    """Return the manifest of a folder after checking every listed file.

    digest: return the sha256 of a file; for callers that keep digests of large files.
    Raises NotFound, EngineFailed: see ``load``.
    Raises EngineFailed: a file is missing or differs; names the first.
    """
    manifest = load(folder)
    for name, expected in sorted(manifest.files.items()):
        path = folder / name
        if not path.is_file():
            raise EngineFailed(f"{folder} is incomplete: {name} is missing; {_how_to_build(folder)}")
        if (digest or sha256_file)(path) != expected:
            raise EngineFailed(f"{folder} is damaged: {name} is not the file that was built; {_how_to_build(folder)}")
    return manifest


def write_atomically(path: Path, text: str) -> None:
    """Write a file and sync it to the disk; readers see it whole or as it was before."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def hash_files(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file below ``folder`` except the manifest, by relative path."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(FILE_NAME))
    return {str(path.relative_to(folder)): sha256_file(path) for path in paths}


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file as hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _how_to_build(folder: Path) -> str:
    return f"build it with `make build-engine ENGINE={folder.name}`"


def _others(folder: Path) -> str:
    built = sorted(p.parent.name for p in folder.parent.glob(f"*/{FILE_NAME}") if ".partial-" not in p.parent.name)
    near = ", ".join(difflib.get_close_matches(folder.name, built, n=3, cutoff=0.0))
    more = f"; `ls {shlex.quote(str(folder.parent))}` lists all {len(built)}" if len(built) > 3 else ""
    return f"; built are: {near}{more}" if built else ""


def _problem(table: object) -> str:
    """Return why ``table`` is not a manifest, empty if it is one."""
    if not isinstance(table, dict):
        return "it is not a JSON object"
    if table.get("format") != FORMAT:
        return f"its format is {table.get('format')!r}; this version reads {FORMAT}"
    known = {f.name for f in fields(EngineManifest)} | {"format"}
    if unknown := sorted(table.keys() - known):
        return f"unknown field {unknown[0]}"
    for name, default in _LATER.items():
        table.setdefault(name, default)
    if missing := sorted(known - table.keys()):
        return f"{missing[0]} is missing"
    for one in fields(EngineManifest):
        declared, _, null = str(one.type).partition(" | ")
        is_right, allowed = _BY_NAME.get(one.name) or _BY_TYPE[declared.partition("[")[0]]
        value = table[one.name]
        if not (is_right(value) or (null and value is None)):
            return f"{one.name}: must be {allowed}{' or null' if null else ''}, got {value!r}"
    return ""


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: object) -> bool:
    return _is_token_id(value) and value != 0


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_sha256(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_files(value: object) -> bool:
    """Relative paths that stay inside the folder, each with a digest."""
    if not isinstance(value, dict) or not value:
        return False
    return all(_is_sha256(v) and k and not k.startswith("/") and ".." not in k.split("/") for k, v in value.items())


def _is_adapters(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(entry, dict)
        and entry.keys() == {field.name for field in fields(Adapter)}
        and _is_text(entry["name"])
        and _is_sha256(entry["sha256"])
        and _is_count(entry["rank"])
        for entry in value
    )


# Fields that engines built earlier do not have.
_LATER: Mapping[str, object] = {"memory_bytes": None, "adapters": [], "adapter_first_token_id": None, "encoder": None}
_Check = tuple[Callable[[object], bool], str]  # whether a value is right, and what is allowed
_BY_TYPE: Mapping[str, _Check] = {
    "str": (_is_text, "a non-empty string"),
    "int": (_is_count, "a positive integer"),
    "Mapping": (lambda value: isinstance(value, dict), "a table"),
}
_BY_NAME: Mapping[str, _Check] = {
    "kind": (lambda value: value in KINDS, f"one of {', '.join(KINDS)}"),
    **dict.fromkeys(("checkpoint_sha256", "recipe_sha256", "tokenizer_sha256"), (_is_sha256, "64 hex digits")),
    **dict.fromkeys(("bos_token_id", "pad_token_id", "adapter_first_token_id"), (_is_token_id, "a token id")),
    "eos_token_ids": (lambda value: isinstance(value, list) and all(map(_is_token_id, value)), "a list of token ids"),
    "files": (_is_files, "a table of sha256 by relative path"),
    "adapters": (_is_adapters, "a list of objects with name, sha256 and rank"),
}
