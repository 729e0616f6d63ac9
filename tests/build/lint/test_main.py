"""`python -m build.lint`: what it prints and its exit status."""

import subprocess
import sys

import pytest

from build.base import layout
from tests.fakes.small_repository import DETOKENIZER, faults, put, texts


def test_our_own_model_repository_is_without_a_fault():
    assert faults(layout.MODEL_REPOSITORY) == []


def test_a_right_repository_is_without_a_fault(tmp_path):
    assert faults(put(tmp_path, texts())) == []


def run(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "build.lint", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=layout.ROOT)


def test_the_program_prints_faults_and_ends_with_status_1(tmp_path):
    folder = put(tmp_path, texts() | {"detokenizer": DETOKENIZER.replace("count: 1", "count: 4")})
    done = run(str(folder))
    assert done.returncode == 1 and done.stderr == ""
    assert "error: ensemble: order: detokenizer follows a decoupled step" in done.stdout
    assert done.stdout.splitlines()[-1] == f"{folder}: 1 errors, 0 warnings"


@pytest.mark.slow
def test_the_program_checks_every_variant_unless_one_is_named(tmp_path):
    put(tmp_path, texts())
    (tmp_path / "detokenizer" / "configs").mkdir()
    (tmp_path / "detokenizer" / "configs" / "fast.pbtxt").write_text(DETOKENIZER.replace("count: 1", "count: 4"))
    assert "error: ensemble (fast): order: " in run(str(tmp_path)).stdout
    assert run(str(tmp_path), "--model-config-name", "").returncode == 0


@pytest.mark.slow
def test_the_program_says_when_there_is_nothing_to_read(tmp_path):
    assert run(str(tmp_path)).returncode == 2
    assert "repository: must be a folder" in run(str(tmp_path / "none")).stderr
