"""Bodies become rows, or are refused by the field that is wrong."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from clients.wire.encoder_call import Rows
from contract.errors import InvalidArgument
from gateway.api import schemas
from gateway.api.encoder_schemas import MAX_INPUTS, MAX_QUERY, EmbeddingsRequest, RerankRequest, ScoreRequest

RERANK = {"query": "q", "documents": ["a"]}


def rows(kind: type, **fields: Any) -> Rows:
    found: Rows = schemas.validated(kind, orjson.dumps({"model": "m", **fields})).rows()
    return found


@pytest.mark.parametrize(
    ("given", "texts", "ids"),
    [
        ("a", ("a",), ()),
        (["a", "b"], ("a", "b"), ()),
        ([1, 2], (), ((1, 2),)),
        ([[1, 2], [3]], (), ((1, 2), (3,))),
        (list(range(9000)), (), (tuple(range(9000)),)),
    ],
)
def test_every_form_of_input_becomes_rows(given: Any, texts: tuple, ids: tuple) -> None:
    found = rows(EmbeddingsRequest, input=given)
    assert (found.texts, found.ids) == (texts, ids)


def test_options_of_an_embedding_are_passed_on() -> None:
    found = rows(EmbeddingsRequest, input="a", dimensions=8, prompt_name="query", truncate_prompt_tokens=-1, user="u")
    assert (found.dimensions, found.prompt_name, found.truncate) == (8, "query", -1)


def test_a_query_is_paired_with_every_document_and_one_text_with_several() -> None:
    assert rows(RerankRequest, query="q", documents=["a", {"text": "b"}]) == Rows(("q", "q"), ("a", "b"))
    assert rows(ScoreRequest, text_1="q", text_2=["a", "b"]) == Rows(("q", "q"), ("a", "b"))
    assert rows(ScoreRequest, text_1=["p", "q"], text_2=["a", "b"]) == Rows(("p", "q"), ("a", "b"))


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        (EmbeddingsRequest, {}, "input"),
        (EmbeddingsRequest, {"input": ""}, "input"),
        (EmbeddingsRequest, {"input": []}, "input"),
        (EmbeddingsRequest, {"input": [[]]}, "input.0"),
        (EmbeddingsRequest, {"input": ["a", 1]}, "input.1"),
        (EmbeddingsRequest, {"input": [-1]}, "input.0"),
        (EmbeddingsRequest, {"input": [2**31]}, "input.0"),
        (EmbeddingsRequest, {"input": [True]}, "input.0"),
        (EmbeddingsRequest, {"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        (EmbeddingsRequest, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EmbeddingsRequest, {"input": "a", "dimensions": 0}, "dimensions"),
        (EmbeddingsRequest, {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (EmbeddingsRequest, {"input": [1], "prompt_name": "query"}, "prompt_name"),
        (EmbeddingsRequest, {"input": "a", "stream": True}, "stream"),
        (RerankRequest, RERANK | {"documents": []}, "documents"),
        (RerankRequest, RERANK | {"documents": [{"title": "a"}]}, "documents.0.text"),
        (RerankRequest, RERANK | {"top_n": 0}, "top_n"),
        (RerankRequest, RERANK | {"query": "q" * (MAX_QUERY + 1)}, "query"),
        (ScoreRequest, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        (ScoreRequest, {"text_1": "q" * (MAX_QUERY + 1), "text_2": ["c", "d"]}, "text_1"),
        (ScoreRequest, {"text_1": "a"}, "text_2"),
    ],
)
def test_what_is_wrong_is_named(kind: type, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        rows(kind, **fields)
    assert caught.value.field == field and caught.value.problem
