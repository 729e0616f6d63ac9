"""The compiler process: checks one guide after the other, and ends with its connection."""

import subprocess
import sys
from multiprocessing.connection import Connection
from socket import socketpair

import pytest

from contract.generation import Guide
from python_backends.ensemble.worker_messages import Ready
from python_backends.grammar.checker import Check

pytestmark = pytest.mark.slow


def test_it_checks_until_its_connection_ends(tiny_engine):
    ours, theirs = socketpair()
    with theirs:
        command = [sys.executable, "-m", "python_backends.grammar.compiler", str(theirs.fileno())]
        process = subprocess.Popen([*command, str(tiny_engine / "grammar_checker")], pass_fds=[theirs.fileno()])
    with Connection(ours.detach()) as connection:
        assert connection.recv() == Ready()
        connection.send(Check(Guide("ebnf_grammar", 'root ::= "a"'), 256, 0.25))
        assert connection.recv() == Guide("ebnf_grammar", 'root ::= "a"')
    assert process.wait(timeout=20) == 0


def test_it_ends_when_a_guide_takes_too_much_memory():
    take = "from python_backends.grammar import compiler; compiler.limit_memory(); len(bytearray({} << 30))"
    for size, fits in ((1, True), (5, False)):
        ended = subprocess.run([sys.executable, "-c", take.format(size)], capture_output=True, text=True)
        assert (ended.returncode == 0) == fits and ("MemoryError" in ended.stderr) != fits
