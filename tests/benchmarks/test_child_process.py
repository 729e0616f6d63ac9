import contextlib
import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks import child_process
from contract.errors import EngineFailed


def test_a_process_ends_when_its_input_closes(tmp_path):
    code = "import sys; print('7'); sys.stdout.flush(); sys.stdin.read(); sys.exit(3)"
    with child_process.process([sys.executable, "-c", code], tmp_path / "log") as child:
        assert child_process.first_line(child, tmp_path / "log") == "7"
        assert child.poll() is None
    assert child.returncode == 3


def test_a_process_that_ends_early_is_an_error_with_its_log(tmp_path):
    code = "import sys; sys.exit('no such weights')"
    with child_process.process([sys.executable, "-c", code], tmp_path / "log") as child:
        child.wait()
        with pytest.raises(EngineFailed, match="no such weights"):
            child_process.first_line(child, tmp_path / "log")


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_a_process_ends_with_the_run_that_is_ended_from_outside(tmp_path, ended_by):
    served = "import time; print(1, flush=True); time.sleep(600)"
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from benchmarks import child_process\n"
        f"log = Path({str(tmp_path / 'log')!r})\n"
        f"with child_process.process([sys.executable, '-c', {served!r}], log) as child:\n"
        "    child_process.first_line(child, log)\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=child_process.ROOT, stdout=subprocess.PIPE) as run:
        pid = int(run.stdout.readline())
        run.send_signal(ended_by)
        run.wait(60)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(60)


@pytest.mark.slow
def test_the_cpu_of_what_a_server_leaves_behind_counts_as_ours(tmp_path):
    left = "import time\nwhile time.process_time() < 1: pass\nopen('done', 'w').close(); time.sleep(600)"
    served = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {left!r}], cwd=sys.argv[1])"
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from benchmarks import child_process, machine\n"
        "child_process.adopt_orphans()\n"
        "folder = Path(sys.argv[1])\n"
        f"with child_process.process([sys.executable, '-c', {served!r}, sys.argv[1]], folder / 'log') as child:\n"
        "    while not (folder / 'done').exists():\n"
        "        time.sleep(0.05)\n"
        "print(machine.children_s())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=child_process.ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.99


def test_a_process_that_ends_before_it_answers_is_an_error_with_its_log(tmp_path):
    log = tmp_path / "proxy.log"
    log.write_text("no such option\n")
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"]) as child:
        child.wait()
        with pytest.raises(EngineFailed, match="(?s)does not answer at http://127.0.0.1:9/ready:.*no such option"):
            child_process.wait_until_answers("http://127.0.0.1:9/ready", child, log, 60.0)
