import json
import platform
import subprocess
import sys

import pytest

from benchmarks import machine


def test_the_load_of_other_processes_is_busy_time_that_is_not_ours():
    before, after = machine.CpuTime(100.0, 50.0, 1.0), machine.CpuTime(120.0, 66.0, 3.0)
    found = machine.host_load(before, after, 12.0)
    assert (found.ours, found.others, found.stolen) == pytest.approx((0.6, 0.2, 0.1))
    assert found.disturbance == pytest.approx(0.3)


def test_more_cpu_than_the_machine_counted_is_no_load_of_others():
    at = machine.CpuTime(100.0, 50.0, 0.0)
    assert machine.host_load(at, machine.CpuTime(110.0, 55.0, 0.0), 6.0).others == 0.0


def test_this_machine_is_described():
    now, conditions = machine.cpu_time(), machine.described()
    assert 0 < now.busy_s < now.total_s
    assert conditions["cores"] >= 1 and conditions["load_average_1min"] >= 0 and conditions["cpu"]


def test_processes_started_on_some_cores_stay_there():
    every, command = machine.cores(), [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with machine.on_cores(every[-1:]):
        assert json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == every[-1:]
    assert machine.cores() == every


def test_our_own_work_is_no_disturbance(monkeypatch):
    watch = machine.Watch()
    monkeypatch.setattr(
        machine, "cpu_time", lambda: machine.CpuTime(watch._cpu.total_s + 10.0, watch._cpu.busy_s + 4.0, 0)
    )
    monkeypatch.setattr(machine, "_ours_s", lambda: watch._ours_s + 3.0)
    assert watch.others() == pytest.approx(0.1, abs=0.01 + watch._cpu.stolen_s / 10)
    assert watch.load(1.0).ours == pytest.approx(0.4) and watch.load(1.0).others == pytest.approx(0.0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
def test_every_64_bit_x86_processor_has_sse2():
    assert "sse2" in machine.cpu_flags()
