"""Who shares an answer with whom, which requests take part, and what is kept. The model here is a small program that
finds texts alike by the words they share; the real one is in test_semantic_cache_real_model."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cachetools")
from prometheus_client import CollectorRegistry

from contract.errors import InvalidArgument
from contract.generation import FinishReason, GenerationRequest, SamplingParams, TokenDelta
from gateway.cache import paraphrase
from gateway.cache.embedding import MAX_WAITING, EmbeddingThread
from gateway.cache.semantic_cache import Entry, SemanticCache, Shelf, Understood, configured
from gateway.config.settings import Settings
from tests.gateway import tiny_bert
from tests.gateway.scripted_source import words

ANSWER = tuple(words(3))
ASKED, AGAIN = "How do I sort a list?", "Could you tell me how to sort a list, please?"
GREEDY = SamplingParams(temperature=0.0)


class BagOfWords:
    """An encoder whose texts are alike as far as they share words. ``gate`` holds it up, ``broken`` breaks it."""

    dimensions = 64

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.embedded = 0

    def token_ids(self, text: str) -> list[int] | None:
        ids = [zlib.crc32(word.encode()) % 64 for word in text.lower().replace("?", "").split()]
        return None if "☃" in text else ids

    def embed(self, token_ids: list[int]) -> np.ndarray:
        self.gate.wait(30)
        if self.broken:
            raise RuntimeError("the model broke")
        self.embedded += 1
        vector = np.bincount(token_ids, minlength=64).astype(np.float32)
        return vector / np.linalg.norm(vector)


class Made:
    """A cache and what it was made of."""

    def __init__(self, clock: Any, **settings: Any) -> None:
        self.encoder, self.registry, self.clock = BagOfWords(), CollectorRegistry(), clock
        self.thread = EmbeddingThread(self.encoder)  # type: ignore[arg-type]
        values = {"threshold": 0.3, "ttl_s": 60.0, "max_entries": 100, "max_bytes": 10**6, "timeout_s": 20.0}
        values |= {"exclude": "", "clock": clock, "registry": self.registry}
        self.cache = SemanticCache(self.thread, **values | settings)

    async def put(self, text: str = ASKED, *, tenant: str = "a", engine: str = "e", **more: Any) -> bool:
        carrier, answer = more.pop("carrier", {}), more.pop("answer", ANSWER)
        return await self.cache.put(chat(text, **more), tenant, engine, answer, carrier)

    async def hit(self, text: str = AGAIN, *, tenant: str = "a", engine: str = "e", **more: Any) -> bool:
        carrier = more.pop("carrier", {})
        return await self.cache.get(chat(text, **more), tenant, engine, carrier) is not None

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"trident_gateway_semantic_cache_{name}", labels) or 0.0


@pytest.fixture
def made(clock: Any) -> Iterator[Made]:
    made = Made(clock)
    yield made
    made.encoder.gate.set()
    made.cache.close()


def chat(text: Any, *, system: str = "Be kind.", **more: Any) -> GenerationRequest:
    sampling = more.pop("sampling", GREEDY)
    messages = ({"role": "system", "content": system}, {"role": more.pop("role", "user"), "content": text})
    return GenerationRequest(**{"messages": messages, "sampling": sampling} | more)


async def test_another_wording_gets_the_answer_with_its_likeness_and_age(made: Made) -> None:
    assert not await made.hit() and await made.put()
    made.clock.advance(12.5)
    hit = await made.cache.get(chat(AGAIN, request_id="r", stream=False, timeout_s=3.0), "a", "e", {})
    assert hit is not None and hit.answer == ANSWER and hit.age_s == 12.5
    expected = {"x-trident-cache": "semantic", "x-trident-cache-similarity": f"{hit.similarity:.4f}", "age": "12"}
    assert hit.headers == expected and 0.3 <= hit.similarity < 1.0
    assert made.counted("lookups_total", result="hit") == made.counted("lookups_total", result="miss") == 1
    assert made.counted("entries") == 1 and made.counted("bytes") > 0 and made.counted("lookup_seconds_count") == 2


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "b"},
        {"engine": "f"},
        {"system": "Be rude."},
        {"max_tokens": 7},
        {"stop": ("x",)},
        {"json_schema": "{}"},
        {"sampling": dataclasses.replace(GREEDY, seed=1)},
        {"sampling": dataclasses.replace(GREEDY, repetition_penalty=1.1)},
    ],
)
async def test_nothing_is_shared_where_anything_but_the_wording_differs(made: Made, other: dict[str, Any]) -> None:
    assert await made.put() and await made.hit()
    assert not await made.hit(**other) and not await made.hit(ASKED, **other)


async def test_an_earlier_turn_is_not_matched_by_its_meaning(made: Made) -> None:
    def told(first: str) -> GenerationRequest:
        turns = (("user", first), ("assistant", "Yes."), ("user", ASKED))
        messages = tuple({"role": role, "content": text} for role, text in turns)
        return GenerationRequest(messages=messages, sampling=GREEDY)

    await made.cache.put(told("I use Python"), "a", "e", ANSWER, {})
    assert await made.cache.get(told("I use Python"), "a", "e", {}) is not None
    assert await made.cache.get(told("I use python"), "a", "e", {}) is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"carrier": {"x-trident-cache": "off"}}, "header"),
        ({"carrier": {"cache-control": "max-age=9, No-Store"}}, "header"),
        ({"sampling": SamplingParams()}, "sampled"),
        ({"sampling": dataclasses.replace(GREEDY, log_probs=True)}, "prompt_in_answer"),
        ({"echo": True}, "prompt_in_answer"),
        ({"messages": None, "text_input": ASKED}, "completion"),
        ({"role": "assistant"}, "last_turn"),
        ({"text": [{"type": "text", "text": ASKED}]}, "last_turn"),
        ({"text": " \n"}, "last_turn"),
        ({"text": "how " * 251}, "long"),
        ({"text": "How do I sort SECRET lists?"}, "rule"),
        ({"text": "How do I sort today's list?"}, "of_the_moment"),
    ],
)
async def test_what_takes_no_part_is_neither_kept_nor_looked_up(clock: Any, asked: dict[str, Any], reason: str) -> None:
    made = Made(clock, exclude=r"\bsecret\b")
    text = asked.pop("text", ASKED)
    assert not await made.put(text, **asked) and not await made.hit(text, **asked)
    assert made.counted("excluded_total", reason=reason) == made.counted("lookups_total", result="excluded") == 1
    assert made.encoder.embedded == 0 and made.counted("entries") == 0
    made.cache.close()


async def test_a_text_the_model_cannot_read_takes_no_part(made: Made) -> None:
    assert not await made.put("How do I sort ☃?") and not await made.hit("How do I sort ☃?")
    assert made.counted("excluded_total", reason="unreadable") == 1


async def test_seeded_sampling_takes_part(made: Made) -> None:
    seeded = SamplingParams(seed=3)
    assert await made.put(sampling=seeded) and await made.hit(sampling=seeded)


async def test_a_caller_may_ask_for_a_fresh_answer_or_one_of_some_age(made: Made) -> None:
    await made.put(carrier={"cache-control": "no-cache"})
    made.clock.advance(30)
    assert not await made.hit(carrier={"cache-control": "no-cache"})
    assert not await made.hit(carrier={"cache-control": "private, max-age=30"})
    assert await made.hit(carrier={"cache-control": "max-age=31"})


async def test_an_answer_is_good_for_its_time(made: Made) -> None:
    await made.put()
    made.clock.advance(59.9)
    assert await made.hit()
    made.clock.advance(0.1)
    assert not await made.hit()
    await made.put("What is a tuple?")
    assert made.counted("entries") == 2
    made.clock.advance(0.1)
    await made.put("What is a set?")
    assert made.counted("entries") == 2, "what is too old left"


@pytest.mark.parametrize("answer", [(), tuple(words(3, None)), (TokenDelta(finish_reason=FinishReason.CANCELLED),)])
async def test_only_a_whole_answer_is_kept(made: Made, answer: tuple[TokenDelta, ...]) -> None:
    assert not await made.put(answer=answer) and made.counted("entries") == 0


async def test_the_same_text_again_replaces_its_answer(made: Made) -> None:
    await made.put()
    await made.put(answer=ANSWER[1:])
    assert made.counted("entries") == 1
    hit = await made.cache.get(chat(AGAIN), "a", "e", {})
    assert hit is not None and hit.answer == ANSWER[1:]


@pytest.mark.parametrize(
    "near", ["How do I sort 3 lists?", "How do I not sort a list?", "How do I sort a file?", "When do I sort a list?"]
)
async def test_a_near_miss_is_a_miss(made: Made, near: str) -> None:
    await made.put()
    assert not await made.hit(near) and made.counted("lookups_total", result="miss") == 1


async def test_a_text_is_embedded_once_for_its_lookup_and_its_keeping(made: Made) -> None:
    await made.hit(ASKED)
    await made.put(ASKED)
    assert made.encoder.embedded == 1
    await made.hit(ASKED, tenant="b")
    assert made.encoder.embedded == 2, "another tenant's lookup must not be faster for it"


async def test_a_slow_model_is_a_miss(clock: Any) -> None:
    made = Made(clock, timeout_s=0.01)
    made.encoder.gate.clear()
    assert not await made.hit() and not await made.put()
    assert made.counted("lookups_total", result="late") == 1
    made.encoder.gate.set()
    made.cache.close()


async def test_a_model_that_fails_is_a_miss_and_so_is_one_that_was_closed(made: Made) -> None:
    made.encoder.broken = True
    assert not await made.hit() and not await made.put()
    made.encoder.broken = False
    made.cache.close()
    assert not await made.hit() and made.counted("lookups_total", result="late") == 2


async def test_no_more_wait_for_the_model_than_may(made: Made) -> None:
    made.encoder.gate.clear()
    waiting = [asyncio.ensure_future(made.hit(f"What is number {n}?")) for n in range(MAX_WAITING + 5)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert made.counted("lookups_total", result="late") == 5
    for task in waiting[1:]:
        task.cancel()
    await asyncio.gather(*waiting[1:], return_exceptions=True)
    made.encoder.gate.set()
    await waiting[0]
    assert await made.put() and made.encoder.embedded == 2, "who left before its turn costs nothing"


async def test_a_tenants_flood_leaves_the_others_answers(clock: Any) -> None:
    made = Made(clock, max_entries=3)
    await made.put(tenant="b")
    for number in range(9):
        await made.put(f"What is {number}?")
    assert await made.hit(tenant="b") and made.counted("entries") == 4
    made.cache.close()


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"threshold": 0.0}, r"threshold: got 0.0; allowed is a number in \(0, 1\]"),
        ({"threshold": float("nan")}, "threshold: got nan"),
        ({"ttl_s": 0.0}, "ttl_s: got 0.0; allowed is more than 0"),
        ({"max_entries": 0}, "max_entries: got 0"),
        ({"max_bytes": -1}, "max_bytes: got -1"),
        ({"exclude": "("}, r"exclude: got '\('; it is no regular expression"),
    ],
)
def test_a_setting_that_cannot_be_is_named(clock: Any, setting: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        Made(clock, **setting)


async def test_the_settings_open_a_cache_over_a_real_folder(clock: Any, tmp_path: Path) -> None:
    tiny_bert.write(tmp_path)
    assert configured(Settings(), clock, CollectorRegistry()) is None, "off unless a model is named"
    settings = Settings.from_environment(
        {"TRIDENT_GATEWAY_SEMANTIC_MODEL": str(tmp_path), "TRIDENT_GATEWAY_SEMANTIC_TIMEOUT_S": "20"}
    )
    cache = configured(settings, clock, CollectorRegistry())
    assert cache is not None
    assert await cache.put(chat("How is a list sort"), "a", "e", ANSWER, {})
    assert await cache.get(chat("How is the list sort"), "a", "e", {}) is not None
    cache.close()


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("MODEL", "/nowhere", "SEMANTIC_MODEL: there is no folder /nowhere, and it is no hub id"),
        ("EXCLUDE", "(", "SEMANTIC_EXCLUDE: got '\\('; it is no regular expression"),
        ("THRESHOLD", "0.2", "SEMANTIC_THRESHOLD: got 0.2; allowed is 0.5 to 1"),
        ("MAX_ENTRIES", "0", "SEMANTIC_MAX_ENTRIES: got 0; allowed is 1 to 100000"),
    ],
)
def test_a_variable_that_cannot_be_is_named(clock: Any, tmp_path: Path, name: str, value: str, complaint: str) -> None:
    tiny_bert.write(tmp_path)
    environ = {"TRIDENT_GATEWAY_SEMANTIC_MODEL": str(tmp_path), f"TRIDENT_GATEWAY_SEMANTIC_{name}": value}
    with pytest.raises(InvalidArgument, match=complaint):
        configured(Settings.from_environment(environ), clock, CollectorRegistry())


def entry(text: str, scope: str, size: int, at_s: float) -> Entry:
    vector = np.zeros(8, np.float32)
    vector[zlib.crc32(text.encode()) % 8] = 1.0
    answer = (TokenDelta(text="x" * size, finish_reason=FinishReason.STOP),)
    return Entry(scope, text, Understood(paraphrase.gist(text), vector), answer, at_s, at_s)


STEPS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("st"), st.integers(0, 4000)), max_size=60)


@given(STEPS, st.integers(1, 6), st.integers(1500, 9000))
def test_a_shelf_keeps_within_its_bounds_and_gives_what_it_holds(
    steps: list[tuple[str, str, int]], max_entries: int, max_bytes: int
) -> None:
    shelf = Shelf(max_entries, max_bytes, 8)
    model: dict[tuple[str, str], Entry] = {}  # the least recently used first
    for at_s, (text, scope, size) in enumerate(steps):
        new = entry(text, scope, size, at_s)
        model = {place: old for place, old in model.items() if place != (scope, text) and old.kept_s >= at_s - 20}
        assert shelf.add(new, at_s - 20) == (new.bytes <= max_bytes)
        if new.bytes <= max_bytes:
            while len(model) >= max_entries or sum(old.bytes for old in model.values()) + new.bytes > max_bytes:
                del model[next(iter(model))]
            model[scope, text] = new
        assert len(shelf) == len(model) and shelf.bytes == sum(old.bytes for old in model.values())
        for (scope_, text_), kept in model.items():
            found = shelf.alike(scope_, kept.understood.vector, 0.9)
            assert (1.0, kept) in found and all(other.scope == scope_ for _, other in found), text_
