import sys

import pytest

from benchmarks import child_process
from contract.errors import EngineFailed


def test_a_process_ends_when_its_input_closes(tmp_path):
    code = "import sys; print('7'); sys.stdout.flush(); sys.stdin.read(); sys.exit(3)"
    with child_process.process([sys.executable, "-c", code], tmp_path / "log") as child:
        assert child_process.first_line(child, tmp_path / "log") == "7"
        assert child.poll() is None
    assert child.returncode == 3


def test_a_process_that_ends_early_is_an_error_with_its_log(tmp_path):
    code = "import sys; sys.exit('no such weights')"
    with child_process.process([sys.executable, "-c", code], tmp_path / "log") as child:
        child.wait()
        with pytest.raises(EngineFailed, match="no such weights"):
            child_process.first_line(child, tmp_path / "log")
