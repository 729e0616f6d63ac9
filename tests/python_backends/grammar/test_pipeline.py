"""What the pipeline that checks grammars refuses."""

import pytest

from contract.generation import Guide
from python_backends.grammar.checker import Check
from python_backends.grammar.pipeline import GrammarPipeline


@pytest.mark.slow
def test_a_grammar_whose_tokens_cost_more_and_more_is_refused_though_its_texts_may_end_soon(tiny_engine):
    pipeline = GrammarPipeline(tiny_engine / "grammar_checker")
    ambiguous = Guide("regex", "((a{2,100}){2,100}){2,100}")
    assert "a token takes" in pipeline.check(Check(ambiguous, 256, 0.04)).problem
    assert isinstance(pipeline.check(Check(Guide("regex", "(a{1,100},){1,100}"), 256, 0.04)), Guide)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["(a*)*b", "(a+)?b", r"(\d{4})*", "(a{2}){3}", "((a?){0,5})+"])
def test_a_count_of_a_count_compiles(tiny_engine, pattern):
    checked = GrammarPipeline(tiny_engine / "grammar_checker").check(Check(Guide("regex", pattern), 256, 5.0))
    assert isinstance(checked, Guide)
