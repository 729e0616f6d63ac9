"""A run as a whole: `make chaos` is its test; here what needs no fleet."""

import os
import signal
import subprocess
import sys

import pytest

from chaos import run
from chaos.load import LEFT, PROMPTS, Outcome


def test_a_process_that_is_gone_gets_no_signal():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run._signal([ended.pid], signal.SIGKILL)


def test_what_callers_that_left_had_used_is_in_the_gateways_logs(tmp_path):
    line = '{"message":"generation","request_id":"chaos-%d","tenant":"%s/a","input_tokens":3,"output_tokens":2}'
    tenant, other = PROMPTS[0].tenant, PROMPTS[-1].tenant
    text = "\n".join([line % (1, tenant), line % (2, tenant), line % (4, other), (line % (3, tenant))[:-9]])
    (tmp_path / "gateway-1.log").write_text(text)
    outcomes = [Outcome(PROMPTS[0], "http", "one", 0.0, error=LEFT, id=f"chaos-{number}") for number in (1, 3, 4)]
    run._read_logs(tmp_path, [*outcomes, Outcome(PROMPTS[0], "http", "one", 0.0, id="chaos-2")])
    assert [one.tokens for one in outcomes] == [(3, 2), None, None]


@pytest.mark.slow
def test_the_command_shows_the_same_scenario_of_the_same_seed_and_refuses_what_it_cannot_read(tmp_path):
    def show(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "chaos", "--show", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=os.getcwd())

    one, two = show("--seed", "7", "--count", "1"), show("--scenario", "/nowhere.chaos")
    assert one.stdout.startswith("seed 7\nduration 25\n") and one.returncode == 0
    assert two.returncode == 2 and "SCENARIO: must be a file" in two.stderr
    none = show("--scenario", str(tmp_path))
    assert none.returncode == 2 and "SCENARIO: must be a script or a folder of *.chaos files" in none.stderr
