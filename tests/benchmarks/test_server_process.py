"""Where a started server is, as its child command prints it; the benchmarks' end-to-end tests start a real one."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import server_process
from contract.errors import EngineFailed


def printing(*lines):
    code = "import sys; sys.stdout.write(sys.argv[1])"
    return subprocess.Popen([sys.executable, "-c", code, "\n".join(lines) + "\n"], stdout=subprocess.PIPE, text=True)


def test_the_address_is_read_from_behind_the_servers_own_output():
    variables = {"TRIDENT_URL": "127.0.0.1:5", "TRIDENT_METRICS_URL": "http://127.0.0.1:6/metrics"}
    with printing("starting", f"SERVER {json.dumps(variables)}") as process:
        found = server_process._address(process, "demo")
    assert (found.url, found.metrics_url) == ("127.0.0.1:5", "http://127.0.0.1:6/metrics")
    assert found.engine_folder == server_process.ENGINES / "demo"


def test_a_server_that_ends_first_is_an_error_with_its_last_lines():
    with printing("no engine", "giving up") as process, pytest.raises(EngineFailed, match="'x':\nno engine\ngiving up"):
        server_process._address(process, "x")


def test_the_child_command_prints_the_servers_variables_and_waits():
    environ = {**os.environ, "TRIDENT_URL": "127.0.0.1:7"}
    command = [sys.executable, "-c", server_process._CHILD]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        line = child.stdout.readline()
        assert json.loads(line.removeprefix("SERVER "))["TRIDENT_URL"] == "127.0.0.1:7" and child.poll() is None
        child.stdin.close()
        assert child.wait(60) == 0


@pytest.mark.slow
def test_a_measurement_waits_for_an_engine_that_still_loads(tmp_path):
    burn = (
        "import sys, time\nwhile time.process_time() < 1: pass\n"  # of its CPU
        "open(sys.argv[2], 'w').close()\ntime.sleep(60)"
    )
    done = tmp_path / "done"
    command = [sys.executable, "-c", burn, "python_backends.cpu_engine.worker", str(done)]
    with subprocess.Popen(command) as worker:
        server_process.wait_for_rest(os.getpid())
        assert done.exists()
        worker.kill()


@pytest.mark.slow
def test_an_engine_that_never_rests_is_told_and_measured(monkeypatch, capsys):
    monkeypatch.setattr(server_process, "REST_S", 0.1)
    command = [sys.executable, "-c", "while True: pass", "python_backends.cpu_engine.worker"]
    with subprocess.Popen(command) as worker:
        server_process.wait_for_rest(os.getpid())
        assert f"engine worker {worker.pid} still uses the CPU, after 0.1 s" in capsys.readouterr().err
        worker.kill()
