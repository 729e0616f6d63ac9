"""An encoder on the real tritonserver: served by itself, batched across callers, killed and back, and drained."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest

from build.package import encoder
from build.recipe import recipe as recipes
from server.replica import Replica, running
from tests.fakes import tiny_encoders as tiny
from tests.fakes.triton_requests import metric, metrics
from tests.gateway.running import gateway


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines ``tiny`` (embeddings) and ``ranker``, of random weights."""
    folder = tmp_path_factory.mktemp("engines")
    models = tmp_path_factory.mktemp("models")
    tiny.write_sentence_files(tiny.write_bert(models / "tiny", tiny.BERT))
    tiny.write_bert(models / "ranker", tiny.RERANKER)
    for name, kind in (("tiny", "embedding"), ("ranker", "rerank")):
        recipe = recipes.encoder({"kind": kind, "model": str(models / name)}, f"{name}.toml")
        encoder.build(recipe, folder, lambda line: None)
    return folder


@pytest.fixture(scope="module")
def replica(engines: Path) -> Iterator[Replica]:
    with running("tiny", engines_dir=engines) as server:
        yield server


def infer(url: str, **texts: list[str]) -> dict[str, np.ndarray]:
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [len(values), 1], "data": values} for name, values in texts.items()
    ]
    body = json.dumps({"inputs": inputs}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/encoder/infer", body, timeout=30) as answer:
        outputs = json.load(answer)["outputs"]
    return {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in outputs}


def test_callers_at_once_share_forward_passes_and_get_what_they_get_alone(replica: Replica) -> None:
    texts = [" ".join(tiny.WORDS[: 1 + number % 20]) for number in range(96)]
    before = metrics(replica.metrics_url)
    with ThreadPoolExecutor(32) as callers:
        together = list(callers.map(lambda text: infer(replica.http_url, text_input=[text])["embedding"][0], texts))
    after = metrics(replica.metrics_url)
    passes = [metric(page, "nv_trt_llm_general_metrics", general_type="iteration_counter") for page in (before, after)]
    assert passes[1] - passes[0] < len(texts)
    alone = np.concatenate([infer(replica.http_url, text_input=texts[n : n + 1])["embedding"] for n in range(20)])
    assert np.abs(np.array(together[:20]) - alone).max() < 1e-5


def test_a_wrong_request_names_its_field_and_text(replica: Replica) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        infer(replica.http_url, text_input=["a", "the " * 99])
    assert "text_input[1]: must have at most 32 tokens, got 101" in caught.value.read().decode()


async def test_openais_client_embeds_through_the_gateway_whatever_else_is_embedded(replica: Replica) -> None:
    url, metrics_url = replica.grpc_url, replica.metrics_url
    config = f'[pools]\nsmall = {{ kind = "encoder", replicas = "{url}" }}'
    texts = [" ".join(tiny.WORDS[number % 7 : number % 13 + 1]) + " food" for number in range(100)]
    async with gateway(config=config, metrics_urls={url: metrics_url}, deep_probes=True) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.embeddings.create(model="small", input=texts)
            each = await asyncio.gather(*(client.embeddings.create(model="small", input=text) for text in texts[:40]))
            difference = np.array([one.data[0].embedding for one in each]) - [one.embedding for one in whole.data[:40]]
            assert np.abs(difference).max() < 1e-5
            assert whole.usage.prompt_tokens == sum(len(text.split()) + 2 for text in texts)
            with pytest.raises(openai.BadRequestError, match=r"input\[1\]: must have at most 32 tokens, got 42"):
                await client.embeddings.create(model="small", input=["a", "food " * 40])
        body = {"model": "small", "query": "food", "documents": ["quick fox", "food"], "top_n": 1}
        status, _, ranked = await running.post("/v1/rerank", body)
        assert status == 200 and ranked["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)


def test_a_killed_model_comes_back_without_a_restart_of_the_server(replica: Replica) -> None:
    [stub] = replica.stubs("encoder")
    os.kill(stub.pid, signal.SIGKILL)
    replica.wait_until_ready(reloads=1)
    assert infer(replica.http_url, text_input=["a"])["embedding"].shape == (1, 32)
    assert replica.status.restarts == 0


def test_a_reranker_is_served_alone_and_stops_when_it_has_nothing_to_do(engines: Path) -> None:
    with running("ranker", engines_dir=engines) as replica:
        scores = infer(replica.http_url, text_input=["the man", "the man"], text_pair=["eats", "food"])["score"]
        assert scores.shape == (2, 1) and ((scores > 0) & (scores < 1)).all()
        assert replica.stop() == 0
        assert "all streams completed" in replica.output.read_text()
