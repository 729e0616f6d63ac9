"""Tests marked ``build_env`` run where torch and ModelOpt are installed and say why they are skipped elsewhere."""

import ast
import importlib.util
import os

import pytest

from build.base import layout
from build.quantise import quantize
from build.recipe.quantization import Quantization
from tests.fakes import quantisable_models


def pytest_collection_modifyitems(items):
    missing = importlib.util.find_spec("modelopt") is None
    skip = pytest.mark.skip(reason="needs torch and nvidia-modelopt: `make setup-build`, then `make test-build`")
    for item in items:
        if item.get_closest_marker("build_env"):
            # Warnings of torch and its like are not ours to fail on.
            item.add_marker(skip if missing else pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def stage(tmp_path_factory):
    """stage(model, qformat, kv, tp): runs the stage once per combination and returns the checkpoint folder."""
    import torch

    torch.set_num_threads(min(2, os.cpu_count() or 1))
    root = tmp_path_factory.mktemp("stage")

    def make(model, qformat, kv=None, tp=1, **changes):
        if not (root / model).exists():
            quantisable_models.write(root / model, model)
        output = root / "-".join(map(str, (model, qformat, kv, tp, *changes.items())))
        if not output.exists():
            job = Quantization(root / model, output, qformat, kv, tp, batch_size=8, **changes)
            quantize.quantize(job, quantisable_models.BLOCKS, notify=lambda line: None)
        return output

    make.model = lambda model: make(model, "full_prec") and root / model
    return make


def imported(sources):
    """What the files ``sources`` of build/ import of it, directly or not, with themselves."""
    found, left = set(), set(sources)
    while left:
        found |= left
        names = {name for source in left for name in _names(source)}
        files = {"/".join(name.split(".")[1:]) + ".py" for name in names if name.startswith("build.")}
        left = {file for file in files if (layout.ROOT / "build" / file).is_file()} - found
    return found


def _names(source):
    for node in ast.walk(ast.parse((layout.ROOT / "build" / source).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


@pytest.fixture
def sources_imported():
    return imported
