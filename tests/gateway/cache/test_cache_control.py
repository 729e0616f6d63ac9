"""Which headers keep a request out of the caches, and how old a response they accept."""

from __future__ import annotations

import pytest

from gateway.cache.cache_control import CacheControl

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
