"""Passages of the project's own pages, embedded once and searched through a gateway."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from examples.rag.index import MAX_CHARACTERS, Index, passages
from tests.fakes.encoder_replica import EncoderReplica
from tests.gateway.running import gateway
from tests.gateway.test_encoding import config


def test_pages_become_short_passages_that_are_there_once():
    found = passages(Path(__file__).resolve().parents[3] / "docs")
    assert len(found) > 200 and max(len(one.text) for one in found) <= MAX_CHARACTERS + 1
    texts = [" ".join(one.text.split()) for one in found]
    assert len(set(texts)) == len(texts)
    assert any(one.page == "glossary.md" and "the right to generate" in one.text for one in found)


@pytest.mark.slow
async def test_only_new_texts_are_embedded_again(tmp_path: Path):
    (tmp_path / "a.md").write_text("# Permits\nA permit is the right to generate tokens.\n")
    (tmp_path / "b.md").write_text("# Pools\nA pool is several replicas with a name.\n")
    async with EncoderReplica() as replica, gateway(config=config(replica)) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="none") as client:
            cache = tmp_path / "index.npz"
            index = await Index.build(client, "small", tmp_path, cache)
            found = await index.search(client, "which replicas have a name", 1)
            assert [passage.page for passage in found] == ["b.md"]
            calls = len(replica.calls)
            await Index.build(client, "small", tmp_path, cache)
            assert len(replica.calls) == calls
            (tmp_path / "c.md").write_text("# Leases\nA lease ends when no beat comes for it.\n")
            assert len((await Index.build(client, "small", tmp_path, cache)).passages) == 3
            assert len(replica.calls) == calls + 1
