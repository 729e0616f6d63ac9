"""What the pipeline that checks grammars refuses."""

import pytest

from contract.generation import Guide
from python_backends.grammar.messages import Check
from python_backends.grammar.pipeline import GrammarPipeline


@pytest.mark.slow
def test_a_grammar_whose_tokens_cost_more_and_more_is_refused_though_its_texts_may_end_soon(tiny_engine):
    pipeline = GrammarPipeline(tiny_engine / "grammar_checker")
    ambiguous = Guide("regex", "((a{1,100}){1,100}){1,100}")
    assert "a token takes" in pipeline.check(Check(ambiguous, 256, 0.04)).problem
    assert not pipeline.check(Check(Guide("regex", "(a{1,100},){1,100}"), 256, 0.04)).problem
