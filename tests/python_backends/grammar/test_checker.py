"""The checker with its real process: what it accepts, refuses and survives."""

import errno
import json
import os
import pickle
import queue
import signal
import time

import pytest

from contract.errors import InvalidArgument, Overloaded, Unavailable
from contract.generation import Guide
from python_backends.grammar import checker as checker_module
from python_backends.grammar.checker import GrammarChecker, costly

pytestmark = pytest.mark.slow

END = 256


@pytest.fixture(scope="module")
def checker(tiny_engine):
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=2.0, stall_s=0.25, max_waiting=64)
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
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=2.0, stall_s=0.003, max_waiting=64)
    long = "ebnf_grammar", 'root ::= "\\"" [^"]{0,2000} "\\""'
    refused = result(checker, *long)
    checker._stall_s = 60.0
    assert result(checker, *long) is refused
    checker.close()
    assert isinstance(refused, InvalidArgument) and "must not hold up other requests" in refused.problem


def test_a_refusal_for_what_a_grammar_costs_is_not_kept_for_long(tiny_engine, monkeypatch):
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=60.0, stall_s=0.0, max_waiting=64)
    refused = result(checker, "ebnf_grammar", 'root ::= "a"')
    assert isinstance(refused, InvalidArgument)
    checker._stall_s = 60.0
    later_s, clock_s = refused.retry_after_s, time.monotonic
    monkeypatch.setattr(checker_module.time, "monotonic", lambda: clock_s() + later_s)
    assert isinstance(result(checker, "ebnf_grammar", 'root ::= "a"'), Guide)
    checker.close()


def test_a_process_without_a_share_of_the_cpu_is_no_fault_of_the_grammar(patient):
    assert isinstance(result(patient, "ebnf_grammar", 'root ::= "a"'), Guide)
    patient._timeout_s = 0.1
    os.kill(patient._process.pid, signal.SIGSTOP)
    assert isinstance(result(patient, "ebnf_grammar", 'root ::= "b"'), Overloaded)


def test_one_that_takes_too_long_is_killed_and_refused(tiny_engine, monkeypatch):
    monkeypatch.setattr(checker_module, "_BUSY_FACTOR", 100)  # other tests may run beside this one
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=0.2, stall_s=10.0, max_waiting=64)
    refused = result(checker, "ebnf_grammar", "root ::= " + " | ".join(f"[^{n % 10}]{{0,2000}}" for n in range(20)))
    checker.close()
    assert isinstance(refused, InvalidArgument) and "must compile within 0.2 s" in refused.problem
    assert refused.retry_after_s == 60.0


def test_a_kill_only_delays(checker):
    assert isinstance(result(checker, "ebnf_grammar", 'root ::= "a"'), Guide)
    os.kill(checker._process.pid, signal.SIGKILL)
    assert isinstance(result(checker, "ebnf_grammar", 'root ::= "b"'), Guide)


def kill_while_it_compiles(checker, times):
    """Check a guide and kill its process that often; return the result."""
    guide, came = Guide("ebnf_grammar", "root ::= " + " | ".join(f"[^{n}]{{0,2000}}" for n in range(9))), []
    checker.check(guide, came.append)
    killed = set()
    while len(killed) < times:
        process = checker._process
        if process is not None and process.pid not in killed and process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed.add(process.pid)
        time.sleep(0.001)
    while not came:
        time.sleep(0.01)
    return came[0]


@pytest.fixture
def patient(tiny_engine):
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=60.0, stall_s=60.0, max_waiting=64)
    yield checker
    checker.close()


def test_a_grammar_is_not_refused_for_what_kills_the_process_from_outside(patient):
    result = kill_while_it_compiles(patient, 3)
    assert isinstance(result, Guide)


def test_a_process_that_is_always_killed_is_no_fault_of_the_grammar_and_not_remembered(patient):
    result = kill_while_it_compiles(patient, 4)
    assert isinstance(result, Overloaded) and not patient._kept


def test_a_grammar_that_crashes_the_process_twice_is_refused(patient, monkeypatch):
    wait, crashed = patient._wait, []

    def crash(connection):
        crashed.append(patient._process.pid)
        os.kill(crashed[-1], signal.SIGSEGV)
        return wait(connection)

    monkeypatch.setattr(patient, "_wait", crash)
    refused = result(patient, "ebnf_grammar", 'root ::= "a"')
    assert isinstance(refused, InvalidArgument) and "ends the compiler" in refused.problem and patient._kept
    assert len(set(crashed)) == 2


def test_a_process_that_cannot_be_started_is_no_fault_of_the_grammar(patient, monkeypatch):
    def refuse(*given, **options):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(checker_module.subprocess, "Popen", refuse)
        refused = result(patient, "ebnf_grammar", 'root ::= "a"')
    assert isinstance(refused, Overloaded) and "did not start" in str(refused)
    assert isinstance(result(patient, "ebnf_grammar", 'root ::= "a"'), Guide)


def test_a_process_that_ends_while_it_loads_is_no_fault_of_the_grammar(tmp_path):
    checker = GrammarChecker(tmp_path / "nothing", END, timeout_s=60.0, stall_s=60.0, max_waiting=64)
    refused = result(checker, "ebnf_grammar", 'root ::= "a"')
    checker.close()
    assert isinstance(refused, Overloaded) and not checker._kept


@pytest.fixture
def suspended(patient):
    """``patient`` with its process suspended, which compiles nothing until it goes on."""
    assert isinstance(result(patient, "ebnf_grammar", 'root ::= "a"'), Guide)
    os.kill(patient._process.pid, signal.SIGSTOP)
    yield patient
    patient._process.send_signal(signal.SIGCONT)


def test_a_guide_for_which_no_request_waits_any_more_is_not_compiled(suspended):
    came, unwanted = queue.SimpleQueue(), []
    first, second, third = (Guide("ebnf_grammar", f'root ::= "{text}"') for text in ("first", "second", "third"))
    suspended.check(first, came.put)
    suspended.check(second, unwanted.append, needed=lambda: False)
    suspended.check(third, came.put, needed=lambda: False)
    suspended.check(third, came.put)
    os.kill(suspended._process.pid, signal.SIGCONT)
    assert [came.get(timeout=60).text for _ in range(3)] == [first.text, third.text, third.text]
    assert {first, third} <= suspended._kept.keys() and second not in suspended._kept and not unwanted
    suspended.check(second, came.put)
    assert came.get(timeout=60) == second


def test_so_many_requests_may_wait(suspended):
    suspended._max_waiting = 3
    came, guides = queue.SimpleQueue(), [Guide("ebnf_grammar", f'root ::= "{n}"') for n in range(2)]
    for guide in (*guides, guides[0]):
        suspended.check(guide, came.put)
    with pytest.raises(Overloaded, match="queue full: 3 requests wait for grammars"):
        suspended.check(guides[0], came.put)
    os.kill(suspended._process.pid, signal.SIGCONT)
    assert all(isinstance(came.get(timeout=60), Guide) for _ in range(3))
    suspended.check(guides[0], came.put)


def test_equal_guides_are_checked_once_and_all_get_the_result(checker):
    guide = Guide("ebnf_grammar", f'root ::= "once {time.monotonic()}"')
    came = queue.SimpleQueue()
    for _ in range(20):
        checker.check(guide, came.put)
    assert all(isinstance(came.get(timeout=60), Guide) for _ in range(20))


def test_after_close_it_refuses(tiny_engine):
    checker = GrammarChecker(tiny_engine / "grammar_checker", END, timeout_s=2.0, stall_s=0.25, max_waiting=64)
    came = queue.SimpleQueue()
    checker.check(Guide("ebnf_grammar", 'root ::= "a"'), came.put)
    checker.close()
    assert isinstance(came.get(timeout=60), Unavailable | Guide)
    with pytest.raises(Unavailable):
        checker.check(Guide("ebnf_grammar", 'root ::= "a"'), came.put)


# ---- what the compiler's process sends back --------------------------------------------------------------------------


def test_a_refusal_for_its_cost_is_checked_again_after_a_minute_also_in_another_process():
    refused = pickle.loads(pickle.dumps(costly("must not hold up other requests")))
    assert str(refused) == "guided_decoding_guide: must not hold up other requests" and refused.retry_after_s == 60.0
