"""When silence is a hang: laws over any history of looks."""

import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.watchdog import Watchdog, cpu_s

gaps = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=200)


def verdicts(gaps, *, progress, working=True, used_s=lambda now_s: 0.0, stall_s=5.0, limit_s=60.0):
    """What a watchdog says at looks that far apart; progress and used_s are functions of the time."""
    watchdog, now_s, found = Watchdog(stall_s, limit_s), 1000.0, []
    watchdog.check(progress(now_s), working, used_s(now_s), now_s)
    for gap in gaps:
        now_s += gap
        found.append((now_s - 1000.0, watchdog.check(progress(now_s), working, used_s(now_s), now_s)))
    return found


@given(gaps)
def test_who_makes_progress_or_has_nothing_to_do_is_never_hung(gaps):
    assert not any(why for _, why in verdicts(gaps, progress=lambda now_s: now_s))
    assert not any(why for _, why in verdicts(gaps, progress=lambda now_s: 1, working=False))


@given(gaps)
def test_without_progress_and_cpu_it_is_a_hang_exactly_after_the_stall_time(gaps):
    for silent_s, why in verdicts(gaps, progress=lambda now_s: 1):
        assert bool(why) == (silent_s >= 5.0 - 1e-6) or abs(silent_s - 5.0) < 1e-6


@given(gaps)
def test_who_computes_has_until_the_limit(gaps):
    for silent_s, why in verdicts(gaps, progress=lambda now_s: 1, used_s=lambda now_s: now_s * 1000, limit_s=30.0):
        assert bool(why) == (silent_s >= 30.0 - 1e-6) or abs(silent_s - 30.0) < 1e-6


def test_cpu_used_before_it_stopped_is_no_excuse_for_ever():
    watchdog = Watchdog(5.0, 60.0)
    for second in range(20):  # computes one long step
        assert not watchdog.check(1, True, float(second), float(second))
    said = [watchdog.check(1, True, 19.0, float(second)) for second in range(20, 30)]
    assert [bool(why) for why in said] == [False] * 4 + [True] * 6
    assert said[-1] == "no progress and no CPU use for 10 s"


@given(st.integers(1, 4), st.floats(2.0, 10_000.0))
def test_time_in_which_the_watcher_did_not_run_does_not_count(looks, gap_s):
    """A machine that stands still, or starves the watcher, must not make everybody hung."""
    found = verdicts([gap_s] * min(looks, 3), progress=lambda now_s: 1)
    assert not any(why for _, why in found)


def test_work_that_begins_after_a_pause_has_the_whole_time():
    watchdog = Watchdog(5.0, 60.0)
    for second in range(100):
        assert not watchdog.check(1, False, 0.0, float(second))
    assert not any(watchdog.check(1, True, 0.0, 99.0 + n / 2) for n in range(10))


def test_the_cpu_of_a_process_grows_while_it_computes_and_not_while_it_is_stopped():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline_s = time.monotonic() + 60
        while (cpu_s(busy.pid) or 0.0) < 0.1:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        os.kill(busy.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, busy.pid, os.WSTOPPED | os.WNOWAIT)
        used_s = cpu_s(busy.pid)
        time.sleep(0.1)
        assert cpu_s(busy.pid) == pytest.approx(used_s, abs=0.011)
    finally:
        busy.kill()
        busy.wait()
    assert cpu_s(busy.pid) is None
