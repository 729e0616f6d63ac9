"""Hooks in front of the real server: what the example removes is removed on every way to the model's text."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from clients import NO_RETRY, AsyncClient
from contract.redaction import redact
from server.replica import Replica
from tests.gateway.running import gateway

pytestmark = pytest.mark.end_to_end
CONFIG = '[hooks.personal_data]\nuse = "examples.hooks.personal_data:PersonalData"\ntimeout_ms = 10000.0\n'
PROMPT = "# a.b@c.example, 10.0.0.1\ndef connect("
ASK: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "echo": True}
FRESH = {"cache-control": "no-store"}


async def test_personal_data_reaches_neither_the_model_nor_the_caller(replica: Replica):
    urls = {"replicas": replica.grpc_url, "metrics_urls": {replica.grpc_url: replica.metrics_url}}
    async with gateway(**urls) as plain, gateway(**urls, config=CONFIG) as running:
        async with openai.AsyncOpenAI(base_url=f"{plain.base_url}/v1", api_key="x", max_retries=0) as ask:
            same = await ask.completions.create(**{**ASK, "prompt": redact(PROMPT)}, extra_headers=FRESH)
        expected = redact(same.choices[0].text)
        assert expected.startswith("# [EMAIL], [IP]\ndef connect(")
        async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="x", max_retries=0) as ask:
            whole = await ask.completions.create(**ASK, n=2, extra_headers=FRESH)
            assert [choice.text for choice in whole.choices] == [expected] * 2
            stream = await ask.completions.create(**ASK, stream=True, extra_headers=FRESH)
            parts = [part.choices[0].text async for part in stream if part.choices]
            assert "".join(parts) == expected and len(parts) > 3
            assert whole.usage is not None and same.usage is not None
            assert whole.usage.prompt_tokens == same.usage.prompt_tokens
        async with AsyncClient(running.grpc_url, retry=NO_RETRY) as client:
            done = await client.generate(PROMPT, max_tokens=24, temperature=0.0, echo=True).complete()
            assert done.text == expected and not done.token_ids  # ids would show the text that was removed
