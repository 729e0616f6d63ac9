"""Documents of two processes: no change is lost, in SQLite and in Redis."""

from __future__ import annotations

import asyncio

import pytest

from contract.errors import InvalidArgument
from gateway.admission.shared_state import SharedState
from gateway.identity.key_store import FileDocuments, RedisDocuments


def more(body: bytes) -> tuple[bytes, int]:
    return body + b"x", len(body)


async def check_no_change_is_lost(one, other):
    assert await one.read("a") == b""
    before = await asyncio.gather(*(each.change("a", more) for each in (one, other) * 5))
    assert sorted(before) == list(range(10))
    assert await one.read("a") == await other.read("a") == b"x" * 10 and await other.read("b") == b""


async def test_no_change_of_a_file_is_lost(tmp_path):
    one, other = FileDocuments(tmp_path / "d"), FileDocuments(tmp_path / "d")
    await check_no_change_is_lost(one, other)

    def refused(body: bytes) -> tuple[bytes, None]:
        raise InvalidArgument("a", "must not")

    with pytest.raises(InvalidArgument):
        await one.change("a", refused)
    assert len(await one.read("a")) == 10
    one.close()
    other.close()


async def test_no_change_in_redis_is_lost(redis_socket):
    one, other = SharedState(f"unix://{redis_socket}"), SharedState(f"unix://{redis_socket}")
    await one.redis.flushall()
    await check_no_change_is_lost(RedisDocuments(one), RedisDocuments(other))
    await asyncio.gather(one.close(), other.close())
