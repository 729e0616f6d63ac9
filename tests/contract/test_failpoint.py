"""Failpoints: what arms them, and that a process without them is unchanged."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from contract import failpoint
from contract.errors import InvalidArgument


def test_nothing_is_armed_without_the_variable():
    assert failpoint._ARMED == {} and failpoint.value("engine.step") is None
    failpoint.write_to_disk()


@pytest.mark.parametrize("text", ["engine.stop", "disk.slow=much", "=1", "engine.step@/x,what@/y"])
def test_an_unknown_name_or_a_bad_value_is_refused(text: str):
    with pytest.raises(
        InvalidArgument, match="TRIDENT_FAILPOINTS: must be NAME=NUMBER@FILE with a name of engine.step"
    ):
        failpoint.parse(text)


def test_a_program_does_not_start_with_an_unknown_name():
    environ = os.environ | {"TRIDENT_FAILPOINTS": "engine.stop"}
    found = subprocess.run([sys.executable, "-c", "import contract.failpoint"], env=environ, capture_output=True)
    assert found.returncode == 1 and found.stderr.startswith(b"error: TRIDENT_FAILPOINTS: must be NAME=NUMBER@FILE")


def test_a_fault_is_there_while_its_file_exists(tmp_path, monkeypatch):
    file = tmp_path / "armed"
    monkeypatch.setattr(failpoint, "_ARMED", failpoint.parse(f"disk.full@{file},metrics.lie=7,disk.slow=0"))
    failpoint.write_to_disk()
    assert failpoint.value("metrics.lie") == 7 and failpoint.value("disk.full") is None
    file.touch()
    with pytest.raises(OSError) as raised:
        failpoint.write_to_disk()
    assert raised.value.errno == errno.ENOSPC
    file.unlink()
    failpoint.write_to_disk()


@pytest.mark.parametrize("left", [0, 3])
def test_clock_and_descriptors_are_those_of_the_whole_process(tmp_path, left):
    file = tmp_path / "armed"
    (tmp_path / "later").touch()
    # Between two that are open lie free numbers, which count too. Nothing is opened until the fault is
    # there, so that it counts what the process holds.
    source = f"""
import os, resource, time
from contract import failpoint

def wait_for_limit(condition):
    until_s = time.monotonic() + 20
    while not condition(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        assert time.monotonic() < until_s, "the limit did not change"
        time.sleep(0.01)

soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
real_s = time.time()
os.dup2(0, 20)
os.rename({str(tmp_path / "later")!r}, {str(file)!r})
assert time.time() > real_s + 3500
cygrpc = __import__("grpc._cython.cygrpc", fromlist=["time"])
assert cygrpc.time.time() < real_s + 3500
wait_for_limit(lambda limit: limit < soft)
opened = []
try:
    while True:
        opened.append(os.dup(0))
except OSError:
    pass
assert len(opened) == {left}, opened
os.unlink({str(file)!r})
wait_for_limit(lambda limit: limit == soft)
opened += [os.dup(0) for _ in range(30)]
for descriptor in [*opened, 20]:
    os.close(descriptor)
assert len(os.listdir("/proc/self/fd")) == 4  # three, and the listing's
"""
    environ = os.environ | {"TRIDENT_FAILPOINTS": f"clock.jump@{file},descriptors.few={left}@{file}"}
    done = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
