import sys

from benchmarks import progress


def test_a_terminal_is_told_and_a_file_is_not(monkeypatch, capsys):
    progress.show("load")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress.show("load")
    assert capsys.readouterr().err == "  measuring: load\n"
