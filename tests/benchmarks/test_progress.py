import io

from benchmarks.driver import Progress
from benchmarks.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_the_rate_since_the_last_report():
    output = Terminal()
    with ProgressLine("load", output) as show:
        show(Progress(1.0, 4, 0, 0, 100))
        show(Progress(2.0, 4, 3, 1, 350))
    assert "100 tok/s" in output.getvalue() and "250 tok/s" in output.getvalue() and "1 failed" in output.getvalue()


def test_a_file_gets_nothing():
    output = io.StringIO()
    with ProgressLine("load", output) as show:
        show(Progress(1.0, 4, 0, 0, 100))
    assert output.getvalue() == ""
