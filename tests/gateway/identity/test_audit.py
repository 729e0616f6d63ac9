"""The audit log: whole lines, bounded for those without a role."""

from __future__ import annotations

import asyncio
from collections import Counter

import orjson
import pytest

from contract.errors import InvalidArgument
from gateway.identity import audit
from gateway.identity.audit import Audit


async def test_lines_of_several_writers_are_whole_and_say_what_there_is(tmp_path):
    path = tmp_path / "audit.jsonl"
    one, other = Audit(path), Audit(path)
    written = (
        each.write("key a/b/c", "operator", "key.create", f"a/b/{n}", "ok", after={"n": n}, before={})
        for n in range(20)
        for each in (one, other)
    )
    await asyncio.gather(*written)
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert len(lines) == 40 and all("before" not in line and line["after"] for line in lines)
    assert set(lines[0]) == {"time", "who", "role", "action", "target", "result", "after"}
    assert path.stat().st_mode & 0o077 == 0
    path.rename(tmp_path / "old")
    await one.write("a", "operator", "reload", "f", "ok")
    assert len(path.read_bytes().splitlines()) == 1


async def test_callers_who_are_refused_cannot_fill_the_log(tmp_path, monkeypatch):
    path = tmp_path / "audit.jsonl"
    log = Audit(path)
    for _ in range(3 * audit.REFUSALS):
        await log.write("", "none", "GET /admin/keys", "", "Unauthenticated")
        await log.write("key a/b/c", "caller", "GET /admin/keys", "", "PermissionDenied: only operators may do this")
        await log.write("boss", "operator", "reload", "f", "ok")
    who = [orjson.loads(line)["who"] for line in path.read_bytes().splitlines()]
    assert Counter(who) == {"": audit.REFUSALS, "key a/b/c": audit.REFUSALS, "boss": 3 * audit.REFUSALS}


def test_a_file_that_cannot_be_written_stops_the_gateway(tmp_path):
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_AUDIT_LOG: cannot be written"):
        Audit(tmp_path / "none" / "audit")
