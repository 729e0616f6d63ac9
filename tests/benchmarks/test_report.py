import math

from benchmarks import report
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
