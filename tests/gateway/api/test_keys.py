"""/admin/keys: operators and tenant admins, each within what they manage; and what the audit log says of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from contract.errors import InvalidArgument
from gateway.config.settings import Settings
from gateway.identity import stored_keys
from tests.fakes.replica import FakeReplica
from tests.gateway.running import Running, gateway, until

TOKEN = "an-operators-token-0123"
CONFIG = "[orgs.acme.teams.research]\nrequests_per_minute = 100\n[orgs.acme.teams.sales]\n[orgs.other.teams.t]\n"
REQUEST = {"model": "demo", "prompt": "one two", "max_tokens": 1}
NAME = "acme/research/alice"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "token").write_text(TOKEN)
    files = {"admin_token_file": "token", "audit_log": "audit.jsonl"}
    return {name: tmp_path / file for name, file in files.items()} | {"key_store": str(tmp_path / "keys.sqlite")}


def audited(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in settings["audit_log"].read_bytes().splitlines()]


async def ask(running: Running, token: str, path: str = "", **fields: Any) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {token}", "x-request-id": "r1"}
    async with aiohttp.ClientSession(headers=headers) as http:
        url = f"{running.base_url}/admin/keys{path}"
        async with http.post(url, json=fields) if fields else http.get(url) as answer:
            return answer.status, await answer.json()


async def serves(running: Running, key: str) -> bool:
    status = (await running.post("/v1/completions", REQUEST, authorization=f"Bearer {key}"))[0]
    assert status in (200, 401)
    return status == 200


async def test_the_life_of_a_key(settings):
    async with FakeReplica() as replica, gateway(replica, config=CONFIG, **settings) as running:
        assert not await serves(running, "")
        status, made = await ask(running, TOKEN, name=NAME)
        assert status == 200 and await serves(running, made["key"])
        rotated = (await ask(running, TOKEN, f"/{NAME}", action="rotate", overlap_s=60))[1]
        assert await serves(running, made["key"]) and await serves(running, rotated["key"])
        [old, new] = (await ask(running, TOKEN))[1]["keys"]
        assert (old["id"], new["id"]) == (made["id"], rotated["id"]) and old["last_used"] and not new["expires"]
        assert (await ask(running, TOKEN, f"/{made['id']}", action="revoke"))[0] == 200
        assert not await serves(running, made["key"]) and await serves(running, rotated["key"])
        for path, fields, field in (
            ("", {"name": NAME}, "name"),
            ("", {"name": "acme"}, "name"),
            ("", {"name": "acme/none/x"}, "name"),
            ("", {"name": "acme/sales/x", "expires_in_s": 0}, "expires_in_s"),
            ("", {"name": "acme/sales/x", "role": "king"}, "role"),
            (f"/{NAME}", {"action": "delete"}, "action"),
            (f"/{NAME}", {"action": "rotate", "overlap_s": -1}, "overlap_s"),
        ):
            status, answer = await ask(running, TOKEN, path, **fields)
            assert (status, answer["error"]["param"]) == (400, field)
        status, answer = await ask(running, TOKEN, "/acme/sales/x", action="rotate")
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (404, None, "not_found")
    text = settings["audit_log"].read_text()
    assert made["key"] not in text and rotated["key"] not in text and TOKEN not in text
    first = audited(settings)[0]
    assert (first["who"], first["role"], first["action"]) == ("operators' token", "operator", "key.create")
    assert (first["target"], first["result"], first["request_id"]) == (NAME, "ok", "r1")
    assert first["after"] == {"role": "caller"}
    assert [line["action"] for line in audited(settings)][1:3] == ["key.rotate", "key.revoke"]


async def test_tenant_admins_manage_their_own_and_cannot_rise(settings):
    async with gateway(config=CONFIG, **settings, replicas="registered") as running:

        async def made(name: str, role: str) -> str:
            return str((await ask(running, TOKEN, name=name, role=role))[1]["key"])

        team, org = await made("acme/research/lead", "team_admin"), await made("acme/research/head", "org_admin")
        operator, caller = await made("acme/research/boss", "operator"), await made("other/t/x", "caller")
        assert (await ask(running, team, name="acme/research/new"))[0] == 200
        assert (await ask(running, org, name="acme/sales/new", role="team_admin"))[0] == 200
        for token, fields in (
            (team, {"name": "acme/sales/x"}),
            (team, {"name": "acme/research/x", "role": "org_admin"}),
            (team, {"name": "acme/research/x", "role": "operator"}),
            (org, {"name": "other/t/y"}),
            (org, {"name": "acme/sales/y", "role": "operator"}),
            (caller, {"name": "other/t/y"}),
        ):
            assert (await ask(running, token, **fields))[0] == 403, fields
        for action in ("rotate", "revoke"):  # a key above one's own would be a way up
            assert (await ask(running, team, "/acme/research/head", action=action))[0] == 403
            assert (await ask(running, org, "/acme/research/boss", action=action))[0] == 403
            assert (await ask(running, team, "/other/t/x", action=action))[0] == 404
        names = {
            token: [key["name"] for key in (await ask(running, token))[1]["keys"]] for token in (team, org, operator)
        }
        assert "acme/sales/new" not in names[team] and "acme/sales/new" in names[org]
        assert "other/t/x" not in names[org] and "other/t/x" in names[operator]
        assert (await ask(running, caller))[0] == 403 and (await ask(running, ""))[0] == 401
        assert (await running.get("/admin/replicas", authorization=f"Bearer {operator}"))[0] == 200
        assert (await running.get("/admin/replicas", authorization=f"Bearer {org}"))[0] == 403
    refusals = [
        line for line in audited(settings) if line["result"].startswith(("PermissionDenied", "Unauthenticated"))
    ]
    assert len(refusals) == 6 + 4 + 2 + 1 and refusals[-2]["role"] == "none"


async def test_the_id_of_an_ended_key_is_no_way_to_the_key_of_its_name_that_holds_now(settings):
    async with gateway(config=CONFIG, **settings, replicas="registered") as running:
        team = (await ask(running, TOKEN, name="acme/research/lead", role="team_admin"))[1]["key"]
        old = (await ask(running, TOKEN, name=NAME))[1]
        assert (await ask(running, TOKEN, f"/{old['id']}", action="revoke"))[0] == 200
        assert (await ask(running, TOKEN, name=NAME, role="org_admin"))[0] == 200
        for target, status in ((old["id"], 404), (NAME, 403)):
            assert (await ask(running, team, f"/{target}", action="rotate"))[0] == status


@pytest.mark.slow
async def test_two_gateways_share_keys_in_redis(settings, redis_socket):
    settings |= {"key_store": "redis", "redis": f"unix://{redis_socket}"}
    async with (
        FakeReplica() as replica,
        gateway(replica, config=CONFIG, **settings) as one,
        gateway(replica, config=CONFIG, **settings) as other,
    ):
        made = (await ask(one, TOKEN, name=NAME))[1]
        keys = other.service.authentication.stored
        await until(lambda: keys.find(made["key"]) is not None, 1.0)
        assert await serves(other, made["key"])
        await ask(one, TOKEN, f"/{NAME}", action="revoke")
        await until(lambda: keys.find(made["key"]) is None, 1.0)
        assert not await serves(other, made["key"])
        await keys._documents.change("keys", lambda body: (b"", None))


async def test_while_the_store_was_never_read_an_unknown_key_is_no_wrong_key(settings, tmp_path):
    settings |= {"key_store": "redis", "redis": f"unix://{tmp_path}/none"}
    environ = {"TRIDENT_GATEWAY_API_KEYS": "acme/research/bob=bob-bob-bob-bob-bob-bob"}
    async with FakeReplica() as replica, gateway(replica, config=CONFIG, environ=environ, **settings) as running:
        assert await serves(running, "bob-bob-bob-bob-bob-bob") and not await serves(running, "")
        status, headers, _ = await running.post("/v1/completions", REQUEST, authorization="Bearer tri-other")
        assert status == 503 and headers["retry-after"] == "1"
        status, answer = await ask(running, TOKEN, name=NAME)
        assert status == 503 and "cannot be read now" in answer["error"]["message"]


async def test_reloads_and_releases_are_audited(settings, tmp_path):
    config = CONFIG + "[pools]\na = 1.0\nb = 0.0\n"
    async with gateway(config=config, **settings, replicas="a=127.0.0.1:1;b=127.0.0.1:2") as running:
        path = running.service.configuration.path
        path.write_text(config + "[admission]\nmax_running = 3\n")
        await running.service.configuration.reload()
        path.write_text("[what]\n")
        await running.service.configuration.reload()
        path.write_text(config + '[releases.next]\nstable = "a"\ncandidate = "b"\nweight = 5.0\n')
        await running.service.configuration.reload()
        headers = {"authorization": f"Bearer {TOKEN}"}
        body = {"action": "shift", "to": 25}
        assert (await running.post("/admin/releases/next", body, **headers))[0] == 200
        await until(lambda: len(audited(settings)) == 5)
    changed, refused, started, shifted, again = sorted(audited(settings), key=lambda line: line["time"])
    assert (changed["who"], changed["action"], changed["result"]) == ("this gateway", "reload", "ok")
    assert changed["after"]["sections"] == ["admission"]
    assert "what: is not known" in refused["result"] and started["after"]["sections"] == ["admission", "releases"]
    shift = shifted if shifted["action"] == "release.shift" else again  # the file is read while it is answered
    assert (shift["before"]["weight"], shift["after"]["weight"], shift["target"]) == (5.0, 25.0, "next")


def test_gateways_that_share_state_share_keys():
    for values in ({"key_store": "redis"}, {"key_store": "/k", "redis": "redis://h:1"}):
        with pytest.raises(InvalidArgument, match="TRIDENT_GATEWAY_KEY_STORE: must be redis where"):
            Settings(**values)
    assert stored_keys.POLL_S < 0.5
