"""Errors of tritonserver's log."""

from server import triton_log

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


def test_errors_include_their_further_lines_and_no_harmless_messages(tmp_path):
    file = tmp_path / "log"
    file.write_text(FAILED_LOAD)
    assert triton_log.errors(file).splitlines() == [
        "failed to load 'engine' version 1: RuntimeError: no weights",
        "At:",
        "/engine/1/model.py(23): initialize",
        "ERROR: Failed to create instance: RuntimeError: no weights",
    ]


def test_errors_of_an_earlier_instance_are_not_included(tmp_path):
    file = tmp_path / "log"
    file.write_text(FAILED_LOAD)
    start = file.stat().st_size
    with file.open("a") as more:
        more.write('E1121 03:04:28.0 9856 server.cc:1] "the second"\n')
    assert triton_log.errors(file, start) == "the second"


def test_without_errors_the_last_lines_are_returned_without_tables(tmp_path):
    file = tmp_path / "log"
    file.write_text("a line\n+--+\n| x |\nanother line\n")
    assert triton_log.errors(file) == "a line\nanother line"


def test_only_the_end_of_a_large_log_is_read(tmp_path):
    file = tmp_path / "log"
    file.write_text("x" * triton_log.READ_BYTES + "\nthe end\n")
    assert triton_log.errors(file).endswith("\nthe end") and len(triton_log.errors(file)) <= triton_log.READ_BYTES
