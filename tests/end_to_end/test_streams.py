"""What a stream says: stop strings and ids, log probabilities, order and ends, and whose it is."""

from __future__ import annotations

import asyncio

import pytest
import tokenizers
import tritonclient.grpc.aio as triton
from triton_requests import Answer, ask, metric, responses, take

from tests.end_to_end.watching import TRIES, idle, until, until_idle

PROMPT = "def fibonacci(n):\n"
BASE = {"text_input": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}


@pytest.fixture
async def client(replica):
    async with triton.InferenceServerClient(replica.grpc_url) as connection:
        yield connection


@pytest.fixture(scope="module")
def tokenizer(engine_dir):
    return tokenizers.Tokenizer.from_file(str(engine_dir / "tokenizer.json"))


async def test_the_pieces_join_to_what_the_tokenizer_makes_of_all_ids(client, tokenizer):
    for inputs in ({}, {"temperature": 1.5, "seed": 3}, {"temperature": 1.5, "seed": 4, "skip_special_tokens": False}):
        answer = await ask(client, {**BASE, "max_tokens": 200, **inputs})
        skip = inputs.get("skip_special_tokens", True)
        assert answer.text == tokenizer.decode(answer.ids, skip_special_tokens=skip)


async def test_every_place_of_the_text_can_be_a_stop_string_and_none_of_it_leaks(client):
    whole = (await ask(client, BASE)).text

    async def stops_at(start: int) -> None:
        stop = whole[start : start + 6]
        for stream in (True, False):
            answer = await ask(client, {**BASE, "stream": stream, "stop_words": ["never in it", stop]})
            assert answer.text == whole[: whole.index(stop)]
            assert answer.finish_reasons == ["stop"]
            assert answer.outputs["stop_reason"].item().decode() == stop
        kept = await ask(client, {**BASE, "stop_words": [stop], "include_stop_in_output": True})
        assert kept.text == whole[: whole.index(stop) + 6]

    await asyncio.gather(*map(stops_at, range(0, len(whole) - 6, 7)))


async def test_a_stop_string_stops_the_engine_and_not_only_the_text(client, replica):
    stop = (await ask(client, BASE)).text[10:16]
    for stream in (True, False):
        for _ in range(TRIES):  # a detokenizer that stands still finds the stop string when all tokens are made
            before = await until_idle(replica)
            answer = await ask(client, {**BASE, "max_tokens": 900, "stop_words": [stop], "stream": stream})
            used = answer.outputs["num_output_tokens"].item()

            def counted(page, before=before, used=used) -> bool:
                return idle(page) and tokens(page) - tokens(before) >= used

            made = tokens(await until(replica, counted)) - tokens(before)
            if made < 900:
                break
        assert used < 60 and made < 900


def tokens(page) -> int:
    return int(metric(page, "trident_output_tokens_total"))


async def test_min_tokens_holds_off_stop_strings_and_end_ids(client, tokenizer):
    whole = await ask(client, BASE)
    stop = whole.text[:4]
    answer = await ask(client, {**BASE, "stop_words": [stop], "min_tokens": 30})
    assert answer.outputs["num_output_tokens"].item() > 30 or answer.finish_reasons == ["length"]
    assert answer.text[: len(stop)] == stop
    end_id = whole.ids[3]
    early = await ask(client, {**BASE, "ignore_eos": False, "end_id": end_id})
    late = await ask(client, {**BASE, "ignore_eos": False, "end_id": end_id, "min_tokens": 10})
    assert len(early.ids) <= 4 and early.finish_reasons == ["stop"] and early.ids[-1] == end_id
    assert len(late.ids) >= 10


async def test_a_stop_id_ends_the_output_and_is_not_part_of_its_text(client):
    whole = await ask(client, BASE)
    stop_id = whole.ids[5]
    answer = await ask(client, {**BASE, "stop_token_ids": [stop_id], "return_log_probs": True})
    before = await ask(client, {**BASE, "max_tokens": whole.ids.index(stop_id)})
    assert answer.ids == [*before.ids, stop_id] and answer.text == before.text
    assert answer.finish_reasons == ["stop"]
    assert answer.outputs["stop_reason"].item().decode() == str(stop_id)
    assert answer.outputs["num_output_tokens"].item() == len(answer.ids) == len(answer.log_probs)


@pytest.mark.parametrize("stream", [True, False])
async def test_log_probs_line_up_with_the_ids_of_their_response(client, stream):
    inputs = {**BASE, "stream": stream, "return_log_probs": True, "num_top_log_probs": 4}
    answer = Answer()
    async for result, error in responses(client, inputs):
        assert not error
        take(answer, result)
        ids, log_probs = result.as_numpy("output_ids"), result.as_numpy("output_log_probs")
        if ids is not None and ids.size:
            assert log_probs.shape == (1, 1, ids.size)
            top_ids, top = result.as_numpy("top_log_probs_ids"), result.as_numpy("top_log_probs")
            assert top_ids.shape == top.shape == (1, ids.size, 4)
            # Greedy: the chosen id is the likeliest, and its log probability is the first of the list.
            assert top_ids[0, :, 0].tolist() == ids[0].tolist()
            assert top[0, :, 0].tolist() == log_probs[0, 0].tolist()
            assert (top[:, :, :-1] >= top[:, :, 1:]).all()
    assert len(answer.log_probs) == len(answer.ids) == 60
    assert answer.outputs["cum_log_probs"].item() == pytest.approx(sum(answer.log_probs), rel=1e-4)
    plain = await ask(client, {**BASE, "return_log_probs": True})
    assert plain.log_probs == pytest.approx(answer.log_probs, abs=1e-3)


async def test_log_probs_are_cut_where_a_stop_string_matches(client):
    whole = await ask(client, BASE)
    stop = whole.text[8:13]
    answer = await ask(client, {**BASE, "stop_words": [stop], "return_log_probs": True})
    assert len(answer.log_probs) == len(answer.ids) == answer.outputs["num_output_tokens"].item()


async def test_streams_under_one_request_id_or_a_hostile_one_never_mix(client):
    prompts = [f"def function_{index}(x):\n" for index in range(5)]
    alone = {prompt: (await ask(client, {**BASE, "text_input": prompt})).text for prompt in prompts}
    ids = ["", "same", "x" * 65_536, "\n{}\"'; drop", "☃" * 100]
    work = [(prompt, request_id) for prompt in prompts for request_id in ids]
    answers = await asyncio.gather(
        *[ask(client, {**BASE, "text_input": prompt}, request_id=request_id) for prompt, request_id in work]
    )
    for (prompt, _), answer in zip(work, answers, strict=True):
        assert answer.error == ""
        assert answer.text == alone[prompt]


async def test_every_stream_has_exactly_one_end_under_load(client):
    answers = await asyncio.gather(*[ask(client, {**BASE, "max_tokens": 1 + index % 7}) for index in range(150)])
    for index, answer in enumerate(answers):
        assert answer.finals == 1
        assert answer.finish_reasons == ["length"]
        assert len(answer.ids) == answer.outputs["num_output_tokens"].item() == 1 + index % 7


async def test_the_prompt_comes_first_when_it_is_asked_for(client):
    plain = await ask(client, {**BASE, "stream": False})
    for stream in (True, False):
        echoed = await ask(client, {**BASE, "stream": stream, "exclude_input_in_output": False})
        assert echoed.text == PROMPT + plain.text
        assert echoed.outputs["num_output_tokens"].item() == 60
