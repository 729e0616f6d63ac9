"""The types that several tables of rules share."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from gateway.config.rules import RedisUrl


@pytest.mark.parametrize("url", ["", "redis://h:1/0", "rediss://:secret@[::1]:6379", "unix:///run/redis.sock?db=1"])
def test_a_redis_url_is_taken_as_it_is(url: str):
    assert TypeAdapter(RedisUrl).validate_python(url) == url


@pytest.mark.parametrize(
    "url", ["redis://", "h:1", "redis://h:abc", "redis://h:99999", "redis://[::1", "unix:///p?db=x"]
)
def test_a_redis_url_that_cannot_be_read_is_refused(url: str):
    with pytest.raises(ValidationError, match="must be a URL"):
        TypeAdapter(RedisUrl).validate_python(url)
