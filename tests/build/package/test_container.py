"""Ctrl-C while a program of a GPU stage runs: the driver says one line, and the program ends with it."""

import signal
import subprocess
import sys
import time

from build.base import layout

DRIVER = """
import sys, pathlib
from build.base import layout, program
from build.package import container
from build.recipe import recipe
made = recipe.load(layout.RECIPES / "demo-fp8.toml")
child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
run = lambda: container.run([sys.executable, "-c", child], made, pathlib.Path(sys.argv[1]))
sys.exit(program.run(run, "build-engine"))
"""


def is_running(pid: int) -> bool:
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip() not in ("", "Z")


def test_a_program_that_only_the_driver_could_stop_is_stopped(tmp_path):
    line = [sys.executable, "-c", DRIVER, str(tmp_path / "stage.log")]
    with subprocess.Popen(line, cwd=layout.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stdout.readline().startswith("$ ")
        child = int(driver.stdout.readline())
        assert is_running(child)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(timeout=30) == 130
        assert driver.stderr.read() == "build-engine: interrupted\n"
    end_s = time.monotonic() + 60
    while is_running(child) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not is_running(child)
