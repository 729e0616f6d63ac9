import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks import generator_processes
from benchmarks.driver import Extent, Share
from benchmarks.generator_processes import Load
from benchmarks.lengths import Fixed
from benchmarks.prompts import Prompts
from benchmarks.target import EnsembleTarget
from benchmarks.workload import Workload
from contract.errors import EngineFailed
from contract.generation import FinishReason
from tests.fakes.replica import Script

pytestmark = pytest.mark.slow


def load(url, requests=12, **options):
    workload = Workload(4, None, Fixed(5), Fixed(3))
    return Load(workload, Extent(None, 0.0, requests), partial(EnsembleTarget, url), Prompts, **options)


@pytest.mark.parametrize("processes", [1, 2])
def test_generators_share_one_load(replica, processes):
    server = replica()
    result = generator_processes.run(load(server.url), processes)
    assert [record.index for record in result.records] == list(range(12))
    assert all(record.ok for record in result.records) and len(result.generators) == processes
    assert server.counts.started == 12


def test_loads_of_their_own_run_together_while_a_context_is_open(replica):
    server, seen = replica(), []

    class Watch:
        def __enter__(self):
            seen.append(server.counts.started)

        def __exit__(self, *exc):
            seen.append(server.counts.finished)

    loads = [(load(server.url, 5, uvloop=True), Share()), (load(server.url, 7), Share())]
    first, second = generator_processes.run_apart(loads, while_running=Watch())
    assert (len(first.records), len(second.records)) == (5, 7) and seen == [0, 12]
    assert first.started_s == second.started_s


class NotedPrompts(Prompts):
    def __init__(self, notes):
        super().__init__()
        self._notes = notes

    def text(self, rng, tokens, prefix=""):
        with self._notes.open("a") as notes:
            notes.write("made\n")
        return super().text(rng, tokens, prefix)


def test_prompts_are_made_before_the_load_begins(replica, tmp_path):
    made = []

    class Watch(contextlib.nullcontext):
        def __enter__(self):
            made.extend((tmp_path / "notes").read_text().split())

    one = dataclasses.replace(load(replica().url), prompts=partial(NotedPrompts, tmp_path / "notes"))
    generator_processes.run_apart([(one, Share(nth, 2)) for nth in range(2)], while_running=Watch())
    assert made == ["made"] * 12


def test_a_generator_that_fails_is_an_error(replica):
    broken = Load(Workload(1), Extent(None, 0.0, 1), partial(int, "x"), Prompts)
    with pytest.raises(EngineFailed, match="ended with code 1"):
        generator_processes.run_apart([(broken, Share())])


def test_a_generator_that_ends_without_a_result_is_an_error(replica):
    ended = dataclasses.replace(load(replica().url), prompts=partial(sys.exit, 0))
    with pytest.raises(EngineFailed, match="ended with code 0"):
        generator_processes.run_apart([(ended, Share())], timeout_s=5)


def test_a_load_that_takes_too_long_is_an_error(replica):
    with pytest.raises(EngineFailed, match="did not report within 0 s"):
        generator_processes.run_apart([(load(replica().url, 100_000), Share())], timeout_s=0.2)


INTERRUPTED = """
import sys
from functools import partial
from benchmarks.command_line import main
if __name__ == "__main__":
    sys.exit(main(["run", "--url", sys.argv[1], "--generators", "2", "--output", "200", "--duration", "60"]))
"""


def test_ctrl_c_ends_the_generators_without_a_word(replica, tmp_path):
    server = replica(lambda seen: Script(tuple("ab" * 100), FinishReason.LENGTH, gap_s=0.05))
    (program := tmp_path / "program.py").write_text(INTERRUPTED)
    command, environ = (
        [sys.executable, str(program), server.url],
        {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits that it is ignored
    try:
        child = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    while not server.counts.started:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    assert b"Traceback" not in child.communicate()[1] and child.returncode == 130
