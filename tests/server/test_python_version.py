"""The check of the Python version before the set-up."""

import subprocess
import sys

import pytest

from server import python_version


@pytest.mark.parametrize("version", [(3, 10), (3, 11), (3, 12)])
def test_supported_versions_pass(version):
    assert python_version.problem(version) is None


@pytest.mark.parametrize("version", [(2, 7), (3, 9), (3, 13)])
def test_other_versions_are_refused_by_number(version):
    message = python_version.problem(version)
    assert "needs Python 3.10, 3.11 or 3.12" in message and f"{version[0]}.{version[1]}" in message


def test_the_script_accepts_the_python_that_runs_the_tests():
    ran = subprocess.run([sys.executable, "-I", "-S", python_version.__file__], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
