"""Grammars in the library that TensorRT-LLM has, which needs torch (`make test-build`)."""

import json
from pathlib import Path

import pytest

from contract.generation import Guide
from python_backends.grammar.checker import TOKENIZER_INFO, Check
from python_backends.grammar.vocabulary import tokenizer_info
from python_backends.grammar.xgrammar_compiler import XGrammarCompiler
from tests.fakes import checkpoints

TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": {"type": "null"}},
        "end": "</f>",
    },
}


@pytest.mark.build_env
@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}}', ""),
        ("regex", "[0-9]{3}-x", ""),
        ("structural_tag", json.dumps(TAG), ""),
        ("regex", "((a{2,100}){2,100}){2,100}", "must not hold up other requests"),
        ("ebnf_grammar", "root ::= (", "must be a grammar that compiles"),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "none"}}', "must be a grammar that compiles"),
        ("json_schema", '{"minLenght": 1}', "must be a schema that can be followed"),
    ],
)
def test_a_guide_is_compiled_or_refused_in_the_words_of_an_error(
    tmp_path: Path, kind: str, text: str, problem: str
) -> None:
    pytest.importorskip("xgrammar")
    checkpoints.write_tokenizer(tmp_path)
    info = tmp_path / TOKENIZER_INFO
    info.write_text(json.dumps(tokenizer_info(tmp_path / "tokenizer.json", 257, [256])))
    compiler = XGrammarCompiler(info)
    checked = compiler.check(Check(Guide(kind, text), 256, 0.25))
    assert isinstance(checked, Guide) == (not problem) and problem in str(checked)
    assert "must not hold up other requests" in compiler.check(Check(Guide("regex", "[0-9]{9}"), 256, 1e-6)).problem
