"""One measurement, against a scripted replica, and the file it is kept in."""

import json
import time
from types import SimpleNamespace

from benchmarks import machine, measurement, processes, self_check
from benchmarks.driver import Extent, GeneratorUse
from benchmarks.lengths import Fixed
from benchmarks.machine import HostLoad
from benchmarks.measurement import ServerUnderTest
from benchmarks.prompts import Prompts
from benchmarks.record import Record
from benchmarks.workload import Workload


def test_a_run_without_metrics_has_every_record_and_is_kept_whole(replica, tmp_path):
    server = ServerUnderTest(replica().url)
    load = Workload(2, None, Fixed(4), Fixed(3))
    run = measurement.measure("small", load, server, Extent(None, 0.0, 6), conditions={"engine": "none"})
    assert run.figures.ok == 6 and run.tokens == 18 and run.server is None
    assert run.conditions["engine"] == "none" and run.window[0] < run.window[1]
    assert run.cpu_us_per_token.keys() >= {"client"} or not run.processes
    [kept] = json.loads(measurement.save([run], tmp_path, "run").read_text())
    assert [Record.from_json(record) for record in kept["records"]] == run.records
    assert kept["verdict"] and kept["figures"]["ok"] == 6


class SlowlyMade(Prompts):
    def text(self, rng, tokens, prefix=""):
        until_s = time.process_time() + 0.1
        while time.process_time() < until_s:
            pass
        return "a"


def test_making_prompts_is_no_work_of_other_processes(replica, monkeypatch):
    monkeypatch.setattr(measurement, "Prompts", SlowlyMade)
    monkeypatch.setattr(processes, "listener", lambda url: None)  # the replica runs in this process
    monkeypatch.setattr(machine, "host_load", lambda before, after, ours_s: HostLoad(ours_s, 0.0, 0.0))
    load = Workload(1, None, Fixed(1), Fixed(1))
    run = measurement.measure("slow", load, ServerUnderTest(replica().url), Extent(None, 0.0, 4))
    assert run.host_load.ours >= 0.4


def test_a_load_that_is_repeated_with_more_generators_has_other_prompts(monkeypatch):
    seeds = []

    def measured(name, workload, server, extent, *, generators):
        seeds.append(workload.seed)
        busy = GeneratorUse(cpu_s=1.0 / generators, wall_s=1.0)
        return SimpleNamespace(checks=[self_check.cpu([busy])])

    monkeypatch.setattr(measurement, "measure", measured)
    monkeypatch.setattr(machine, "cores", lambda: list(range(8)))
    measurement.measure_unsaturated("x", Workload(1, seed=7), ServerUnderTest("127.0.0.1:1"), Extent())
    assert seeds[0] == 7 and len(set(seeds)) == 2  # else they would come from the prefix cache
