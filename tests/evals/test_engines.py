"""The gate on real engines, through lm-eval, tritonserver and the gateway: the demo model, in int8, and damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from contract import gate_result
from evals import lm_eval_run, results

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.evals,
    pytest.mark.skipif(not lm_eval_run.PYTHON.exists(), reason="lm-eval is not installed: make setup-evals"),
]
TASKS = ("--tasks", "prose,python,schema")  # what the demo can do: it has read nothing but Python


def run(folder: Path, *arguments: object) -> int:
    environ = {**os.environ, "TRIDENT_ENGINES_DIR": str(folder)}
    return subprocess.run([sys.executable, "-m", *map(str, arguments)], cwd=ROOT, env=environ, timeout=600).returncode


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Engines of the demo model and of one whose weights are two thirds noise, and the results of each."""
    folder = tmp_path_factory.mktemp("engines")
    damaged = folder / "checkpoint"
    shutil.copytree(ROOT / "build/demo_model/checkpoint", damaged)
    weights, rng = load_file(damaged / "model.safetensors"), np.random.default_rng(1)
    for name, value in weights.items():
        if value.ndim == 2:
            spread = float(np.asarray(value, np.float32).std())
            noise = rng.normal(scale=2 * spread, size=value.shape)
            weights[name] = (np.asarray(value, np.float32) + noise).astype(value.dtype)
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    assert run(folder, "build.engine", "--engine", "demo") == 0
    assert run(folder, "build.engine", "--engine", "damaged", "--model", damaged, "--precision", "exact") == 0
    for name in ("demo", "damaged"):
        assert run(folder, "evals", "run", "--engine", name, *TASKS, "--out", folder / f"{name}.json") == 0
    return folder


def test_every_task_was_scored_and_the_engine_is_named(folder):
    made = results.read(folder / "demo.json")
    manifest = folder / "demo" / "manifest.json"
    assert made.target.engine == "demo" and json.loads(manifest.read_text())["name"] == "demo"
    assert {name: len(results.scores(task.cases)) for name, task in made.tasks.items()} == {
        "prose": 24, "python": 40, "schema": 12,
    }  # fmt: skip
    figures = {name: results.summary(task) for name, task in made.tasks.items()}
    assert figures["python"]["score"] >= 0.5, "it has read Python"
    assert figures["schema"]["score"] == 1.0, "a grammar holds it to the schema"


def test_the_demo_passes_against_itself_and_a_damaged_one_fails(folder):
    rules = folder / "rules.toml"
    rules.write_text("refusals = 0.3\n")  # of which 12 chats can show no less
    gate = [folder / name for name in ("demo.json", "damaged.json", "gate.json")]
    assert run(folder, "evals", "gate", gate[0], gate[0], "--rules", rules, "--out", gate[2]) == 0
    assert gate_result.read(gate[2])["candidate"]["engine"] == "demo"
    assert run(folder, "evals", "gate", gate[0], gate[1], "--rules", rules, "--out", gate[2]) == 1
    failed = gate_result.read(gate[2])
    assert failed["verdict"] == "fail" and failed["metrics"]["task python"]["mean"] < -0.1
    assert failed["candidate"]["manifest_sha256"] != failed["baseline"]["manifest_sha256"] != ""
