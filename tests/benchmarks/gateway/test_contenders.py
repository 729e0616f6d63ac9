"""The proxies that are compared; tests of the load put a real gateway and replica to work."""

import math
import os
import subprocess
import sys

from benchmarks.gateway import contenders
from benchmarks.gateway.contenders import Contender


def test_a_contender_is_its_process_tree():
    own = Contender("own", {}, os.getpid())
    assert own.alive() and own.use().cpu_s > 0 and own.use().rss_bytes > 0
    assert math.isnan(own.gauge("trident_gateway_in_flight"))
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert not Contender("gone", {}, child.pid).alive()


def test_a_process_that_ended_is_not_alive_before_its_parent_has_waited_for_it():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not Contender("crashed", {}, child.pid).alive()


def test_free_addresses_are_of_this_machine():
    host, _, port = contenders.free_address().partition(":")
    assert host == "127.0.0.1" and 1024 < int(port) < 65536
