import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import processes
from benchmarks.processes import Use

STUB = "/x/triton_python_backend_stub"


@pytest.mark.parametrize(
    ("argv", "role"),
    [
        (["/x/tritonserver", "--model-repository=m"], "tritonserver"),
        ([STUB, "/m/tokenizer/1/model.py", "region"], "tokenizer"),
        ([STUB, "/m/engine/1/model.py", "region"], "engine stub"),
        ([STUB, "/m/detokenizer/1/model.py", "region"], "detokenizer"),
        (["python", "-m", "python_backends.cpu_engine.worker", "7", "/engines/demo"], "engine worker"),
        (["/usr/bin/vllm", "serve"], "vllm"),
        ([""], "other"),
    ],
)
def test_a_process_s_role_follows_from_its_command_line(argv, role):
    assert processes.role(argv) == role


def test_the_process_behind_a_port_is_found():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        assert processes.listener(f"127.0.0.1:{port}") == os.getpid()
        assert processes.listener(f"localhost:{port}") == processes.listener(f"[::1]:{port}") == os.getpid()
        assert processes.listener(f"192.0.2.1:{port}") is processes.listener("localhost") is None
    assert processes.listener(f"127.0.0.1:{port}") is None


def test_a_real_child_is_counted():
    code = "import sys; sum(n * n for n in range(3_000_000)); print('done', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        found = processes.use(child.pid)
        child.stdin.close()
    assert (
        len(found) == 1 and next(iter(found.values())).cpu_s > 0 and next(iter(found.values())).peak_rss_bytes > 10**6
    )


def test_a_process_tree_is_added_up_by_role_until_it_ends():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        while processes.total(parent.pid).processes < 2:
            assert parent.poll() is None
        [(name, used)] = processes.use(parent.pid).items()
        assert name == Path(sys.executable).name and used.rss_bytes <= used.peak_rss_bytes
        parent.stdin.close()
    assert processes.use(parent.pid) == {} and processes.total(parent.pid) == processes.NOTHING


def test_a_difference_is_of_times_not_of_memory():
    before = {"tokenizer": Use(0.2, 1, 1, 2, 1.0)}
    after = {"tokenizer": Use(0.6, 250, 500, 2, 4.0), "engine worker": Use(5.0, 1, 1)}
    found = processes.difference(before, after)
    assert found["tokenizer"] == Use(pytest.approx(0.4), 250, 500, 2, 3.0)
    assert processes.serving_cpu_s(found) == pytest.approx(0.4)


def test_this_process_has_waited_for_a_core_or_not():
    assert processes.waited_s() >= 0.0 and processes.waited_s(-1) == 0.0


def test_cpu_is_counted_finer_than_ticks_and_a_process_that_ended_has_none():
    assert abs(processes.cpu_s(os.getpid()) - time.process_time()) < 0.5
    seen = {processes.cpu_s(os.getpid()) for _ in range(50)}
    assert len(seen) > 10
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    with pytest.raises(OSError, match="Invalid argument"):
        processes.cpu_s(child.pid)
