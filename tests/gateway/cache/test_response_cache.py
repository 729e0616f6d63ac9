"""Whole answers only, for a time, within a size."""

from __future__ import annotations

from typing import Any

import pytest

from contract.generation import FinishReason
from gateway.cache.response_cache import CacheControl, ResponseCache, answer_bytes
from tests.gateway.scripted_source import words

ANSWER = tuple(words(3))


def test_an_answer_comes_back_as_it_was_until_its_time_is_over(clock: Any) -> None:
    cache = ResponseCache(10**6, 60, clock)
    assert cache.get("k") is None and cache.put("k", ANSWER)
    clock.advance(59)
    assert cache.get("k") == ANSWER
    clock.advance(1)
    assert cache.get("k") is None


@pytest.mark.parametrize("end", [None, FinishReason.CANCELLED, FinishReason.ERROR])
def test_an_answer_without_an_end_of_its_own_is_not_kept(clock: Any, end: FinishReason | None) -> None:
    cache = ResponseCache(10**6, 60, clock)
    assert not cache.put("k", tuple(words(3, end))) and not cache.put("k", ()) and not cache._answers


def test_the_least_recently_used_goes_first_and_the_size_holds(clock: Any) -> None:
    cache = ResponseCache(3 * answer_bytes(ANSWER), 60, clock)
    for key in "abc":
        cache.put(key, ANSWER)
    cache.get("a")
    cache.put("d", ANSWER)
    assert [cache.get(key) is not None for key in "abcd"] == [True, False, True, True]
    assert cache._answers.currsize == 3 * answer_bytes(ANSWER)
    assert not cache.put("huge", tuple(words(100)))


def test_a_caller_may_ask_for_one_that_is_not_old(clock: Any) -> None:
    cache = ResponseCache(10**6, 60, clock)
    cache.put("k", ANSWER)
    clock.advance(10)
    assert cache.get("k", 9.0) is None and cache.get("k", 10.0) == ANSWER


FOREVER = float("inf")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, CacheControl(True, FOREVER)),
        ({"x-trident-cache": " OFF "}, CacheControl(False, FOREVER)),
        ({"x-trident-cache": "on"}, CacheControl(True, FOREVER)),
        ({"cache-control": "private, No-Store"}, CacheControl(False, FOREVER)),
        ({"cache-control": "no-storage"}, CacheControl(True, FOREVER)),
        ({"cache-control": "no-cache"}, CacheControl(True, 0.0)),
        ({"cache-control": "no-cache, max-age=9"}, CacheControl(True, 0.0)),
        ({"cache-control": "private,max-age=30"}, CacheControl(True, 30.0)),
        ({"cache-control": "s-max-age=30"}, CacheControl(True, FOREVER)),
        ({"cache-control": "max-age=9999999999"}, CacheControl(True, FOREVER)),
    ],
)
def test_the_headers_say_what_the_caches_may_do(headers: dict[str, str], expected: CacheControl) -> None:
    assert CacheControl.from_headers(headers) == expected
