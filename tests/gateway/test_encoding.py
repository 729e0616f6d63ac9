"""Encoders behind the gateway: their pools, failover, admission in tokens, drains."""

from __future__ import annotations

import asyncio
import time

import grpc
import numpy as np
import pytest

from contract.errors import InvalidArgument, Overloaded
from gateway import app
from gateway.config.configuration import Configuration
from gateway.config.pools import Pools
from gateway.config.settings import Settings
from gateway.routing import circuit_breaker
from gateway.service import Service
from tests.fakes.encoder_replica import DIMENSIONS, EncoderReplica, vector
from tests.gateway.config.test_configuration import ALICE, keys
from tests.gateway.running import Running, gateway, until

EMBEDDINGS = "/v1/embeddings"


def config(*replicas: EncoderReplica, more: str = "") -> str:
    return f'{more}\n[pools]\nsmall = {{ kind = "encoder", replicas = "{",".join(one.url for one in replicas)}" }}\n'


async def embed(running, texts, **headers):
    return await running.post(EMBEDDINGS, {"model": "small", "input": texts}, **headers)


async def test_many_texts_go_in_several_calls_and_come_back_in_order():
    texts = [f"word{number} again" for number in range(150)]
    async with EncoderReplica() as replica, gateway(config=config(replica)) as running:
        status, headers, answer = await embed(running, texts)
        assert status == 200 and headers["x-request-id"]
        assert [list(call.inputs[0].shape) for call in replica.calls] == [[64, 1], [64, 1], [22, 1]]
        assert [entry["index"] for entry in answer["data"]] == list(range(150))
        found = np.array([entry["embedding"] for entry in answer["data"]])
        assert found.shape == (150, DIMENSIONS)
        assert np.allclose(found, np.stack([vector(text) for text in texts]))
        assert answer["usage"] == {"prompt_tokens": 300, "total_tokens": 300}
        page = await running.metrics()
        name = 'trident_gateway_requests_total{code="200",operation="embeddings",protocol="http"}'
        assert page[name] == 1


async def replaced(running: Running, failing: EncoderReplica, good: EncoderReplica) -> None:
    """Send requests, which all succeed, until the failing replica was asked."""
    for _ in range(60):  # idle replicas are picked at random
        status, _, answer = await embed(running, "a b")
        assert status == 200, answer
        if failing.calls:
            break
    assert failing.calls and good.calls


async def test_a_replica_that_fails_is_replaced_by_another_one():
    async with EncoderReplica() as bad, EncoderReplica() as good:
        bad.refusal = (grpc.StatusCode.UNAVAILABLE, "Unavailable: the server is shutting down")
        async with gateway(config=config(bad, good)) as running:
            await replaced(running, bad, good)


async def test_a_replica_that_does_not_answer_is_replaced_by_another_one():
    async with EncoderReplica() as hung, EncoderReplica() as good:
        hung.gate.clear()
        async with gateway(config=config(hung, good), idle_timeout_s=0.2, breaker_failures=1000) as running:
            await replaced(running, hung, good)


async def test_without_a_healthy_replica_it_is_503_and_a_silent_one_is_504():
    async with EncoderReplica() as replica, gateway(config=config(replica), idle_timeout_s=0.2) as running:
        replica.gate.clear()
        status, _, answer = await embed(running, "a")
        assert status == 504 and answer["error"]["code"] == "deadline_exceeded"
        replica.gate.set()
        replica.refusal = (grpc.StatusCode.UNAVAILABLE, "Unavailable: gone")
        status, headers, _ = await embed(running, "a")
        assert status == 503 and headers["retry-after"]


async def test_the_queue_of_an_encoder_that_serves_others_is_no_failure(monkeypatch):
    monkeypatch.setattr(circuit_breaker, "SILENCE_S", 0.1)
    async with EncoderReplica() as replica, gateway(config=config(replica), idle_timeout_s=0.2) as running:
        [known] = running.service.replicas.ready_in("small")
        replica.gate.clear()
        for failures, progress_s in ((1, 0.0), (1, time.monotonic() + 60)):
            known.progress_s = progress_s
            assert (await embed(running, "a"))[0] == 504
            assert known.breaker.failures == failures


async def test_a_caller_that_leaves_frees_the_replica():
    async with EncoderReplica() as replica, gateway(config=config(replica)) as running:
        replica.gate.clear()
        task = asyncio.create_task(embed(running, "a"))
        await until(lambda: len(replica.calls) == 1)
        task.cancel()
        await until(lambda: replica.cancelled == 1)
        assert running.service.admission.running == 0


async def test_an_errors_row_is_counted_over_all_calls():
    async with EncoderReplica() as replica, gateway(config=config(replica)) as running:
        status, _, answer = await embed(running, ["a"] * 100 + ["too long"])
        assert status == 400 and answer["error"]["param"] == "input[100]"
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "input[100]: must have at most 8 tokens, got 9" in answer["error"]["message"]


async def test_budgets_are_reserved_by_estimate_and_settled_by_count():
    limits = "tokens_per_minute = 1000\nburst_tokens = 1000"
    async with EncoderReplica() as replica:
        async with gateway(config=config(replica, more=keys(ALICE, limits=limits))) as running:
            key = {"authorization": f"Bearer {ALICE}"}
            status, headers, _ = await embed(running, "word " * 200, **key)
            assert status == 200 and headers["x-ratelimit-limit-tokens"] == "1000"
            spent = 0
            while status == 200 and spent < 10:
                status, headers, answer = await embed(running, "word " * 200, **key)
                spent += 1
            assert status == 429 and 2 <= spent <= 5 and "tokens" in answer["error"]["message"]
            status, _, answer = await embed(running, [7] * 1001, **key)
            assert status == 400 and answer["error"]["param"] == "input"


@pytest.mark.parametrize("text", ["word " * 5000, [7] * 2000], ids=["text", "ids"])
async def test_what_is_cut_is_not_reserved_and_teaches_nothing(text):
    limits = "tokens_per_minute = 1000\nburst_tokens = 1000"
    async with EncoderReplica() as replica:
        async with gateway(config=config(replica, more=keys(ALICE, limits=limits))) as running:
            body = {"model": "small", "input": [text], "truncate_prompt_tokens": 16}
            status, headers, answer = await running.post(EMBEDDINGS, body, authorization=f"Bearer {ALICE}")
            assert status == 200 and headers["x-ratelimit-remaining-tokens"] == str(1000 - 16), answer
            assert not running.service.encoding._prompt_tokens._factors


async def test_waiting_for_a_slot_is_bounded_as_for_generations():
    rules = "[admission]\nmax_running = 1\nmax_waiting_per_class = 1\nmax_waiting_per_tenant = 1"
    async with EncoderReplica() as replica, gateway(config=config(replica, more=rules)) as running:
        replica.gate.clear()
        tasks = [asyncio.create_task(embed(running, "a")) for _ in range(2)]
        await until(lambda: len(replica.calls) == 1 and running.service.admission.waiting == 1)
        status, headers, answer = await embed(running, "a")
        assert status == 429 and headers["retry-after"], answer
        replica.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200, 200]


async def test_a_drain_waits_for_what_is_encoded_and_refuses_the_rest():
    async with EncoderReplica() as replica, gateway(config=config(replica)) as running:
        replica.gate.clear()
        task = asyncio.create_task(embed(running, "a"))
        await until(lambda: len(replica.calls) == 1)
        drain = asyncio.create_task(running.service.drain(30.0))
        await until(lambda: running.service.draining)
        assert (await embed(running, "a"))[0] == 503
        replica.gate.set()
        assert (await task)[0] == 200 and await drain == 0


async def test_health_probes_encode_a_pair_and_readiness_tells_the_pool():
    async with EncoderReplica() as replica, gateway(config=config(replica), deep_probes=True) as running:
        await until(lambda: bool(running.service.replicas.ready_in("small")))
        assert [tensor.name for tensor in replica.calls[0].inputs] == ["text_input", "text_pair"]
        assert running.service.ready()


async def test_models_of_encoders_are_listed_and_guarded_by_tenant():
    allowed = 'models = ["demo"]'
    async with EncoderReplica() as replica:
        async with gateway(config=config(replica)) as running:
            _, listed = await running.get("/v1/models")
            assert '"small"' in listed and (await running.get("/v1/models/small"))[0] == 200
            status, _, answer = await running.post(EMBEDDINGS, {"model": "demo", "input": "a"})
            assert status == 400 and answer["error"]["message"].endswith("one with embeddings: small; got demo")
            status, _, answer = await running.post(EMBEDDINGS, {"model": "other", "input": "a"})
            assert status == 404 and answer["error"]["code"] == "model_not_found"
            chat = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
            assert (await running.post("/v1/chat/completions", chat))[0] == 404
        async with gateway(
            config=config(
                replica,
                more=keys(ALICE).replace(
                    "[orgs.o0.teams.t.keys.k]", f"[orgs.o0.teams.t]\n{allowed}\n[orgs.o0.teams.t.keys.k]"
                ),
            )
        ) as running:
            status, _, answer = await embed(running, "a", authorization=f"Bearer {ALICE}")
            assert status == 404 and answer["error"]["code"] == "model_not_found"


async def test_a_model_of_the_table_may_be_an_encoder_with_its_aliases_and_capabilities():
    async with EncoderReplica() as replica:
        table = config(replica) + '[models.minilm]\npools = ["small"]\naliases = ["text-embedding-3-small"]\n'
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        async with gateway(config=table) as running:
            for name in ("minilm", "text-embedding-3-small"):
                status, _, answer = await running.post(EMBEDDINGS, {"model": name, "input": "a"})
                assert status == 200 and answer["model"] == "minilm"
            status, _, answer = await running.post("/v1/chat/completions", {"model": "minilm", **chat})
            assert status == 400 and "must be one with chat" in answer["error"]["message"]
            _, listed = await running.get("/v1/models")
            assert '"small"' not in listed and '"capabilities":["embeddings","rerank"]' in listed
        async with gateway(config=table + 'capabilities = ["rerank"]\n') as running:
            status, _, answer = await running.post(EMBEDDINGS, {"model": "minilm", "input": "a"})
            assert status == 400 and "must be one with embeddings" in answer["error"]["message"]


async def test_a_gateway_of_the_environment_may_serve_nothing_but_an_encoder():
    async with EncoderReplica() as replica:
        settings = {"replicas": f"small={replica.url}", "encoders": ("small",), "models": {}, "model": "small"}
        async with gateway(**settings) as running:
            status, _, answer = await embed(running, "a b")
            assert status == 200, answer
            chat = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
            assert (await running.post("/v1/chat/completions", chat))[0] in (400, 404, 503)


async def test_the_gateways_own_embedding_is_of_length_1_or_none_in_time():
    async with EncoderReplica() as replica, gateway(config=config(replica)) as running:
        await until(lambda: bool(running.service.replicas.ready_in("small")))
        encoding = running.service.encoding
        found = await encoding.embedding("a b", "small", 30.0)
        assert found is not None and np.allclose(found, vector("a b"))
        assert await encoding.embedding("a", "other", 30.0) is None
        replica.gate.clear()
        assert await encoding.embedding("a", "small", 0.05) is None


async def test_pressure_refuses_an_encoders_request_and_never_shortens_it():
    rules = "[degradation]\nshorter_at = 0.0001\noverflow_at = 0.0001\nrefuse_at = 0.0001"
    async with EncoderReplica() as replica, gateway(config=config(replica, more=rules), max_in_flight=2) as running:
        replica.gate.clear()
        task = asyncio.create_task(embed(running, "a"))
        await until(lambda: len(replica.calls) == 1)
        status, _, _ = await embed(running, "a")
        assert status == Overloaded.http_status
        replica.gate.set()
        assert (await task)[0] == 200


def test_the_semantic_caches_model_is_one_that_there_is():
    settings = Settings(semantic_model="small")
    service = Service(settings, Configuration(None, {}, Pools(settings.pools)))
    with pytest.raises(
        InvalidArgument, match=r"SEMANTIC_MODEL: must be a model with embeddings .*, got 'small': .* does not exist"
    ):
        app.build(service)
