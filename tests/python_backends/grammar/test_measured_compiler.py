"""What a grammar may cost; the libraries' own parts are in test_checker.py and test_xgrammar_compiler.py."""

import os
import subprocess
import sys

import pytest

from contract.errors import InvalidArgument
from contract.generation import Guide
from python_backends.grammar.checker import Check
from python_backends.grammar.measured_compiler import MeasuredCompiler


class Measured(MeasuredCompiler):
    def __init__(self, *seconds):
        super().__init__(())
        self.seconds = seconds

    def walk(self, guide, requested, tokens, most_s, again):
        if not self.seconds:
            raise RuntimeError("[12:00:00] grammar.cc:7: no rule named root")
        compiling_s, *walks = self.seconds
        return compiling_s, walks[again]


# ms of the tokens of an array of strings with maxLength 40, as measured with a vocabulary of 49,152; cut off at a peak
_STRING, _NEXT = [1, 13, 16, 21, 28, 31, 33, 34], [2, 12, 15, 17, 20, 20, 18, 16, 5, 5, 3, 2, 1]
BOUNDED = [ms / 900 for ms in ([1] * 5 + (_STRING + _NEXT) * 3)[:55]]
# The same on a processor that is half as fast: cut off after the first text, and one with maxLength 1000.
_SLOW = [1] * 5 + [2, 31, 40, 53, 40, 76, 78, 46, 3, 19, 36, 42, 38, 30, 26, 40, 13, 9, 4, 2, 1, 2, 27, 30, 36, 44, 78]
_LONG = [1] * 5 + [3, 35, 33, 70, 66, 73, 98, 88, 4, 21, 34, 45, 87, 110, 66]
# ms of ((a{1,100}){1,100}){1,100} there, which grow on
_AMBIGUOUS = [2, 2, 2, 2, 3, 4, 5, 7, 9, 12, 22, 30, 27, 33, 47, 77, 68, 105, 113, 173, 234]
GUIDE = Guide("ebnf_grammar", 'root ::= "a"')


@pytest.mark.parametrize(
    ("seconds", "problem"),
    [
        ((0.2, [0.05], [0.06] * 8), ""),
        ((0.2, [], []), ""),
        ((0.2, [0.05], [0.9] + [0.06] * 8), ""),
        ((0.3, [], []), "compiling it takes 0.3 s, the limit is 0.25 s"),
        ((0.0, [0.09], []), "a token takes 0.09 s, the limit is 0.083 s"),
        ((0.0, [0.05], [0.0] + [0.09] * 8), "a token takes 0.09 s, the limit is 0.083 s"),
        (
            (0.0, [], [0.001 * n for n in range(1, 49)]),
            "a token takes 0.19 s, the limit is 0.083 s",
        ),  # cut off, and it grew
        ((0.0, [], BOUNDED), ""),  # cut off where a text is longest, and the next costs as much
        ((0.0, [], [ms / 1000 for ms in _SLOW]), ""),
        ((0.0, [], [ms / 1000 for ms in _LONG]), ""),
        ((0.0, [], [ms / 1000 for ms in _AMBIGUOUS]), "a token takes"),
        ((0.0, [], [0.05] * 16), ""),  # cut off, and it did not
        ((), "must be a grammar that compiles: no rule named root"),
    ],
)
def test_a_grammar_that_would_hold_up_a_batch_is_refused_with_what_was_measured(seconds, problem):
    checked = Measured(*seconds).check(Check(GUIDE, 2, 0.25))
    if not problem:
        assert checked == GUIDE
        return
    assert isinstance(checked, InvalidArgument) and problem in checked.problem
    assert (checked.retry_after_s is not None) == ("takes" in problem)


def test_the_cores_that_this_process_may_use_are_counted():
    count = "from python_backends.grammar.measured_compiler import COMPILING_CORES as cores; print(cores)"
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); {count}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "1\n"


def test_what_cannot_be_translated_is_not_compiled():
    assert "must be a JSON list" in Measured(1.0, [], []).check(Check(Guide("choice", "x"), 2, 0.25)).problem
