"""One measurement, against a scripted replica, and the file it is kept in."""

import json

from benchmarks import measurement
from benchmarks.driver import Extent
from benchmarks.lengths import Fixed
from benchmarks.measurement import ServerUnderTest
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
