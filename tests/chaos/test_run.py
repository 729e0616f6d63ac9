"""A run as a whole: `make chaos` is its test; here what needs no fleet."""

import os
import signal
import subprocess
import sys

import pytest

from chaos import run
from tests.chaos.planted import DEFECTS


def test_a_process_that_is_gone_gets_no_signal():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run._signal([ended.pid], signal.SIGKILL)


@pytest.mark.slow
def test_the_command_shows_the_same_scenario_of_the_same_seed_and_refuses_what_it_cannot_read():
    def show(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "chaos", "--show", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=os.getcwd())

    one, two = show("--seed", "7", "--count", "1"), show("--scenario", "/nowhere.chaos")
    assert one.stdout.startswith("seed 7\nduration 25\n") and one.returncode == 0
    assert two.returncode == 2 and "SCENARIO: must be a file" in two.stderr
    assert DEFECTS.keys() == {"leaked_permit", "lost_token", "doubled_token", "ignored_floor"}
