"""`python -m build.lint`: what it prints and its exit status."""

import json
import subprocess
import sys

import classic_repository
import pytest

from build.base import layout
from build.lint.repository import NOTE
from tests.fakes.small_repository import DETOKENIZER, faults, put, texts


def test_our_own_model_repository_is_without_a_fault():
    assert [row for row in faults(layout.MODEL_REPOSITORY) if row[0] != NOTE] == []


def test_a_right_repository_is_without_a_fault(tmp_path):
    assert faults(put(tmp_path, texts())) == []


def run(*arguments: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "build.lint", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, cwd=layout.ROOT)


def test_the_program_prints_faults_and_ends_with_status_1(tmp_path):
    folder = str(classic_repository.write(tmp_path / "classic"))
    done = run(folder)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith(f"{folder}: ")
    rows = json.loads(run(folder, "--json").stdout)
    assert {"model", "rule", "severity", "message", "model_config_name"} == set(rows[0])


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
    assert "is not a folder" in run(str(tmp_path / "none")).stderr
