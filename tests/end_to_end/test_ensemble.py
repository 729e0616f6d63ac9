"""The main job on the real server: text streams out of tokenizer → engine → detokenizer, batched in flight."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import urllib.error
import urllib.request
from dataclasses import astuple

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
import tritonclient.grpc as sync_triton
import tritonclient.grpc.aio as triton
import tritonclient.http as http_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_requests import Answer, ask, metric, responses, take, tensor

from clients import NO_RETRY, AsyncClient, Client
from clients.wire.completion import join
from clients.wire.request import build
from contract import manifest as manifests
from contract import packed_delta
from contract.errors import TridentError
from contract.generation import Guide
from python_backends.cpu_engine.worker import open_pipeline
from tests.end_to_end.watching import PATIENCE_S, TRIES, ended, halted, idle, requests, until, until_idle

PROMPT = "def fibonacci(n):\n"


@pytest.fixture
async def client(replica):
    async with triton.InferenceServerClient(replica.grpc_url) as connection:
        yield connection


async def test_a_stream_brings_pieces_that_join_to_the_unary_text_and_one_end_with_usage(client):
    for _ in range(TRIES):  # tokens that were not read in time share a response
        streamed = await ask(client, {"text_input": PROMPT, "max_tokens": 40, "stream": True, "ignore_eos": True})
        if streamed.responses > 10:
            break
    whole = await ask(client, {"text_input": PROMPT, "max_tokens": 40, "ignore_eos": True})
    assert streamed.responses > 10 and whole.responses == 1
    assert streamed.text == whole.text != ""
    assert streamed.ids == whole.ids and len(streamed.ids) == 40
    for answer in (streamed, whole):
        assert answer.finish_reasons == ["length"] and answer.finals == 1
        assert answer.outputs["num_output_tokens"].tolist() == [[40]]
        assert answer.outputs["num_input_tokens"].item() > 4


async def test_greedy_output_through_the_ensemble_is_the_engines_own_token_for_token(client, engine_dir):
    manifest = manifests.load(engine_dir)
    tokenizer_ids = await ask(client, {"text_input": PROMPT, "max_tokens": 1, "exclude_input_in_output": False})
    prompt_ids = tokenizer_ids.ids[:-1]
    pipeline = open_pipeline(engine_dir, manifest)
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = 100, True, False
    handle = pipeline.add_request(1, ov.Tensor(np.array([prompt_ids], dtype=np.int64)), config)
    expected = []
    while pipeline.has_non_finished_requests():
        pipeline.step()
        while handle.can_read():
            for output in handle.read().values():
                expected += output.generated_ids
    answer = await ask(client, {"text_input": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": True})
    assert answer.ids == expected


async def test_a_request_sent_while_another_generates_is_answered_before_the_other_ends(client):
    long = {"text_input": PROMPT, "max_tokens": 900, "stream": True, "ignore_eos": True}
    for _ in range(TRIES):  # who stands still for as long as the other takes sends it too late
        begun = asyncio.Event()

        async def read(begun: asyncio.Event = begun) -> int:
            seen = 0
            async for _result, error in responses(client, long):
                assert not error
                seen += 1
                begun.set()
            return seen

        other = asyncio.create_task(read())
        await begun.wait()
        late = await ask(client, {"text_input": "import os", "max_tokens": 5, "stream": True})
        in_time = not other.done()
        assert len(late.ids) == 5 and await other > 1
        if in_time:
            return
    pytest.fail("it was answered after the other had ended")


async def test_concurrent_requests_share_engine_steps(client, replica):
    inputs = {"max_tokens": 300, "stream": True, "ignore_eos": True}
    before = await until_idle(replica)
    with halted(replica):  # so that all are there when the first step is made
        tasks = [asyncio.create_task(ask(client, {"text_input": f"def f{i}(x):\n", **inputs})) for i in range(16)]
        await until(replica, lambda page: requests(page, "scheduled") == 16)
    answers = await asyncio.gather(*tasks)
    after = await until(replica, lambda page: idle(page) and ended(page, "length") == ended(before, "length") + 16)
    assert all(len(answer.ids) == 300 for answer in answers)
    steps = [metric(page, "nv_trt_llm_general_metrics", general_type="iteration_counter") for page in (before, after)]
    assert 300 <= steps[1] - steps[0] < 2 * 300


async def test_the_same_seed_gives_the_same_text_and_another_seed_another(client):
    inputs = {"text_input": PROMPT, "max_tokens": 30, "temperature": 1.0, "top_p": 0.95, "ignore_eos": True}
    first, again, older_name, other = await asyncio.gather(
        ask(client, {**inputs, "seed": 7}),
        ask(client, {**inputs, "seed": 7}),
        ask(client, {**inputs, "random_seed": 7}),
        ask(client, {**inputs, "seed": 2**40 + 7}),
    )
    assert first.ids == again.ids == older_name.ids != other.ids


async def test_a_chat_goes_through_the_models_template(client):
    messages = json.dumps([{"role": "user", "content": "What does abs do?"}])
    answer = await ask(client, {"messages": messages, "max_tokens": 16})
    assert answer.text and not answer.error
    assert "<|" not in answer.text


async def test_the_stop_request_ends_the_stream_of_that_id(client):
    stop = {"input_ids": 0, "input_lengths": 1, "request_output_len": 1, "stop": True}
    request = {"text_input": PROMPT, "max_tokens": 900, "stream": True, "ignore_eos": True}
    for _ in range(TRIES):  # the engine may have made all tokens by the time this process gets to ask
        answer = Answer()
        async for result, error in responses(client, request, request_id="job-1"):
            assert not error
            take(answer, result)
            if answer.responses == 1:
                reply = await ask(client, stop, model="engine", request_id="job-1")
                assert reply.ids == [] and reply.finals == 1
        if answer.finish_reasons == ["cancelled"]:
            break
    assert answer.finish_reasons == ["cancelled"]
    assert len(answer.ids) < 900


def test_the_sync_client_streams(replica):
    answers: list[tuple[object, object]] = []
    with sync_triton.InferenceServerClient(replica.grpc_url) as client:
        client.start_stream(lambda result, error: answers.append((result, error)))
        inputs = []
        for name, value, datatype in (("text_input", [[PROMPT.encode()]], "BYTES"), ("max_tokens", [[8]], "INT32")):
            array = np.array(value, dtype=np.object_ if datatype == "BYTES" else np.int32)
            inputs.append(sync_triton.InferInput(name, list(array.shape), datatype))
            inputs[-1].set_data_from_numpy(array)
        client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        client.stop_stream()
    assert answers and all(error is None for _, error in answers)
    assert answers[-1][0].get_response().parameters["triton_final_response"].bool_param


def _post(replica, path: str, body: dict) -> tuple[int, str]:
    request = urllib.request.Request(f"{replica.http_url}{path}", data=json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_generate_stream_sends_server_sent_events_and_generate_one_answer(replica):
    body = {"text_input": PROMPT, "max_tokens": 12, "stream": True, "ignore_eos": True}
    for _ in range(TRIES):  # tokens that were not read in time share an event
        status, text = _post(replica, "/v2/models/ensemble/generate_stream", body)
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        if len(events) > 3:
            break
    assert status == 200 and len(events) > 3
    assert events[-1]["finish_reason"] == "length"
    status, text = _post(replica, "/v2/models/ensemble/generate", {**body, "stream": False})
    assert status == 200
    assert json.loads(text)["text_output"] == "".join(event["text_output"] for event in events)


def test_the_http_client_reads_the_ensembles_metadata(replica):
    with http_triton.InferenceServerClient(replica.http_url.removeprefix("http://")) as client:
        assert client.is_model_ready("ensemble")
        outputs = {output["name"] for output in client.get_model_metadata("ensemble")["outputs"]}
    assert {"text_output", "finish_reason", "cum_log_probs", "output_log_probs"} <= outputs


async def test_two_hundred_streams_at_once_all_end_with_their_own_text(client):
    inputs = {"max_tokens": 12, "stream": True, "ignore_eos": True}
    prompts = [f"def function_{index % 20}(x):\n" for index in range(200)]
    answers = await asyncio.gather(*[ask(client, {"text_input": prompt, **inputs}) for prompt in prompts])
    assert {len(answer.ids) for answer in answers} == {12}
    by_prompt: dict[str, set[str]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        by_prompt.setdefault(prompt, set()).add(answer.text)
    assert all(len(texts) == 1 for texts in by_prompt.values())


async def test_what_the_usual_clients_always_send_is_accepted(client):
    usual = {
        "text_input": PROMPT,
        "max_tokens": 8,
        "bad_words": "",
        "stop_words": "",
        "stream": False,
        "beam_width": 1,
        "top_k": 1,
        "top_p": 0.0,
        "temperature": 1.0,
        "length_penalty": 1.0,
        "repetition_penalty": 1.0,
        "random_seed": 0,
        "return_log_probs": False,
        "return_context_logits": False,
        "return_generation_logits": False,
        "num_return_sequences": 1,
        "pad_id": 0,
    }
    answer = await ask(client, usual)
    assert answer.error == "" and len(answer.ids) == 8


async def test_an_unknown_input_is_refused_by_name(client):
    answer = await ask(client, [tensor("text_input", "a"), tensor("colour", 1, "INT32")])
    assert "colour" in answer.error


TOOLS = [{"type": "function", "function": {"name": "f"}}]
PROMPTS = (
    {"prompt": PROMPT},
    {"prompt": "naïve 'ünïcode' 例え"},
    {"messages": [{"role": "user", "content": "What does abs do?"}]},
    {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS},
    {"input_ids": (40, 41, 42, 300)},
    {"prompt": "x = " * 40, "truncate_prompt_tokens": 9},
    {"prompt": PROMPT, "echo": True},
    {"prompt": PROMPT, "echo": True, "log_probs": True, "prompt_log_probs": True, "top_log_probs": 2},
    {"prompt": PROMPT, "continue_ids": (40, 41)},
    {"prompt": ""},  # an error, as in the next ones
    {"prompt": PROMPT, "adapter": "nobody"},
    {"input_ids": (10**6,)},
)
OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 2, 12, 12, 12, 24, 10**6])},
    optional={
        "temperature": st.sampled_from([0.7, 1.3]),
        "top_k": st.sampled_from([2, 40]),
        "repetition_penalty": st.just(1.2),
        "stop": st.sampled_from([("e",), ("return", "\n\n"), ("n(", "if")]),
        "stop_token_ids": st.just(tuple(range(20, 200, 7))),
        "min_tokens": st.just(6),
        "ignore_eos": st.just(True),
        "skip_special_tokens": st.just(False),
        "log_probs": st.just(True),
        "top_log_probs": st.sampled_from([1, 5]),
        "guide": st.sampled_from([Guide("regex", "[0-9]{3,9}"), Guide("json"), Guide("regex", "(")]),
        "bad_words": st.just(("return",)),
    },
)


def answered(client: Client, arguments: dict) -> tuple[tuple, list[float]]:
    """All that a caller gets of one stream, whatever increments it came in, and its log probabilities.

    The last bits of those depend on how many threads of the engine had a core. Of the times, only that they are there.
    """
    try:
        stream = client.generate(**{"temperature": 0.0, "seed": 7} | arguments, timings=True)
        deltas = list(stream)
    except TridentError as error:
        return (type(error), str(error).replace("ensemble_packed", "ensemble")), []
    whole = join(deltas, stream.request_id)
    if (timings := whole.timings) is not None:
        times = astuple(timings)
        assert 0 not in times and list(times[:4]) == sorted(times[:4])
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    numbers = [*whole.log_probs, *(value for position in whole.top_log_probs for _, value in position)]
    likeliest = [[id for id, _ in position] for position in whole.top_log_probs]
    plain = dataclasses.replace(
        whole, timings=None, request_id="", ttft_s=None, total_s=0.0, log_probs=(), top_log_probs=()
    )
    return (plain, timings is None, likeliest, max(delta.prompt_ids for delta in deltas), stream.tokens), numbers


def test_the_packed_ensemble_says_what_the_ensemble_says(replica):
    both = [Client(replica.grpc_url, model=model, retry=NO_RETRY) for model in ("ensemble", packed_delta.MODEL)]

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(prompt=st.sampled_from(PROMPTS), options=OPTIONS)
    def equal(prompt: dict, options: dict) -> None:
        (said, numbers), (packed, packed_numbers) = (answered(client, options | prompt) for client in both)
        assert said == packed and numbers == pytest.approx(packed_numbers, abs=1e-4)

    with both[0], both[1]:
        for prompt in PROMPTS:  # so that the first one finds as much in the prefix cache as the second one
            answered(both[0], {"max_tokens": 1} | prompt)
        equal()


async def test_a_client_that_leaves_the_packed_ensemble_frees_the_engine(replica):
    before = ended(await until_idle(replica), "cancelled")
    with halted(replica):
        async with AsyncClient(replica.grpc_url, model=packed_delta.MODEL, retry=NO_RETRY) as client:
            stream = client.open(build(PROMPT, max_tokens=400, ignore_eos=True))
            reading = asyncio.ensure_future(anext(aiter(stream)))
            await until(replica, lambda page: requests(page, "active") == 1)
            reading.cancel()
            await stream.aclose()
        await until(replica, lambda page: ended(page, "cancelled") == before + 1)
    await until_idle(replica)
