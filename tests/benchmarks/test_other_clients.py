"""What becomes of a tool that measures, fails, or never ends."""

import sys

import pytest

from benchmarks.other_clients import Tool
from contract.errors import EngineFailed


def tool(code, read=lambda folder: {"requests/s": 2.5}):
    command = lambda load, requests, seed, folder: [sys.executable, "-c", code, *load, str(requests)]  # noqa: E731
    return Tool("it", "--at", "--rate", (), command, read, {})


@pytest.mark.slow
def test_a_tools_figures_are_read_and_its_failure_is_told(tmp_path, capsys):
    assert tool("print('x')").measure(["--at", "3"], 6, 0, tmp_path / "good") == {"requests/s": 2.5}
    assert "--at 3 6" in capsys.readouterr().err and (tmp_path / "good" / "output.txt").read_text() == "x\n"
    with pytest.raises(EngineFailed, match="no answer"):
        tool("import sys; sys.exit('no answer')").measure([], 1, 0, tmp_path)


@pytest.mark.slow
def test_a_tool_that_never_ends_is_ended(tmp_path):
    with pytest.raises(EngineFailed, match="it took more than 0.1 s"):
        tool("import time; time.sleep(60)").measure([], 1, 0, tmp_path, 0.1)
