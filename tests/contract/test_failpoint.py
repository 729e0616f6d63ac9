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


def test_clock_and_descriptors_are_those_of_the_whole_process(tmp_path):
    file = tmp_path / "armed"
    source = f"""
import os, time
from contract import failpoint
real_s = time.time()
open({str(file)!r}, "w").close()
assert time.time() > real_s + 3500
until_s = time.monotonic() + 20
while time.monotonic() < until_s:
    try:
        os.close(os.dup(0))
    except OSError as error:
        break
    time.sleep(0.01)
else:
    raise SystemExit("descriptors are left")
os.unlink({str(file)!r})
while time.monotonic() < until_s:
    try:
        os.close(os.dup(0))
        break
    except OSError:
        time.sleep(0.01)
else:
    raise SystemExit("the limit was not restored")
"""
    environ = os.environ | {"TRIDENT_FAILPOINTS": f"clock.jump@{file},descriptors.few@{file}"}
    done = subprocess.run([sys.executable, "-c", source], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
