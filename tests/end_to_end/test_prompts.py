"""What a prompt may be, on the real server and through the gateway: text, a chat or token ids, whole or truncated."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import openai
import pytest
import tokenizers
import tritonclient.grpc.aio as triton
from triton_requests import ask, responses

from clients import AsyncClient
from contract import manifest as manifests
from contract.errors import InvalidArgument, PromptTooLong
from tests.gateway.running import gateway

PROMPT = "def fibonacci(n):\n"
GREEDY = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def library(engine_dir):
    return tokenizers.Tokenizer.from_file(str(engine_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def limit(engine_dir):
    return manifests.load(engine_dir).max_seq_len


@pytest.fixture
async def client(replica):
    async with triton.InferenceServerClient(replica.grpc_url) as connection:
        yield connection


@contextlib.asynccontextmanager
async def openai_client(replica, engine_dir) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client at a gateway in front of the replica."""
    tokenizer = engine_dir / "tokenizer.json"
    async with gateway(replicas=replica.grpc_url, metrics_urls={}, model="demo", tokenizer=tokenizer) as running:
        async with openai.AsyncOpenAI(base_url=f"{running.base_url}/v1", api_key="none", max_retries=0) as client:
            yield client


async def test_ids_give_what_their_text_gives_at_every_endpoint(replica, engine_dir, client, library):
    ids = library.encode(PROMPT).ids
    text = await ask(client, {"text_input": PROMPT, **GREEDY})
    by_ids = await ask(client, {"input_ids": ids, **GREEDY})
    assert (by_ids.text, by_ids.ids) == (text.text, text.ids) and len(text.ids) == 12
    assert by_ids.outputs["num_input_tokens"].item() == len(ids)
    async with AsyncClient(replica.grpc_url) as ours:
        completion = await ours.complete(input_ids=ids, temperature=0.0, **GREEDY)
    assert completion.text == text.text
    async with openai_client(replica, engine_dir) as far:
        options = {"model": "demo", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
        one = await far.completions.create(prompt=ids, **options)
        two = await far.completions.create(prompt=[ids, ids[:-1]], **options)
    assert one.choices[0].text == two.choices[0].text == text.text
    assert (one.usage.prompt_tokens, two.usage.prompt_tokens) == (len(ids), 2 * len(ids) - 1)


@pytest.mark.parametrize("kept", [3, -1])
async def test_a_long_prompt_is_refused_or_truncated_to_its_last_tokens(
    replica, engine_dir, client, library, limit, kept
):
    text = "".join(f"x = {number}\n" for number in range(limit))
    ids = library.encode(text, add_special_tokens=False).ids
    added = library.encode("").ids  # those that the tokenizer puts in front of a text stay there
    count = kept if kept > 0 else limit - 12
    expected = added + ids[len(added) - count :]
    refused = await ask(client, {"text_input": text, **GREEDY})
    assert "PromptTooLong: text_input: must have at most" in refused.error
    reference = await ask(client, {"input_ids": expected, **GREEDY})
    found = await ask(client, {"text_input": text, **GREEDY, "truncate_prompt_tokens": kept})
    assert (found.error, found.ids) == ("", reference.ids)
    chat = json.dumps([{"role": "user", "content": text}])
    for prompt in ({"messages": chat}, {"input_ids": ids}):
        echoed = {**prompt, **GREEDY, "truncate_prompt_tokens": kept, "exclude_input_in_output": False}
        found = await ask(client, echoed)
        assert (found.error, found.outputs["num_input_tokens"].item()) == ("", count)
        assert len(found.ids) == count + 12
    assert found.ids[:count] == ids[-count:]
    async with openai_client(replica, engine_dir) as far:
        more = {"ignore_eos": True, "truncate_prompt_tokens": kept}
        answer = await far.completions.create(model="demo", prompt=text, max_tokens=12, temperature=0, extra_body=more)
        with pytest.raises(openai.BadRequestError) as error:
            await far.completions.create(model="demo", prompt=text, max_tokens=12)
    assert (answer.choices[0].text, answer.usage.prompt_tokens) == (reference.text, len(expected))
    assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")


async def test_wrong_ids_are_refused_by_name_and_disturb_nobody(replica, engine_dir, client, library):
    stream = responses(client, {"text_input": PROMPT, "max_tokens": 60, "stream": True, "ignore_eos": True})
    first, _ = await anext(stream)
    vocabulary = manifests.load(engine_dir).vocab_size
    for ids, problem in (([], "got none"), ([-1], "got -1"), ([3, vocabulary], f"got {vocabulary}")):
        refused = await ask(client, {"input_ids": ids, **GREEDY})
        assert "InvalidArgument: input_ids: must hold" in refused.error and problem in refused.error
    async with AsyncClient(replica.grpc_url) as ours:
        with pytest.raises(InvalidArgument, match="input_ids"):
            await ours.complete(input_ids=[vocabulary])
        with pytest.raises(PromptTooLong, match="input_ids"):
            await ours.complete(input_ids=[1] * 5000)
    async with openai_client(replica, engine_dir) as far:
        with pytest.raises(openai.BadRequestError, match="must hold ids from 0 to") as error:
            await far.completions.create(model="demo", prompt=[1, vocabulary])
    assert error.value.param == "prompt"
    rest = [result async for result, error in stream if not error]
    assert first is not None and rest[-1].as_numpy("finish_reason").item() == b"length"
