import math
from types import SimpleNamespace

from benchmarks import figures, report
from benchmarks.record import Record
from benchmarks.self_check import OTHERS_SHARE


def test_a_table_aligns_the_first_column_left_and_the_others_right():
    lines = report.table([("a", 1), ("long", 100)], ("name", "n")).splitlines()
    assert lines == ["  name    n", "  ----  ---", "  a       1", "  long  100"]


def test_a_missing_figure_is_a_dash():
    assert report.ms(math.nan) == report.number(math.nan) == report.share(math.nan) == "-"
    assert report.ms(0.1234) == "123" and report.ms(0.0123) == "12.3" and report.ms(0.000123) == "0.12"


def test_too_much_load_of_other_processes_is_a_warning():
    assert "do not use" in report.disturbance(OTHERS_SHARE + 0.01)
    assert "do not use" not in report.disturbance(OTHERS_SHARE)


def test_prompts_that_the_server_counts_otherwise_are_told():
    workload = {"input_tokens": "128 tokens", "output_tokens": "64 tokens", "loop": "closed, concurrency 1"}
    run = SimpleNamespace(workload=workload, records=[Record(n, 0.0, input_tokens=n) for n in (0, 97, 98, 99)])
    assert report.lengths(run) == "in 128 tokens (median by the server's count 98), out 64 tokens"


def test_errors_of_one_type_are_counted_and_the_first_is_told():
    texts = [f"Unavailable: h:1 ended the call after {n} tokens: gone" for n in (40, 7)]
    records = [Record(n, 0.0, error=text, ended_s=1.0) for n, text in enumerate(texts)]
    workload = {"input_tokens": "1 tokens", "output_tokens": "1 tokens", "loop": "closed, concurrency 1"}
    conditions = {"cpu": "m", "cores": 2, "load_average_1min": 0.0}
    run = SimpleNamespace(workload=workload, conditions=conditions, records=records)
    run.name, run.figures, run.server, run.processes, run.checks = "run", figures.compute(records, (0, 1)), None, {}, []
    told = "    2 × Unavailable, the first with: h:1 ended the call after 40 tokens: gone"
    assert told in report.of_run(run).splitlines()
