"""A Hugging Face checkpoint folder, opened and checked before anything long is started on it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from build.base import architecture as architectures
from build.base import digest, gguf_file, shards
from build.base.architecture import Architecture
from build.base.json_fields import BadField, CheckpointError, read_object, shown
from build.base.shards import StoredTensor

if TYPE_CHECKING:
    from build.base.encoder_checkpoint import BertArchitecture

TOKENIZER_FILES = """
    tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.json
    chat_template.jinja
""".split()
_INDEX = "model.safetensors.index.json"
# What older exports carry along and this reader skips: the rotary frequencies are computed from the config.
_IGNORED_ENDINGS = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; weights stay on disk until ``StoredTensor.raw`` or ``f32`` is called.

    config, generation: the parsed JSON files (``{}`` when there is no generation_config.json).
    tensors: exactly ``architecture.expected_tensors()``, each found and of the right shape.
    graph: the folder of the f32 graph of an ``exported`` architecture, once it is there.
    eos_token_ids: every end id, the usual one first; bos_token_id, pad_token_id: None when the model has none.
    """

    folder: Path
    config: Mapping[str, object]
    generation: Mapping[str, object]
    architecture: Architecture
    tensors: Mapping[str, StoredTensor]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    graph: Path | None = None

    def files(self) -> list[Path]:
        """What an engine is made from: config, tokenizer and the weight files that are read."""
        names = ("config.json", "generation_config.json", _INDEX, *TOKENIZER_FILES)
        return files_of(self.folder, names, self.tensors)

    def copy_side_files(self, folder: Path) -> None:
        """What serving needs beside the weights: config.json, the tokenizer's files as they are, and a
        generation_config.json whose end ids are always a list."""
        for name in ("config.json", *TOKENIZER_FILES):
            source = self.folder / name
            if source.is_file():
                shutil.copyfile(source, folder / name)
        if not (folder / "tokenizer_config.json").exists():
            (folder / "tokenizer_config.json").write_text("{}\n")  # no chat template, no named tokens
        generation = dict(self.generation) | {"eos_token_id": list(self.eos_token_ids)}
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    def sha256(self) -> str:
        """Over the names and contents of ``files``."""
        return digest.sha256_json({path.name: digest.sha256_file(path) for path in self.files()})


def files_of(folder: Path, names: Iterable[str], tensors: Mapping[str, StoredTensor]) -> list[Path]:
    """Those of ``names`` that are there, and the files of ``tensors``."""
    weights = {tensor.path for tensor in tensors.values()}
    return sorted({path for name in names if (path := folder / name).is_file()} | weights)


def open_checkpoint(folder: Path, any_family: bool = False) -> Checkpoint:
    """Reads headers and JSON only. any_family: also what only optimum-intel can export. Raises CheckpointError."""
    config = read_json(folder, "config.json")
    try:
        arch = architectures.from_config(config, any_family)
    except BadField as exc:
        raise CheckpointError(f"{folder}: {exc}") from exc
    try:
        tensors = _stored(folder, lambda name: name) if arch.exported else read_tensors(folder, arch)
    except BadField as exc:
        raise CheckpointError(str(exc)) from exc  # names the file, and so the folder
    if arch.exported:
        arch = replace(arch, parameters=sum(math.prod(tensor.shape) for tensor in tensors.values()))
    generation = read_json(folder, "generation_config.json") if (folder / "generation_config.json").exists() else {}
    tokenizer = check_tokenizer(folder, arch)
    ends = (*_token_ids("eos_token_id", generation, config, arch), *_end_of_turn(folder, tokenizer, arch))
    return Checkpoint(
        folder=folder,
        config=config,
        generation=generation,
        architecture=arch,
        tensors=tensors,
        eos_token_ids=tuple(dict.fromkeys(ends)),
        bos_token_id=next(iter(_token_ids("bos_token_id", generation, config, arch)), None),
        pad_token_id=next(iter(_token_ids("pad_token_id", generation, config, arch)), None),
    )


def read_json(folder: Path, name: str) -> dict[str, object]:
    try:
        return read_object(folder / name)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{folder} has no {name}; is it a Hugging Face checkpoint?") from exc
    except BadField as exc:
        raise CheckpointError(str(exc)) from exc


def read_tensors(
    folder: Path, arch: Architecture | BertArchitecture, named: Callable[[str], str | None] = lambda name: name
) -> dict[str, StoredTensor]:
    """``arch.expected_tensors()`` in the folder's weight files. named: what ``arch`` calls a stored tensor, None for
    one to leave out. Raises CheckpointError, BadField."""
    stored = _stored(folder, named)
    expected = arch.expected_tensors()
    for name, shape in expected.items():
        tensor = stored.get(name)
        if tensor is None:
            raise CheckpointError(f"{folder}: the weights lack {name} {list(shape)}, which {arch.name} needs")
        if tensor.shape != shape:
            raise CheckpointError(f"{tensor.path}: {name} is {list(tensor.shape)}; config.json says {list(shape)}")
        if tensor.dtype not in shards.DTYPES:
            allowed = ", ".join(shards.DTYPES)
            raise CheckpointError(f"{tensor.path}: {name} must be stored as one of {allowed}, got {tensor.dtype}")
    # A tensor that the graph does not read means that the graph would compute another model.
    known = expected.keys() | ({"lm_head.weight"} if arch.tied else set())
    if extra := [n for n in stored if n not in known and not n.endswith(_IGNORED_ENDINGS)]:
        raise CheckpointError(f"{stored[extra[0]].path}: {extra[0]} has no place in {arch.name} as config.json has it")
    return {name: stored[name] for name in expected}


def _stored(folder: Path, named: Callable[[str], str | None]) -> dict[str, StoredTensor]:
    """Every tensor of the weight files by its name, once."""
    if (folder / gguf_file.INDEX).is_file():
        return gguf_file.read_index(folder)
    stored: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        tensors = {name: tensor for n, tensor in shards.read_header(path).items() if (name := named(n)) is not None}
        if twice := sorted(stored.keys() & tensors.keys()):
            where = f"{stored[twice[0]].path.name} and in {path.name}"
            raise CheckpointError(f"{folder}: {twice[0]} is stored twice, in {where}; it is unknown which one is meant")
        stored |= tensors
    return stored


def _weight_files(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if (folder / "model.safetensors").is_dir():
        raise CheckpointError(f"{folder / 'model.safetensors'} is a folder; it must be a file")
    if (folder / _INDEX).is_file():
        names = read_json(folder, _INDEX).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise CheckpointError(f"{folder / _INDEX} has no weight_map of tensor names to file names")
        paths = [folder / name for name in sorted(set(names.values()))]
        for path in paths:
            if path.parent != folder or not os.path.isfile(path):  # unlike Path's own False for what no name can be
                raise CheckpointError(f"{folder}: {shown(path.name)[1:-1]} is missing; {_INDEX} names it")
        return paths
    there = (p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    lone = sorted(p for p in there if p.is_file())
    if len(lone) == 1:
        return lone
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise CheckpointError(f"{folder} has PyTorch weights only; convert them to safetensors first")
    raise CheckpointError(f"{folder} has no model.safetensors and no {_INDEX}")


def check_tokenizer(folder: Path, arch: Architecture | BertArchitecture) -> dict[str, object]:
    """The content of tokenizer.json. Raises CheckpointError where its vocabulary is not the model's."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        slow = " (only a SentencePiece tokenizer.model)" if (folder / "tokenizer.model").is_file() else ""
        remedy = "load it with transformers' AutoTokenizer and save it as a fast tokenizer"
        raise CheckpointError(f"{folder} has no tokenizer.json{slow}; {remedy}")
    tokenizer = read_json(folder, path.name)
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise CheckpointError(f"{path}: model must be an object with type and vocab, got {shown(model)}")
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        for token, number in vocab.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise CheckpointError(f"{path}: model.vocab: {shown(token)} must have an id, got {shown(number)}")
        largest = max(vocab.values(), default=-1)
    elif isinstance(vocab, list):
        largest = len(vocab) - 1
    else:
        raise CheckpointError(f"{path}: model.vocab must be an object or a list, got {shown(vocab)}")
    if largest < 0:
        raise CheckpointError(f"{path}: model.vocab is empty")
    # Added tokens beyond the matrix are common (an unused <pad>) and refused as ids later; the base vocabulary
    # reaching beyond it means the tokenizer belongs to another model.
    if largest >= arch.vocab_size:
        problem = f"tokenizer.json has ids up to {largest}; the model's vocab_size is {arch.vocab_size}"
        raise CheckpointError(f"{folder}: {problem}")
    return tokenizer


def _end_of_turn(folder: Path, tokenizer: Mapping, arch: Architecture) -> list[int]:
    """The id of tokenizer_config.json's eos_token: chats end with it, and some generation_config.json lack it."""
    path = folder / "tokenizer_config.json"
    token = read_json(folder, path.name).get("eos_token") if path.exists() else None
    text = token.get("content") if isinstance(token, dict) else token
    added = tokenizer.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    ids = [entry.get("id") for entry in entries if text is not None and entry.get("content") == text]
    return [number for number in ids if isinstance(number, int) and 0 <= number < arch.vocab_size]


def _token_ids(key: str, generation: Mapping, config: Mapping, arch: Architecture) -> tuple[int, ...]:
    """From generation_config.json, else config.json; null is absent, -1 (an old spelling of none) is dropped.

    An entry of config.json that generation_config.json overrides must still hold integers: config.json is copied
    into the engine, where other programs read it. Its range is not checked; published configs have unused ids.
    """
    files = {"config.json": config, "generation_config.json": generation}
    ids: list[int] = []
    for name, fields in files.items():
        value = fields.get(key)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        last = 2**63 if generation.get(key) is not None and name == "config.json" else arch.vocab_size
        if any(isinstance(token, bool) or not isinstance(token, int) or not -1 <= token < last for token in ids):
            allowed = f"token ids below vocab_size {arch.vocab_size}"
            raise CheckpointError(f"{name}: {key} must be {allowed}, got {shown(value)}")
    return tuple(dict.fromkeys(token for token in ids if token >= 0))
