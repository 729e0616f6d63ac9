"""The operators' endpoints: who may call them, and replicas that register through them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import orjson
import pytest

from contract.errors import InvalidArgument
from gateway.config.settings import Settings
from gateway.identity import audit
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import gateway, until

TOKEN = "an-operators-token-0123"
REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 3}


@pytest.fixture
def token_file(tmp_path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


async def call(running, method: str, path: str, body=None, token: str = TOKEN, data: bytes | None = None):
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as session:
        url = f"{running.base_url}/admin/{path}"
        async with session.request(method, url, json=body, data=data, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None)


async def test_there_is_nothing_without_a_token_file():
    async with FakeReplica() as replica, gateway(replica) as running:
        for method in ("GET", "PUT", "DELETE"):
            assert (await call(running, method, "replicas"))[0] == 404


async def test_a_wrong_token_is_refused(token_file):
    async with gateway(admin_token_file=token_file, replicas="registered") as running:
        for token in ("", "wrong", TOKEN[:-1], TOKEN + "x", "é" * 20):
            for method, path in (("GET", "replicas"), ("PUT", "replicas/a"), ("DELETE", "replicas/a")):
                status, answer = await call(running, method, path, token=token)
                assert status == 401 and TOKEN not in str(answer)
        assert await call(running, "GET", "replicas") == (200, {"replicas": []})


async def test_strangers_at_a_gateway_without_keys_cannot_fill_the_audit_log(token_file, tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "REFUSALS_S", 3600.0)
    log = tmp_path / "audit.jsonl"
    async with gateway(admin_token_file=token_file, audit_log=log, replicas="registered") as running:
        for number in range(audit.REFUSALS + 5):
            assert (await call(running, "GET", "replicas", token=f"wrong-{number}" if number % 2 else ""))[0] == 401
        assert (await call(running, "PUT", "replicas/a", {"address": "h:1"}))[0] == 200
    roles = [orjson.loads(line)["role"] for line in log.read_bytes().splitlines()]
    assert roles == ["none"] * audit.REFUSALS + ["operator"]


@pytest.mark.parametrize("text", ["", "short", "two words of a long enough text", "ä" * 30])
def test_a_file_without_a_token_stops_the_gateway(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_ADMIN_TOKEN_FILE: must hold one token"):
        Settings(admin_token_file=path)
    with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_ADMIN_TOKEN_FILE"):
        Settings(admin_token_file=tmp_path / "none")


async def test_a_replica_that_registers_serves_until_it_withdraws(token_file):
    async with FakeReplica() as replica, gateway(admin_token_file=token_file, replicas="registered") as running:
        assert (await running.post("/v1/completions", REQUEST))[0] == 503
        body = {"address": replica.url, "metrics_url": replica.metrics_url, "engine": "demo", "slots": 8}
        assert (await call(running, "PUT", "replicas/a", {**body, "state": "starting"}))[0] == 200
        assert (await running.post("/v1/completions", REQUEST))[0] == 503
        assert await call(running, "PUT", "replicas/a", body) == (200, {"name": "a", "lease_s": 3.0})
        await until(lambda: bool(running.service.replicas.ready()))
        assert (await running.post("/v1/completions", REQUEST))[0] == 200
        [known] = running.service.replicas.all()
        assert known.metrics_url == replica.metrics_url
        _, answer = await call(running, "GET", "replicas")
        [entry] = answer["replicas"]
        assert entry["name"] == "a" and entry["state"] == "ready" and entry["in_use"] and entry["slots"] == 8
        assert await call(running, "DELETE", "replicas/a") == (200, {"withdrawn": True})
        assert not running.service.replicas.all()
        assert (await running.post("/v1/completions", REQUEST))[0] == 503
        assert await call(running, "DELETE", "replicas/a") == (200, {"withdrawn": False})


async def test_a_withdrawal_cuts_no_stream(token_file):
    gate = asyncio.Event()

    def gated(seen):
        return Script((" a", " b"), gate=gate, gate_at=1)

    async with FakeReplica(gated) as replica, gateway(replica, admin_token_file=token_file) as running:
        await call(running, "PUT", "replicas/a", {"address": replica.url})
        answer = asyncio.create_task(running.post("/v1/completions", REQUEST))
        await until(lambda: any(one.work.outstanding for one in running.service.replicas.all()))
        assert (await call(running, "DELETE", "replicas/a"))[0] == 200
        assert not running.service.replicas.all()  # although the list names it
        gate.set()
        status, _, text = await answer
        assert status == 200 and text["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "address"),
        ({"address": "no port:x"}, "address"),
        ({"address": "h:1", "lease_s": 0}, "lease_s"),
        ({"address": "h:1", "lease_s": 1e9}, "lease_s"),
        ({"address": "h:1", "metrics_url": "ftp://h"}, "metrics_url"),
        ({"address": "h:1", "state": "gone"}, "state"),
        ({"address": "h:1", "slots": -1}, "slots"),
        ({"address": "h:1", "manifest_sha256": "x"}, "manifest_sha256"),
        ({"address": "h:1", "expected_s": -1}, "expected_s"),
        ({"address": "h:1", "colour": "red"}, "colour"),
        ({"address": "h:1", "pool": "canary"}, "pool"),
    ],
)
async def test_what_is_no_registration_is_refused_by_field(token_file, fields, field):
    async with gateway(admin_token_file=token_file, replicas="registered") as running:
        status, answer = await call(running, "PUT", "replicas/a", fields)
        assert status == 400 and answer["error"]["param"] == field, answer
        assert not running.service.replicas.registrations.entries()


async def test_names_and_bodies_are_bounded(token_file):
    async with gateway(admin_token_file=token_file, replicas="registered") as running:
        for name in ("-a", "a%20b", "x" * 201):
            status, answer = await call(running, "PUT", f"replicas/{name}", {"address": "h:1"})
            assert status == 400 and answer["error"]["param"] == "name", name
        for data in (b"", b"[]", b"{", b" " * 70_000):
            status, answer = await call(running, "PUT", "replicas/a", data=data)
            assert status == 400 and answer["error"]["message"], data[:10]


async def test_releases_are_shown_and_changed_with_the_token_only(tmp_path):
    config = '[releases.r]\nstable = "stable"\ncandidate = "next"\n'
    async with FakeReplica() as stable, FakeReplica() as candidate:
        where = f"stable={stable.url};next={candidate.url}"
        token = tmp_path / "admin"
        token.write_text("0123456789abcdef")
        async with gateway(stable, candidate, replicas=where, config=config, admin_token_file=token) as running:
            assert (await running.post("/admin/releases/r", {"action": "rollback"}))[0] == 401
            key = {"authorization": "Bearer 0123456789abcdef"}
            status, _, answer = await running.post("/admin/releases/r", {"action": "shift", "to": 40}, **key)
            assert status == 200 and answer["releases"][0]["weight"] == 40 and answer["problem"] == ""
            assert running.service.replicas.releases["r"].weight == 40
            for path, change, code, message in (
                ("r", {"action": "shift", "to": 140}, 400, "releases.r.weight: must be less than or equal to 100"),
                ("r", {"action": "shift", "to": "x"}, 400, "to"),
                ("r", {"action": "shift", "by": 1}, 400, "by: is not known: must be one of to"),
                ("r", {"action": "stop"}, 400, "action: must be one of start, shift, rollback, finish"),
                ("r", {"action": ["stop"]}, 400, "action: must be one of start, shift, rollback, finish"),
                ("r", {"action": "start", "weight": "5"}, 400, "releases.r.weight: must be a valid number"),
                ("r", {}, 400, "action: must be one of start, shift, rollback, finish"),
                ("gone", {"action": "rollback"}, 404, "there is no release 'gone'"),
                ("r", {"action": "rollback", "to": 5}, 400, "to: is not known: must be one of reason"),
                ("r", {"action": "rollback", "reason": "x" * 501}, 400, "reason: must be a text of at most 500"),
                (
                    "new",
                    {"action": "start", "stable": "stable", "candidate": "no"},
                    400,
                    "must be a pool of one release",
                ),
            ):
                status, _, answer = await running.post(f"/admin/releases/{path}", change, **key)
                assert status == code and message in answer["error"]["message"], answer
            status, _, answer = await running.post("/admin/releases/r", {"action": "rollback"}, **key)
            assert (
                answer["releases"][0]["rolled_back"] == "by an operator"
                and running.service.replicas.releases["r"].share == 0
            )
