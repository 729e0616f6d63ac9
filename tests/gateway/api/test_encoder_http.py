"""/v1/embeddings, /v1/rerank and /v1/score as their clients call them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import orjson
import pytest

from clients.wire.encoder_call import Rows
from contract.errors import InvalidArgument
from gateway.api import encoder_http, schemas
from gateway.api.encoder_http import MAX_INPUTS, MAX_QUERY, EmbeddingsRequest, RerankRequest, ScoreRequest
from gateway.encoding import EncodedRows
from tests.fakes.encoder_replica import EncoderReplica, vector
from tests.gateway.running import gateway
from tests.gateway.test_encoding import config

SCORES = EncodedRows(np.array([[0.25], [0.75], [0.5]], np.float32), 9, {})


def answer(kind, encoded, **fields):
    body = schemas.validated(kind, orjson.dumps({"model": "m", **fields}))
    return encoder_http.answer(body, encoded, "r")


async def test_openais_client_gets_numbers_from_base64_and_as_they_are():
    async with EncoderReplica() as replica, gateway(config=config(replica)) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="none", max_retries=0) as client:
            found = await client.embeddings.create(model="small", input=["a b", "c"])
            plain = await client.embeddings.create(model="small", input=["a b", "c"], encoding_format="float")
            ids = await client.embeddings.create(model="small", input=[[1, 2], [3]])
            assert np.allclose(found.data[0].embedding, vector("a b"))
            assert np.allclose([one.embedding for one in found.data], [one.embedding for one in plain.data])
            assert found.usage.prompt_tokens == ids.usage.total_tokens == 3 and found.model == "small"
            with pytest.raises(openai.NotFoundError) as caught:
                await client.embeddings.create(model="other", input="a")
            assert caught.value.param == "model" and caught.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.embeddings.create(model="small", input=["a", ""])
            assert refused.value.param == "input.1"


async def test_the_response_tells_the_model_and_the_class_that_serve_it():
    table = '[models.small-1]\npools = ["small"]\naliases = ["text-embedding-3-small"]\n[classes.late]\npriority = 7\n'
    async with EncoderReplica() as replica, gateway(config=config(replica, more=table)) as running:
        body = {"model": "text-embedding-3-small", "input": "a"}
        status, headers, answer = await running.post("/v1/embeddings", body, x_trident_class="late")
        assert status == 200 and answer["model"] == headers["x-trident-model"] == "small-1"
        assert headers["x-trident-class"] == "late"


def test_base64_is_of_little_endian_f32():
    found = answer(
        EmbeddingsRequest, EncodedRows(np.array([[1.5, -2.0]], "<f4"), 3, {}), input="a", encoding_format="base64"
    )
    assert np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4").tolist() == [1.5, -2.0]
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_documents_are_ranked_cut_and_returned_if_asked():
    given = {"query": "q", "documents": ["a", {"text": "b"}, "c"]}
    found = answer(RerankRequest, SCORES, **given)
    assert found["results"] == [
        {"index": 1, "relevance_score": 0.75},
        {"index": 2, "relevance_score": 0.5},
        {"index": 0, "relevance_score": 0.25},
    ]
    cut = answer(RerankRequest, SCORES, **given, top_n=1, return_documents=True)["results"]
    assert cut == [{"index": 1, "relevance_score": 0.75, "document": {"text": "b"}}]


def test_scores_are_in_the_order_of_the_pairs():
    found = answer(ScoreRequest, SCORES, text_1="q", text_2=["a", "b", "c"])
    assert [entry["score"] for entry in found["data"]] == [0.25, 0.75, 0.5]
    assert found["data"][0] == {"index": 0, "object": "score", "score": 0.25}
    assert found["id"] == "score-r" and found["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("kind", "fields", "tensor", "field"),
    [
        (EmbeddingsRequest, {"input": ["a", "b"]}, "text_input[1]", "input[1]"),
        (EmbeddingsRequest, {"input": "a"}, "text_input[0]", "input"),
        (EmbeddingsRequest, {"input": [1]}, "input_ids[0]", "input"),
        (EmbeddingsRequest, {"input": "a"}, "text_pair", "model"),
        (EmbeddingsRequest, {"input": "a"}, "max_tokens", "input"),
        (EmbeddingsRequest, {"input": "a"}, "dimensions", "dimensions"),
        (RerankRequest, {"query": "q", "documents": ["a", "b"]}, "text_pair[1]", "documents[1]"),
        (RerankRequest, {"query": "q", "documents": ["a", "b"]}, "text_input[1]", "query"),
        (ScoreRequest, {"text_1": "q", "text_2": ["a", "b"]}, "text_input[1]", "text_1"),
        (ScoreRequest, {"text_1": "q", "text_2": ["a", "b"]}, "text_pair[1]", "text_2[1]"),
    ],
)
def test_an_encoders_error_is_about_the_callers_own_field(kind, fields, tensor, field):
    body = schemas.validated(kind, orjson.dumps({"model": "m", **fields}))
    found = encoder_http._for_body(InvalidArgument(tensor, "must be otherwise"), body)
    assert found.field == field and found.problem


async def test_a_reranker_says_that_it_makes_no_embeddings():
    async with EncoderReplica(reranks=True) as replica, gateway(config=config(replica)) as running:
        status, _, refused = await running.post("/v1/embeddings", {"model": "small", "input": "a"})
        assert status == 400 and refused["error"]["param"] == "model"
        assert "use /v1/rerank or /v1/score" in refused["error"]["message"]
        body = {"model": "small", "query": "a b", "documents": ["c", "a b"], "top_n": 1}
        status, _, ranked = await running.post("/v1/rerank", body)
        assert status == 200 and ranked["results"][0]["index"] == 1 and ranked["usage"]["total_tokens"] == 7
        body = {"model": "small", "text_1": "a", "text_2": "a"}
        status, _, scored = await running.post("/v1/score", body)
        assert status == 200 and scored["data"][0]["score"] == pytest.approx(1.0)


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
