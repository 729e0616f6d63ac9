"""Where a build finds and leaves its files."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "build" / "recipes"
OPTION_TABLES = ROOT / "build" / "trtllm"
ENGINES = Path(os.environ.get("TRIDENT_ENGINES_DIR") or ROOT / "engines").expanduser().absolute()
FETCHED = ROOT / ".cache" / "models"
MODEL_REPOSITORY = ROOT / "model_repository"


def given(path: str) -> Path:
    """A path that a recipe names, from the repository root; ``~`` is a home, and an unknown ~USER stays as it is."""
    return ROOT / os.path.expanduser(path)


def fetched_model(hub_id: str, revision: str | None = None) -> Path:
    """Where the files of a hub model are put, of each named revision apart."""
    name = f"{hub_id}@{revision}" if revision else hub_id
    return FETCHED / name.replace("/", "--")


def checkpoint(engine: str) -> Path:
    """The quantised or converted checkpoint: config.json and one ``rank{N}.safetensors`` per rank."""
    return ENGINES / engine / "checkpoint"


def compiled(engine: str) -> Path:
    """The compiled engine: config.json and one ``rank{N}.engine`` per rank."""
    return ENGINES / engine / "engine"


def evaluation(engine: str) -> Path:
    """What the quality gate measured on the quantised checkpoint, until the manifest holds it."""
    return ENGINES / engine / "evaluation.json"


def built_on(engine: str) -> Path:
    """GPU, driver and libraries of the machine that compiled the engine (``server/machine.py``'s JSON)."""
    return ENGINES / engine / "built_on.json"


def logs(engine: str) -> Path:
    return ENGINES / engine / "logs"


def write_whole(path: Path, text: str) -> None:
    """Write a file, whole or not at all; its folder is made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


@contextmanager
def made_once(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes ``folder`` if the block ends well, unless another process was faster."""
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        if not folder.is_dir():
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def relative(path: Path) -> Path:
    """``path`` from the repository root, or itself where it lies elsewhere."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
