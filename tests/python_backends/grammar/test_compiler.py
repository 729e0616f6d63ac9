"""The compiler process without a library to compile with: it translates."""

import subprocess
import sys
from multiprocessing.connection import Connection
from socket import socketpair

from contract.generation import Guide
from python_backends.ensemble.worker_messages import Ready
from python_backends.grammar.messages import Check, Checked


def test_it_translates_until_its_connection_ends():
    ours, theirs = socketpair()
    with theirs:
        command = [sys.executable, "-m", "python_backends.grammar.compiler", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    with Connection(ours.detach()) as connection:
        assert connection.recv() == Ready()
        connection.send(Check(Guide("ebnf_grammar", 'root ::= "a"'), 2, 0.25))
        assert connection.recv() == Checked(Guide("ebnf_grammar", 'root ::= "a"'))
    assert process.wait(timeout=20) == 0
