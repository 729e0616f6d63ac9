"""What a prompt may be, on the real server and through the gateway: text, a chat or token ids, whole or truncated."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openai
import pytest
import tokenizers
import tritonclient.grpc.aio as triton
from triton_requests import Answer, ask, responses, take

from build.base.checkpoint import open_checkpoint
from clients import AsyncClient
from contract import manifest as manifests
from contract.errors import InvalidArgument, PromptTooLong
from tests.fakes import numpy_llama
from tests.gateway.running import gateway

ROOT = Path(__file__).resolve().parents[2]
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


# ---- log probabilities of the prompt ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(library):
    """(ids, f64[len(ids), vocab]): a prompt, and the log probabilities after each id, by a forward pass in numpy."""
    checkpoint = open_checkpoint(ROOT / "build" / "demo_model" / "checkpoint")
    tensors = {name: tensor.f32() for name, tensor in checkpoint.tensors.items()}
    ids = library.encode(PROMPT + "    a, b = 0, 1\n    while a < n:\n        print(a, end=' ')\n" * 8).ids
    logits = numpy_llama.logits(dict(checkpoint.config), tensors, ids).astype(np.float64)
    return ids, logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompts_ids_have_the_models_log_probabilities(client, reference, stream):
    ids, log_probs = reference
    assert len(ids) > 150  # more than is scored in one step
    asked = {"input_ids": ids, "max_tokens": 0, "exclude_input_in_output": False, "stream": stream}
    asked |= {"return_log_probs": True, "num_top_log_probs": 2, "return_prompt_log_probs": True}
    for _ in range(2):  # the second time from a warm prefix cache
        found = await ask(client, asked)
        assert (found.error, found.ids, found.finish_reasons[-1]) == ("", ids, "length")
        assert found.log_probs[0] == 0 and found.outputs["num_output_tokens"].item() == 0
        expected = log_probs[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(found.log_probs[1:], expected, atol=1e-3)
        assert sum(found.log_probs) == pytest.approx(expected.sum(), abs=0.01)
        top = found.outputs["top_log_probs_ids"].reshape(-1, 2)
        assert len(top) == len(ids) and top[0].tolist() == [-1, -1]
        agree = top[1:, 0] == log_probs[:-1].argmax(axis=-1)
        assert agree.mean() > 0.98


async def test_an_evaluation_harness_gets_what_it_sums_up(replica, engine_dir, client, reference):
    """The request of lm-eval's ``local-completions``: one token more than it needs, and the likeliest at each place."""
    ids, log_probs = reference
    context = 40
    async with openai_client(replica, engine_dir) as far:
        options = {"model": "demo", "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
        several = await far.completions.create(prompt=[ids, ids[:60]], max_tokens=1, **options)
        alone = await far.completions.create(prompt=ids, max_tokens=0, **options)
        with pytest.raises(openai.BadRequestError) as refused:
            await far.completions.create(model="demo", prompt=ids, max_tokens=0)
    for choice, length in zip(several.choices, (len(ids), 60), strict=True):
        found = choice.logprobs
        assert len(found.token_logprobs) == len(found.tokens) == len(found.top_logprobs) == length + 1
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        expected = log_probs[np.arange(context - 1, length - 1), ids[context:length]]
        assert sum(found.token_logprobs[context:-1]) == pytest.approx(expected.sum(), abs=0.01)
        greedy = [
            value == max(top.values())
            for value, top in zip(found.token_logprobs[context:-1], found.top_logprobs[context:-1], strict=True)
        ]
        agree = np.array(greedy) == (log_probs[context - 1 : length - 1].argmax(axis=-1) == ids[context:length])
        assert agree.mean() > 0.97
    assert alone.choices[0].logprobs.token_logprobs == several.choices[0].logprobs.token_logprobs[:-1]
    assert (alone.choices[0].finish_reason, alone.usage.completion_tokens) == ("length", 0)
    assert refused.value.param == "max_tokens"
    plain = await ask(client, {"input_ids": ids, "max_tokens": 0, "exclude_input_in_output": False})
    assert (plain.ids, plain.text, plain.log_probs) == (ids, alone.choices[0].text, [])


# ---- continued streams ----------------------------------------------------------------------------------------------

CUT = {"max_tokens": 24, "stream": True, "return_log_probs": True}


async def parts(client, inputs):
    """[(text, ids, log probs)] of every response, and the outputs of the last."""
    found, outputs = [], {}
    async for result, error in responses(client, inputs):
        assert not error, error
        answer = Answer()
        take(answer, result)
        found.append((answer.text, answer.ids, answer.log_probs))
        outputs |= answer.outputs
    return found, outputs


@pytest.mark.parametrize(
    "options",
    [
        {"text_input": PROMPT, "ignore_eos": True},
        {"text_input": PROMPT, "ignore_eos": True, "repetition_penalty": 1.3, "min_tokens": 15},
        {"text_input": PROMPT, "presence_penalty": 0.8, "frequency_penalty": 0.4},
        {"text_input": PROMPT, "stop_words": ["return ", "Return a list"], "exclude_input_in_output": False},
        {"text_input": "# 我能吞下玻璃 👩‍💻\nx = '我能吞下玻璃 👩‍💻', '", "ignore_eos": True, "num_top_log_probs": 2},
        {"text_input": "x = 1\n", "max_tokens": 60},
    ],
    ids=["plain", "repetition_penalty", "penalties", "stop_words", "characters", "end"],
)
async def test_wherever_a_stream_is_cut_what_follows_is_what_would_have_followed(client, options):
    asked = CUT | options
    whole, end = await parts(client, asked)
    text, ids, log_probs = ("".join(part[0] for part in whole), *(sum((p[n] for p in whole), []) for n in (1, 2)))
    prompt = 0 if options.get("exclude_input_in_output", True) else end["num_input_tokens"].item()
    told, boundaries = "", {}
    for added, new, _ in whole[:-1]:
        told += added
        boundaries[len(new) + max(boundaries, default=0)] = told
    length = len(ids) - prompt
    cuts = range(length) if options == {"text_input": PROMPT, "ignore_eos": True} else {0, 1, length // 2, length - 1}
    cuts = sorted({*cuts, *[at - prompt for at in boundaries][:: 1 + len(boundaries) // 4]})
    for cut in cuts:
        rest, last = await parts(client, asked | {"continue_ids": ids[prompt : prompt + cut]})
        rest_text = "".join(part[0] for part in rest)
        assert sum((part[1] for part in rest), []) == (ids if cut == 0 else ids[prompt + cut :]), cut
        assert text.endswith(rest_text), cut
        if prompt + cut in boundaries:
            assert boundaries[prompt + cut] + rest_text == text, cut
        values = sum((part[2] for part in rest), [])
        np.testing.assert_allclose(values, log_probs[cut:], atol=2e-3)
        for name in ("finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens"):
            assert np.array_equal(last.get(name), end.get(name)), (name, cut)
        np.testing.assert_allclose(last["cum_log_probs"], end["cum_log_probs"], atol=0.02)


async def test_a_stream_that_had_ended_ends_at_once_as_it_did(client):
    for more in ({"ignore_eos": True}, {"text_input": "x = 1\n", "max_tokens": 60}):
        asked = {"text_input": PROMPT, "max_tokens": 10} | more
        whole = await ask(client, asked)
        again = await ask(client, asked | {"continue_ids": whole.ids})
        assert (again.text, again.ids, again.finish_reasons) == ("", [], whole.finish_reasons)
        for name in ("stop_reason", "num_output_tokens", "num_input_tokens"):
            assert np.array_equal(again.outputs.get(name), whole.outputs.get(name))


async def test_a_sampled_stream_goes_on_with_other_random_numbers_always_the_same(replica, engine_dir, client):
    asked = {"text_input": PROMPT, "max_tokens": 30, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    whole = await ask(client, asked)
    one, two = [await ask(client, asked | {"continue_ids": whole.ids[:10]}) for _ in range(2)]
    assert one.ids == two.ids and len(one.ids) == 20
    counted = asked | {"presence_penalty": 0.5}
    whole = await ask(client, counted)
    rest = await ask(client, counted | {"continue_ids": whole.ids[:10]})
    assert rest.ids == whole.ids[10:]  # generated again from the start, with the same random numbers
    wrong = [*whole.ids[:9], (whole.ids[9] + 1) % 4000]
    refused = await ask(client, counted | {"continue_ids": wrong})
    told = refused.error or refused.outputs["error_message"].item().decode()  # in band behind a probe
    assert "continue_ids: must be what this engine generates" in told
    no_seed = {name: value for name, value in counted.items() if name != "seed"}
    refused = await ask(client, no_seed | {"continue_ids": whole.ids[:10]})
    assert "presence_penalty: must be 0 with continue_ids" in refused.error
    async with openai_client(replica, engine_dir) as far:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        begun = await ask(client, {"text_input": PROMPT, **GREEDY})
        more = {"ignore_eos": True, "continue_ids": begun.ids[:5]}
        answer = await far.completions.create(**body, extra_body=more)
    assert begun.text.endswith(answer.choices[0].text) and answer.usage.completion_tokens == 12
