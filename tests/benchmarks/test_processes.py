import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import machine, processes
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
def test_a_process_s_part_is_read_off_its_command_line(argv, role):
    assert processes.role(argv) == role


def write(proc: Path, pid: int, parent: int, argv: list[str], ticks: int, kilobytes: int) -> None:
    folder = proc / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True)
    stat = [str(pid), "(a b) c)", "S", str(parent), *["0"] * 9, str(ticks), str(ticks), *["0"] * 10]
    (folder / "stat").write_text(" ".join(stat))
    (folder / "cmdline").write_text("\0".join(argv))
    (folder / "status").write_text(f"Name:\tx\nVmHWM:\t{kilobytes} kB\nVmRSS:\t{kilobytes // 2} kB\n")
    (folder / "task" / str(pid) / "schedstat").write_text("5 2000000000 9\n")


def test_the_family_of_a_server_is_added_up_by_part_and_strangers_are_left_out(tmp_path: Path):
    write(tmp_path, 10, 1, ["/x/tritonserver"], 100, 1000)
    write(tmp_path, 11, 10, [STUB, "/m/tokenizer/1/model.py"], 10, 200)
    write(tmp_path, 12, 10, [STUB, "/m/tokenizer/1/model.py"], 20, 300)
    write(tmp_path, 13, 10, [STUB, "/m/engine/1/model.py"], 30, 400)
    write(tmp_path, 14, 13, ["python", "-m", "python_backends.cpu_engine.worker"], 500, 8000)
    write(tmp_path, 15, 1, ["stranger"], 999, 9)
    found = processes.use(10, tmp_path)
    assert set(found) == {"tritonserver", "tokenizer", "engine stub", "engine worker"}
    tick = processes.TICK_S
    assert found["tokenizer"] == Use(pytest.approx(60 * tick), 250 * 1024, 500 * 1024, 2, 4.0)
    assert found["engine worker"].cpu_s == pytest.approx(1000 * tick)
    grown = processes.grown({"tokenizer": Use(20 * tick, 1, 1, 2, 1.0)}, found)
    assert grown["tokenizer"].cpu_s == pytest.approx(40 * tick) and grown["tokenizer"].waited_s == 3.0
    assert processes.serving_cpu_s(found) == pytest.approx((200 + 60 + 60) * tick)


def test_the_process_behind_a_port_is_found():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert processes.listener(listening.getsockname()[1]) == os.getpid()
        port = listening.getsockname()[1]
    assert processes.listener(port) is None


def test_a_real_child_is_counted():
    code = "import sys; sum(n * n for n in range(3_000_000)); print('done', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        found = processes.use(child.pid)
        child.stdin.close()
    assert (
        len(found) == 1 and next(iter(found.values())).cpu_s > 0 and next(iter(found.values())).peak_rss_bytes > 10**6
    )


def test_the_company_is_what_neither_we_nor_idleness_used():
    before, after = machine.CpuTime(100.0, 50.0, 1.0), machine.CpuTime(120.0, 66.0, 3.0)
    found = machine.company(before, after, 12.0)
    assert (found.ours, found.others, found.stolen) == pytest.approx((0.6, 0.2, 0.1))
    now = machine.cpu_time()
    assert 0 < now.busy_s < now.total_s
