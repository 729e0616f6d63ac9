import os
import subprocess
import time

import pytest

from python_backends.cpu_engine.serving_cost import CpuUse, ServerCpu, ServingCost

S = 10**9


class Machine:
    """Counters of a machine with as many cores as this one, moved by hand."""

    def __init__(self):
        self.cores = len(os.sched_getaffinity(0))
        self.use, self.now_ns, self.sent = CpuUse(0, 0, 0, 0), 10**12, 0
        self.cost = ServingCost(lambda: self.use)
        self.cost.update(self.now_ns, 0)

    def go_on(self, response_s, responses=1000, others=0.0, seconds=1):
        self.now_ns += seconds * S
        self.sent += responses
        all_s = seconds * self.cores
        ours = (response_s * responses, (1 - others) * all_s * 0.75, all_s, (1 - others) * all_s * 0.25)
        self.use = CpuUse(*(before + now for before, now in zip(self.use, ours, strict=True)))
        self.cost.update(self.now_ns, self.sent)


@pytest.fixture
def machine():
    return Machine()


@pytest.mark.parametrize("response_s", [0.00005, 0.003])
def test_it_learns_what_a_response_costs_within_seconds(machine, response_s):
    for _ in range(15):
        machine.go_on(response_s)
    assert machine.cost.response_s == pytest.approx(response_s, rel=0.05)
    assert machine.cost.cores == pytest.approx(machine.cores)


def test_a_neighbours_cpu_is_not_there_for_us(machine):
    for _ in range(15):
        machine.go_on(0.0001, others=0.5)
    assert machine.cost.cores == pytest.approx(machine.cores / 2, rel=0.05)


def test_few_responses_a_pause_and_counters_that_go_back_say_nothing(machine):
    before = machine.cost.response_s, machine.cost.cores
    machine.go_on(0.009, responses=5)
    machine.go_on(0.009, seconds=60)  # the requests of an hour ago are none of these responses'
    machine.use = CpuUse(0, 0, 0, 0)
    machine.go_on(0)
    assert (machine.cost.response_s, machine.cost.cores) == before


def test_it_keeps_what_it_knows_where_the_system_does_not_tell(machine):
    machine.go_on(0.0001)
    known = machine.cost.response_s
    machine.cost._read = lambda: None
    machine.now_ns += S
    machine.cost.update(machine.now_ns, machine.sent + 1000)
    assert machine.cost.response_s == known


def test_the_cpu_of_this_process_its_child_and_its_parent_is_read_from_the_system():
    with subprocess.Popen(["sleep", "60"]) as child:
        cpu = ServerCpu()
        before = cpu.read()
        assert os.getpid() in cpu._stubs and child.pid in cpu._workers
        time.sleep(0.02)
        after = cpu.read()
        child.kill()
    assert before.serving > 0 and after.machine >= after.idle > 0
    assert all(now >= then for now, then in zip(after, before, strict=True))
