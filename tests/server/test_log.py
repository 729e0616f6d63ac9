"""Finding the lines that matter in a log of Triton's."""

from server import log

FAILED_LOAD = """\
W1121 03:03:27.296278 9855 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
E1121 03:03:27.296417 9855 server.cc:241] "CudaDriverHelper has not been initialized."
I1121 03:03:27.298977 9855 model_lifecycle.cc:472] "loading: engine:1"
E1121 03:03:28.296417 9855 model_lifecycle.cc:642] "failed to load 'engine' version 1: RuntimeError: no weights

At:
  /engine/1/model.py(23): initialize
  <frozen importlib._bootstrap>(1150): _find_and_load
"
ERROR: Failed to create instance: RuntimeError: no weights\\n\\nAt:\\n  /engine/1/model.py(23): initialize\\n
I1121 03:03:28.298977 9855 model_lifecycle.cc:777] "failed to load 'engine'"
+--------+---------+
| engine | 1       |
+--------+---------+
error: creating server: Internal - failed to load all models
"""


def test_complaints_are_the_errors_with_what_belongs_to_them_and_no_noise(tmp_path):
    file = tmp_path / "log"
    file.write_text(FAILED_LOAD)
    assert log.complaints(file).splitlines() == [
        "failed to load 'engine' version 1: RuntimeError: no weights",
        "At:",
        "/engine/1/model.py(23): initialize",
        "ERROR: Failed to create instance: RuntimeError: no weights",
    ]


def test_complaints_of_an_earlier_life_do_not_count(tmp_path):
    file = tmp_path / "log"
    file.write_text(FAILED_LOAD)
    start = file.stat().st_size
    with file.open("a") as more:
        more.write('E1121 03:04:28.0 9856 server.cc:1] "the second"\n')
    assert log.complaints(file, start) == "the second"


def test_without_complaints_the_end_of_the_log_is_shown_without_tables(tmp_path):
    file = tmp_path / "log"
    file.write_text("a line\n+--+\n| x |\nanother line\n")
    assert log.complaints(file) == "a line\nanother line"
    assert log.tail(file, 1) == "another line"


def test_a_log_that_is_not_there_has_nothing_to_say(tmp_path):
    assert log.complaints(tmp_path / "none") == ""


def test_of_a_huge_log_only_the_end_is_read(tmp_path):
    file = tmp_path / "log"
    file.write_text("x" * log.READ_BYTES + "\nthe end\n")
    assert log.tail(file, 1) == "the end" and len(log.tail(file)) <= log.READ_BYTES
