"""Prompts in tokens before an engine has counted them."""

from __future__ import annotations

import asyncio
import base64
import math
import random
import threading
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import InvalidArgument, Overloaded
from contract.generation import GenerationRequest, Usage
from gateway.admission import prompt_tokens
from gateway.admission.budget_store import MemoryStore
from gateway.admission.concurrency import Concurrency
from gateway.admission.fair_admission import FairAdmission
from gateway.admission.prompt_tokens import TEMPLATE_TOKENS, PromptTokens, load_tokenizer
from gateway.config.tenant import Level, Limits, Tenant
from tests.gateway.admission.one_pool import OnePool

TOKENIZER = Path(__file__).resolve().parents[3] / "build" / "demo_model" / "checkpoint" / "tokenizer.json"
ENGLISH = "the quick brown fox jumps over the lazy dog while nobody watches from afar "
SALAD = base64.b64encode(random.Random(0).randbytes(6000)).decode()
TENANT = Tenant("acme/r", levels=(Level("acme/r", Limits(8000)),))


def generation_request(text: str, max_tokens: int = 100) -> GenerationRequest:
    return GenerationRequest(text, max_tokens=max_tokens)


def new_admission(clock, tokenizer: tokenizers.Tokenizer | None = None) -> tuple[FairAdmission, MemoryStore]:
    budgets = MemoryStore(clock)
    admission = FairAdmission(budgets, Concurrency(1000), clock, pools=OnePool(), rng=random.Random(1))
    admission.prompt_tokens = PromptTokens(tokenizer)
    return admission, budgets


async def left(budgets: MemoryStore) -> float:
    return (await budgets.reserve(TENANT.levels, 0)).standings[0].balance


@pytest.fixture
def tokenizer() -> tokenizers.Tokenizer:
    return load_tokenizer(TOKENIZER)


async def test_a_prompt_of_2500_words_fits_a_budget_of_8000_and_four_of_1000_fit_together(clock) -> None:
    admission, _ = new_admission(clock)
    permit = await admission.admit([generation_request((ENGLISH * 200)[:14_611])], TENANT)
    permit.settle(None)
    held = [await admission.admit([generation_request((ENGLISH * 100)[:5_844])], TENANT) for _ in range(4)]
    assert len(held) == 4


@pytest.mark.parametrize(("text", "least"), [("日本語の文章" * 300, 1.0), ("🐟🦆" * 300, 1.0), (SALAD, 1 / 2)])
def test_what_tokenises_badly_is_estimated_higher_than_prose(text: str, least: float) -> None:
    units = len(text) if not text.isascii() else len(text.encode())
    assert PromptTokens().estimate(generation_request(text)).tokens >= least * units
    prose = PromptTokens().estimate(generation_request(ENGLISH * 50)).tokens
    assert prose <= len(ENGLISH) * 50 / 3


@given(st.text(max_size=300), st.booleans())
def test_an_estimate_is_never_more_than_a_token_for_each_byte_and_the_template(text: str, chat: bool) -> None:
    messages = ({"role": "user", "content": text},)
    request = GenerationRequest(messages=messages) if chat else GenerationRequest(text)
    count = PromptTokens().estimate(request)
    length = len(text.encode(errors="surrogatepass"))
    assert count.least <= count.tokens <= length + TEMPLATE_TOKENS * (2 if chat else 1)
    assert count.likely <= count.tokens


async def test_ids_are_counted_and_a_truncated_prompt_is_never_more_than_what_is_kept(tokenizer) -> None:
    for counting in (PromptTokens(), PromptTokens(tokenizer)):
        ids = GenerationRequest(input_ids=(7,) * 900, max_tokens=10)
        assert (await counting.need([ids, ids], "t")).tokens == 920
        for text in ("word " * 500, "word " * 100_000):
            kept = GenerationRequest(text, truncate_prompt_tokens=50)
            [count] = (await counting.need([kept], "t")).counts
            assert (count.tokens, count.likely) == (50, 50) and count.least <= 50
            fits = GenerationRequest(text, truncate_prompt_tokens=-1)
            assert (await counting.need([fits], "t")).counts[0].least == 1
        counting.close()


def test_a_tenants_estimate_rises_at_once_falls_slowly_and_is_its_own() -> None:
    learned = PromptTokens()
    first = learned.estimate(generation_request(SALAD), "bad")
    learned.learn("bad", first, len(SALAD))
    after = learned.estimate(generation_request(SALAD), "bad").tokens
    assert after >= len(SALAD)
    prose = PromptTokens().estimate(generation_request(ENGLISH * 50)).tokens
    assert learned.estimate(generation_request(ENGLISH * 50), "bad").tokens > 1.2 * prose
    learned.learn("good", learned.estimate(generation_request(ENGLISH * 200), "good"), 200 * 15)
    prose = [learned.estimate(generation_request(ENGLISH * 50), name).tokens for name in ("good", "bad")]
    assert prose[0] < prose[1]
    for _ in range(200):
        learned.learn("bad", learned.estimate(generation_request(ENGLISH * 200), "bad"), 200 * 15)
    settled = learned.estimate(generation_request(ENGLISH * 50), "bad").tokens - TEMPLATE_TOKENS
    assert 50 * 15 <= settled <= 50 * 15 * 1.2


async def test_a_budget_owes_what_was_estimated_too_low_and_pays_it_back(clock) -> None:
    admission, budgets = new_admission(clock)
    permit = await admission.admit([generation_request(ENGLISH * 200)], TENANT)
    permit.settle(Usage(9_000, 100))
    assert await left(budgets) == 8000 - 9_100
    with pytest.raises(Overloaded, match="acme/r has 0 tokens left") as refused:
        await admission.admit([generation_request("Hello", 1)], TENANT)
    assert refused.value.retry_after_s >= 1_100 / (8000 / 60)
    clock.advance(1_200 / (8000 / 60))
    await admission.admit([generation_request("Hello", 1)], TENANT)


@given(st.lists(st.tuples(st.integers(100, 6000), st.floats(0.1, 1.0), st.floats(0, 20)), min_size=5, max_size=60))
def test_over_time_no_more_is_spent_than_capacity_rate_and_what_runs(requests: list[tuple[int, float, float]]) -> None:
    """Whatever prompts turn out to be, up to a token for each byte."""

    class Clock:
        now_s = 0.0

        def __call__(self) -> float:
            return self.now_s

    async def play() -> None:
        clock = Clock()
        admission, _ = new_admission(clock)
        spent, largest = 0.0, 0.0
        for length, ratio, pause_s in requests:
            request, used = generation_request(SALAD[:length], 10), math.ceil(length * ratio)
            try:
                permit = await admission.admit([request], TENANT)
            except Overloaded:
                clock.now_s += pause_s
                continue
            spent += used
            largest = max(largest, used)
            permit.settle(Usage(used, 0))
            admission.prompt_tokens.learn(TENANT.name, permit.counts[0], used)
            assert spent <= 8000 + 8000 / 60 * clock.now_s + largest
            clock.now_s += pause_s

    asyncio.run(play())


async def test_only_what_can_really_never_fit_is_an_invalid_argument(clock, tokenizer) -> None:
    admission, budgets = new_admission(clock)
    with pytest.raises(InvalidArgument, match="more than acme/r may ever use at once"):
        await admission.admit([generation_request("Hello", 8000)], TENANT)
    await budgets.reserve(TENANT.levels, 100)
    for _ in range(2):  # the estimate is above the budget; it may still be wrong
        with pytest.raises(Overloaded, match="may need 8000") as refused:
            await admission.admit([generation_request(SALAD + SALAD)], TENANT)
        assert refused.value.retry_after_s > 0
    counted, _ = new_admission(clock, tokenizer)
    with pytest.raises(InvalidArgument, match="more than acme/r may ever use at once"):
        await counted.admit([generation_request(SALAD * 3)], TENANT)
    clock.advance(1000)
    full, _ = new_admission(clock)
    await full.admit([generation_request(SALAD + SALAD)], TENANT)


@pytest.mark.parametrize("text", ["Hello there", ENGLISH * 100, "日本語\n" * 500, SALAD])
async def test_with_the_models_tokenizer_prompts_are_counted(text: str, tokenizer) -> None:
    known = len(tokenizer.encode(text, add_special_tokens=False))
    need = await PromptTokens(tokenizer).need([generation_request(text)], "acme")
    assert need.counts[0].size == need.least - 100 == known and need.tokens == known + TEMPLATE_TOKENS + 100
    chat = GenerationRequest(messages=({"role": "user", "content": f"  {text}  "},), max_tokens=100)
    need = await PromptTokens(tokenizer).need([chat], "acme")
    assert need.tokens == len(tokenizer.encode(text.strip(), add_special_tokens=False)) + 2 * TEMPLATE_TOKENS + 100


async def test_choices_of_one_prompt_count_it_once(tokenizer) -> None:
    for tokens in (PromptTokens(), PromptTokens(tokenizer)):
        request = generation_request(ENGLISH * 10)
        one, three = await tokens.need([request], "a"), await tokens.need([request] * 3, "a")
        assert three.tokens == one.tokens + 200 and three.least == one.least + 200 and len(three.counts) == 3


async def test_long_prompts_are_counted_beside_the_event_loop(tokenizer) -> None:
    class Watched:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
            threads.add(threading.current_thread())
            return tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    threads: set[threading.Thread] = set()
    counted = PromptTokens(Watched())
    await counted.need([generation_request(ENGLISH * 100)], "a")
    assert threading.main_thread() not in threads and threads
    threads.clear()
    assert (
        not (await counted.need([generation_request("x" * (prompt_tokens.MOST_COUNTED + 1))], "a")).counts[0].exact
        and not threads
    )


async def test_the_event_loop_turns_while_a_long_prompt_is_counted(tokenizer) -> None:
    counting = asyncio.ensure_future(PromptTokens(tokenizer).need([generation_request(ENGLISH * 1000)], "a"))
    turns = 0
    while not counting.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert (await counting).counts[0].size > 20_000 and turns > 3


async def test_a_count_that_takes_too_long_is_an_estimate_and_delays_no_request(monkeypatch) -> None:
    monkeypatch.setattr(prompt_tokens, "COUNTING_S", 0.02)
    gate = threading.Event()

    class Slow:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
            gate.wait(60)
            return [[1]]

    counted = PromptTokens(Slow())
    try:
        late = await asyncio.gather(*(counted.need([generation_request(ENGLISH * 100)], "a") for _ in range(8)))
        assert not any(need.counts[0].exact for need in late)
        monkeypatch.setattr(prompt_tokens, "COUNTING_S", 60.0)
        need = await counted.need(
            [generation_request(ENGLISH * 100)], "a"
        )  # both threads are taken: nothing is waited for
        assert not need.counts[0].exact
    finally:
        gate.set()
        counted.close()


async def test_a_tokenizer_of_another_model_is_found_out(tokenizer, caplog) -> None:
    counted = PromptTokens(tokenizer)
    for _ in range(3):
        count = (await counted.need([generation_request(ENGLISH * 100)], "a")).counts[0]
        assert count.exact
        counted.learn("a", count, count.size // 3)
    assert not (await counted.need([generation_request(ENGLISH * 100)], "a")).counts[0].exact
    assert "the tokenizer is not the served model's" in caplog.text


async def test_a_default_system_prompt_is_learned(tokenizer) -> None:
    counted = PromptTokens(tokenizer)
    chat = GenerationRequest(messages=({"role": "user", "content": "Hello"},), max_tokens=1)
    for _ in range(2):
        need = await counted.need([chat], "a")
        counted.learn("a", need.counts[0], 200)
    assert need.tokens == 200 + 1


async def test_a_default_system_prompt_is_learned_once_from_requests_that_run_together(tokenizer) -> None:
    counted = PromptTokens(tokenizer)
    chat = GenerationRequest(messages=({"role": "user", "content": "Hello"},), max_tokens=1)
    for _ in range(3):
        needs = [await counted.need([chat], "a") for _ in range(20)]
        counted.learn("a", PromptTokens().estimate(GenerationRequest(input_ids=(1, 2, 3), max_tokens=1)), 3)
        for need in needs:
            counted.learn("a", need.counts[0], 200)
    assert (await counted.need([chat], "a")).tokens == 200 + 1


def test_tools_and_calls_are_part_of_the_prompt():
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    request = GenerationRequest(messages=({"role": "user", "content": " hi "}, turn), tools="[1]")
    assert prompt_tokens.texts_of(request) == ["[1]", "hi", "", "[{'id': 'a'}]"]
