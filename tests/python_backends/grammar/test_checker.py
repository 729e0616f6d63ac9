"""The checker with its real process: what it accepts, refuses and survives."""

import json
import os
import queue
import signal
import time

import pytest

from contract.errors import InvalidArgument, Overloaded, Unavailable
from contract.generation import Guide
from python_backends.grammar import checker as checker_module
from python_backends.grammar.checker import GrammarChecker

pytestmark = pytest.mark.slow

END = 256


@pytest.fixture(scope="module")
def checker(tiny_engine):
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=2.0, stall_s=0.25)
    yield checker
    checker.close()


def results(checker, *guides):
    came = queue.SimpleQueue()
    for guide in guides:
        checker.check(guide, lambda result, guide=guide: came.put((guide, result)))
    return dict(came.get(timeout=60) for _ in guides)


def result(checker, *guide):
    return results(checker, Guide(*guide))[Guide(*guide)]


def test_a_good_grammar_is_returned_and_remembered(checker):
    assert isinstance(result(checker, "ebnf_grammar", 'root ::= "yes" | "no"'), Guide)
    known = []
    checker.check(Guide("ebnf_grammar", 'root ::= "yes" | "no"'), known.append)
    assert len(known) == 1  # before it returned


BAD = [
    ("ebnf_grammar", 'start ::= "a"'),
    ("ebnf_grammar", "root ::= other"),
    ("ebnf_grammar", 'root ::= ("a"'),
    ("ebnf_grammar", 'root ::= "x" ñ1'),  # the library's message ends within the character
    ("ebnf_grammar", "root ::= é"),
    ("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": "root ::= é"}})),
    ("regex", "(a"),
    ("structural_tag", "no json"),
    ("structural_tag", "{}"),
]


@pytest.mark.parametrize("guide", BAD)
def test_a_grammar_that_does_not_compile_is_refused_and_the_next_one_works(checker, guide):
    refused = result(checker, *guide)
    assert isinstance(refused, InvalidArgument) and refused.field == "guided_decoding_guide"
    assert "ends the compiler" not in refused.problem
    assert isinstance(result(checker, "ebnf_grammar", f'root ::= "{time.monotonic()}"'), Guide)


def test_one_that_would_hold_up_other_requests_is_refused(tiny_engine):
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=2.0, stall_s=0.003)
    refused = result(checker, "ebnf_grammar", 'root ::= "\\"" [^"]{0,2000} "\\""')
    checker.close()
    assert isinstance(refused, InvalidArgument) and "must not hold up other requests" in refused.problem


def test_a_process_without_a_share_of_the_cpu_is_no_fault_of_the_grammar(patient):
    assert isinstance(result(patient, "ebnf_grammar", 'root ::= "a"'), Guide)
    patient._timeout_s = 0.1
    os.kill(patient._process.pid, signal.SIGSTOP)
    assert isinstance(result(patient, "ebnf_grammar", 'root ::= "b"'), Overloaded)


def test_one_that_takes_too_long_is_killed_and_refused(tiny_engine, monkeypatch):
    monkeypatch.setattr(checker_module, "_BUSY_FACTOR", 100)  # other tests may run beside this one
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=0.2, stall_s=10.0)
    refused = result(checker, "ebnf_grammar", "root ::= " + " | ".join(f"[^{n % 10}]{{0,2000}}" for n in range(20)))
    checker.close()
    assert isinstance(refused, InvalidArgument) and "must compile within 0.2 s" in refused.problem


def test_a_kill_only_delays(checker):
    assert isinstance(result(checker, "ebnf_grammar", 'root ::= "a"'), Guide)
    os.kill(checker._process.pid, signal.SIGKILL)
    assert isinstance(result(checker, "ebnf_grammar", 'root ::= "b"'), Guide)


def kill_while_it_compiles(checker, number, times):
    """Check a guide and send its process a signal that often; return the result."""
    guide, came = Guide("ebnf_grammar", "root ::= " + " | ".join(f"[^{n}]{{0,2000}}" for n in range(9))), []
    checker.check(guide, came.append)
    killed = set()
    while len(killed) < times:
        process = checker._process
        if process is not None and process.pid not in killed and process.poll() is None:
            os.kill(process.pid, number)
            killed.add(process.pid)
        time.sleep(0.001)
    while not came:
        time.sleep(0.01)
    return came[0]


@pytest.fixture
def patient(tiny_engine):
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=60.0, stall_s=60.0)
    yield checker
    checker.close()


def test_a_grammar_is_not_refused_for_what_kills_the_process_from_outside(patient):
    result = kill_while_it_compiles(patient, signal.SIGKILL, 3)
    assert isinstance(result, Guide)


def test_a_process_that_is_always_killed_is_no_fault_of_the_grammar_and_not_remembered(patient):
    result = kill_while_it_compiles(patient, signal.SIGKILL, 4)
    assert isinstance(result, Overloaded) and not patient._kept


def test_a_grammar_that_crashes_the_process_twice_is_refused(patient):
    result = kill_while_it_compiles(patient, signal.SIGSEGV, 2)
    assert isinstance(result, InvalidArgument) and "ends the compiler" in result.problem and patient._kept


def test_equal_guides_are_checked_once_and_all_get_the_result(checker):
    guide = Guide("ebnf_grammar", f'root ::= "once {time.monotonic()}"')
    came = queue.SimpleQueue()
    for _ in range(20):
        checker.check(guide, came.put)
    assert all(isinstance(came.get(timeout=60), Guide) for _ in range(20))


def test_after_close_it_refuses(tiny_engine):
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=2.0, stall_s=0.25)
    came = queue.SimpleQueue()
    checker.check(Guide("ebnf_grammar", 'root ::= "a"'), came.put)
    checker.close()
    assert isinstance(came.get(timeout=60), Unavailable | Guide)
    with pytest.raises(Unavailable):
        checker.check(Guide("ebnf_grammar", 'root ::= "a"'), came.put)
