"""The life of keys: made, rotated with an overlap, revoked, expired, used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.errors import InvalidArgument, NotFound, Unavailable
from gateway.admission.shared_state import SharedState
from gateway.identity import stored_keys
from gateway.identity.stored_keys import FileDocuments, RedisDocuments, StoredKeys
from tests.gateway.identity.test_tokens import member
from tests.gateway.running import until

ALICE = "acme/research/alice"


class Memory:
    """Documents in memory; ``away`` is an outage."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.away = False

    async def read(self, name: str) -> bytes:
        if self.away:
            raise Unavailable("away")
        return self.bodies.get(name, b"")

    async def change(self, name, change):
        self.bodies[name], result = change(await self.read(name))
        return result

    def close(self) -> None:
        pass


async def away(name, change):
    raise Unavailable("away")


@contextlib.asynccontextmanager
async def started(documents: Any, clock) -> AsyncIterator[StoredKeys]:
    keys = StoredKeys(documents, member, clock)
    await keys.start()
    try:
        yield keys
    finally:
        await keys.close()


async def test_a_key_holds_from_its_making_to_its_end(clock):
    async with started(Memory(), clock) as keys:
        made = await keys.make(ALICE, "boss", "caller", 100.0)
        found = keys.find(made["key"])
        assert (found.role, found.name, found.tenant.name) == ("caller", f"key {ALICE} {made['id']}", "acme/research")
        assert keys.find(made["key"] + "x") is None and keys.find("") is None
        assert made["key"] not in str(await keys.described()) and "hash" not in made
        clock.advance(100)
        assert keys.find(made["key"]) is None and keys.named(ALICE) is None
        [listed] = await keys.described()
        assert (listed["state"], listed["created_by"], listed["last_used"]) == ("expired", "boss", 1000.0)


async def test_rotated_keys_overlap_and_a_revoked_one_ends_at_once(clock):
    async with started(Memory(), clock) as keys:
        first = await keys.make(ALICE, "a", "team_admin", 5000.0)
        clock.advance(10)
        second = await keys.make(ALICE, "b", None, None, 60.0)
        assert (second["role"], second["expires"]) == ("team_admin", 1000.0 + 10 + 5000)
        assert all(keys.find(one["key"]).administers == "acme/research" for one in (first, second))
        clock.advance(60)
        assert keys.find(first["key"]) is None and keys.find(second["key"])
        third = await keys.make(ALICE, "b", None, 7.0, 0.0)
        assert keys.find(second["key"]) is None and third["expires"] == clock() + 7
        assert [one["id"] for one in await keys.revoke(third["id"])] == [third["id"]]
        assert keys.find(third["key"]) is None and keys.named(ALICE) is None
        for attempt in (keys.revoke(ALICE), keys.make(ALICE, "b", None, None)):
            with pytest.raises(NotFound, match="no active key"):
                await attempt
        assert [one["state"] for one in await keys.described()] == ["expired", "expired", "revoked"]


async def test_a_key_that_an_overlap_shortened_passes_on_what_it_lasted_before(clock):
    async with started(Memory(), clock) as keys:
        await keys.make(ALICE, "a", "caller", None)
        clock.advance(10)
        second = await keys.make(ALICE, "b", None, None, 60.0)
        await keys.revoke(second["id"])
        assert (await keys.make(ALICE, "c", None, None, 60.0))["expires"] is None


async def test_when_keys_were_used_outlives_an_outage_and_their_revocation(clock, monkeypatch):
    monkeypatch.setattr(stored_keys, "WRITE_S", 0.0)
    documents = Memory()
    async with started(documents, clock) as keys:
        made = await keys.make(ALICE, "a", "caller", None)
        assert keys.find(made["key"])
        monkeypatch.setattr(documents, "change", away)
        await keys._step()
        monkeypatch.undo()
        await keys.revoke(made["id"])
        for name in ("b", "c"):
            other = await keys.make(f"acme/research/{name}", "a", "caller", None)
            keys.find(other["key"])
            keys._written_s = -1e9
            await keys._step()
        assert [one["last_used"] for one in await keys.described()] == [1000.0] * 3
        assert not keys._used


async def test_a_field_of_a_later_version_is_left_out(clock):
    documents = Memory()
    async with started(documents, clock) as keys:
        made = await keys.make(ALICE, "a", "caller", None)
        documents.bodies["keys"] = documents.bodies["keys"].replace(b'"role"', b'"later":[1],"role"')
        await keys._step()
        await keys.revoke(made["id"])
        assert keys.find(made["key"]) is None


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"salt":"zz","keys":[]}', b'{"salt":"","keys":[{}]}'])
async def test_a_document_that_cannot_be_read_leaves_the_keys_as_they_were(clock, monkeypatch, caplog, body):
    monkeypatch.setattr(stored_keys, "POLL_S", 0.001)
    documents = Memory()
    async with started(documents, clock) as keys:
        made = await keys.make(ALICE, "a", "caller", None)
        good, documents.bodies["keys"] = documents.bodies["keys"], body
        await until(lambda: keys._stale)
        assert keys.find(made["key"]) and caplog.text.count("the API keys stay as they were") == 1
        documents.bodies["keys"] = good
        await until(lambda: not keys._stale)
        await keys.revoke(made["id"])


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("alice", "must be ORG/TEAM/KEY"),
        ("a/b/c/d", "must be ORG"),
        ("acme/research/a:b", "must be ORG"),
        ("a/b/c", "team of"),
    ],
)
async def test_names_are_of_teams_of_the_file(clock, name, problem):
    async with started(Memory(), clock) as keys:
        with pytest.raises(InvalidArgument, match=problem):
            await keys.make(name, "a", "caller", None)
        await keys.make(ALICE, "a", "caller", None)
        with pytest.raises(InvalidArgument, match="which has an active key; rotate it; a failed call may have made it"):
            await keys.make(ALICE, "a", "caller", None)


@pytest.mark.slow
async def test_another_process_sees_changes_within_a_second_and_uses_are_merged(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(stored_keys, "WRITE_S", 0.0)
    path = tmp_path / "keys.sqlite"
    async with started(FileDocuments(path), clock) as one, started(FileDocuments(path), clock) as other:
        made = await one.make(ALICE, "a", "caller", None)
        await until(lambda: other.find(made["key"]) is not None, 1.0)
        clock.advance(5)
        other.find(made["key"])
        await other._step()
        assert (await one.described())[0]["last_used"] == clock()
        await one.revoke(ALICE)
        await until(lambda: other.find(made["key"]) is None, 1.0)
    assert made["key"].encode() not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


async def test_keys_last_through_an_outage(clock, caplog):
    memory = Memory()
    memory.away = True
    async with started(memory, clock) as keys:
        assert not keys.read and "stay as they were" in caplog.text
        memory.away = False
        made = await keys.make(ALICE, "a", "caller", None)
        memory.away = True
        caplog.clear()
        for _ in range(3):
            await keys._step()
        assert caplog.text.count("stay as they were") == 1
        assert keys.find(made["key"])


async def test_keys_that_ended_long_ago_are_forgotten(clock):
    async with started(Memory(), clock) as keys:
        await keys.make(ALICE, "a", "caller", None)
        await keys.revoke(ALICE)
        clock.advance(stored_keys.KEPT_S + 1)
        made = await keys.make("acme/research/bob", "a", "caller", None)
        assert [one["id"] for one in await keys.described()] == [made["id"]]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("make"), st.sampled_from(["a", "b"]), st.sampled_from([None, 3.0, 10.0])),
        st.tuples(st.just("rotate"), st.sampled_from(["a", "b"]), st.sampled_from([0.0, 2.0])),
        st.tuples(st.just("revoke"), st.sampled_from(["a", "b"]), st.none()),
        st.tuples(st.just("wait"), st.none(), st.sampled_from([1.0, 4.0])),
    ),
    max_size=12,
)


@settings(suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_exactly_the_keys_that_are_listed_as_active_are_found(steps: list[tuple[str, str, Any]]) -> None:
    async def check() -> None:
        now = [1000.0]
        keys, made = StoredKeys(Memory(), member, lambda: now[0]), {}
        for kind, name, value in steps:
            with contextlib.suppress(NotFound, InvalidArgument):
                if kind == "wait":
                    now[0] += value
                elif kind == "revoke":
                    await keys.revoke(f"acme/research/{name}")
                else:
                    role = "caller" if kind == "make" else None
                    lasts_s, overlap_s = (value, 0.0) if kind == "make" else (None, value)
                    one = await keys.make(f"acme/research/{name}", "a", role, lasts_s, overlap_s)
                    made[one["id"]] = one["key"]
            states = {one["id"]: one["state"] for one in await keys.described()}
            assert {id for id, key in made.items() if keys.find(key)} == {
                id for id, state in states.items() if state == "active"
            }

    asyncio.run(check())


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
