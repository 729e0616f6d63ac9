"""Every kind of guide as the engine's library compiles it."""

from contract.generation import Guide
from python_backends.grammar.translation import translate


def test_a_grammar_stays_as_it_is():
    guide = Guide("ebnf_grammar", 'root ::= "a"')
    assert translate(guide) == guide
