"""Bills over HTTP: each request is charged once and right, what it cost can be traced, and nobody sees another's."""

from __future__ import annotations

import csv
import io
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from contract.errors import EngineFailed
from gateway.config.tenants import digest
from tests.fakes.encoder_replica import EncoderReplica
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.running import Running, gateway, until
from tests.gateway.test_continuation import CRASHED, first_then

SALT = "00112233445566778899aabbccddeeff"
KEYS = {name: f"tri-{name}-0123456789-0123456789" for name in ("alice", "bob", "eve")}
TOKEN = "an-operators-token-0123"
USAGE_DB = "TRIDENT_GATEWAY_USAGE_DB"
WORDS = ("one ", "two ", "three ", "four ")


def config(org: str = "", research: str = "", more: str = "") -> str:
    """acme/research/alice, acme/sales/bob and other/team/eve."""
    text = f'salt = "{SALT}"\n[orgs.acme]\n{org}\n[orgs.acme.teams.research]\n{research}\n'
    for place, name in (("acme.teams.research", "alice"), ("acme.teams.sales", "bob"), ("other.teams.team", "eve")):
        text += f'[orgs.{place}.keys.{name}]\nhash = "{digest(bytes.fromhex(SALT), KEYS[name]).hex()}"\n'
    return f"""{text}
[models.demo]
pools = [""]
price = {{ input = 1.0, cached = 0.25, output = 3.0 }}
{more}"""


def billed(tmp_path: Path, replica: FakeReplica, text: str = "", **options: Any) -> Any:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    database = tmp_path / "usage.db"
    options |= {"usage_db": database, "admin_token_file": token, "environ": {USAGE_DB: str(database)}}
    return gateway(replica, config=text or config(), **options)


async def ask(
    running: Running, name: str = "alice", path: str = "/v1/completions", **body: Any
) -> tuple[int, dict, Any]:
    body = {"model": "demo", "prompt": "one two", "max_tokens": 8, **body}
    return await running.post(path, body, authorization=f"Bearer {KEYS[name]}")


async def usage(running: Running, query: str = "", token: str = TOKEN, path: str = "/v1/usage") -> Any:
    status, text = await running.get(f"{path}?{query}", authorization=f"Bearer {token}")
    return json.loads(text) if status == 200 else (status, text)


async def test_a_bill_is_what_the_responses_said_and_every_token_has_its_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.request")
    async with (
        FakeReplica(lambda seen: Script(tokens=WORDS, cached_tokens=1)) as replica,
        billed(tmp_path, replica) as running,
    ):
        said = [
            await ask(running, name, prompt=f"one two {name}", n=n)
            for name, n in (("alice", 1), ("alice", 3), ("bob", 1))
        ]
        chat = {"messages": [{"role": "user", "content": "hi"}], "prompt": None}
        del chat["prompt"]
        status, headers, answer = await running.post(
            "/v1/chat/completions", {"model": "demo", "max_tokens": 8, **chat}, authorization=f"Bearer {KEYS['eve']}"
        )
        said.append((status, headers, answer))
        report = await usage(running, "group_by=key,endpoint")
        records = (await usage(running, path="/v1/usage/requests"))["data"]
    rows = {(row["key"], row["endpoint"]): row for row in report["data"]}
    assert [row["requests"] for row in report["data"]] == [2, 1, 1] and report["currency"] == "USD"
    assert sum(row["prompt_tokens"] for row in rows.values()) == sum(one["usage"]["prompt_tokens"] for *_, one in said)
    tokens = sum(row["completion_tokens"] for row in rows.values())
    assert tokens == sum(one["usage"]["completion_tokens"] for *_, one in said) == 6 * len(WORDS)
    for one in records:
        uncached = one["prompt_tokens"] - one["cached_tokens"]
        assert one["micros"] == 1000 * uncached + 250 * one["cached_tokens"] + 3000 * one["completion_tokens"]
    assert {one["request_id"] for one in records} == {headers["x-request-id"] for _, headers, _ in said}
    assert sum(one["micros"] for one in records) == sum(row["micros"] for row in rows.values())
    logged = [record.fields for record in caplog.records if record.name == "gateway.request"]
    assert sum(round(fields["cost"] * 1e6) for fields in logged) == sum(one["micros"] for one in records)
    by_request = {one["request_id"]: one["micros"] for one in records}
    for request_id, micros in by_request.items():
        assert sum(round(one["cost"] * 1e6) for one in logged if one["request_id"] == request_id) == micros
    assert {one["key"] for one in logged} == {"acme/research/alice", "acme/sales/bob", "other/team/eve"}


async def test_each_sees_its_own(tmp_path: Path) -> None:
    text = config()
    async with FakeReplica(lambda seen: Script(tokens=WORDS)) as replica, billed(tmp_path, replica, text) as running:
        for name in KEYS:
            assert (await ask(running, name))[0] == 200
        keys = "group_by=key"
        own = await usage(running, keys, KEYS["alice"])
        assert [row["key"] for row in own["data"]] == ["acme/research/alice"] and own["tenant"] == "acme/research/alice"
        team = await usage(running, f"{keys}&tenant=acme/research", KEYS["alice"])
        assert [row["key"] for row in team["data"]] == ["acme/research/alice"]
        for level in ("acme", "acme/sales", "acme/research/bob", "other", "acme/researc"):
            status, answer = await usage(running, f"tenant={level}", KEYS["alice"])
            assert status == 403 and level in answer
        assert len((await usage(running, keys))["data"]) == 3
        assert [row["org"] for row in (await usage(running, "group_by=org"))["data"]] == ["acme", "other"]
        assert len((await usage(running, f"{keys}&tenant=acme"))["data"]) == 2
        assert (await usage(running, token="tri-mallory-0123456789-0123456789"))[0] == 401
        status, text = await running.get("/v1/usage?group_by=day,key&format=csv", authorization=f"Bearer {TOKEN}")
        table = list(csv.DictReader(io.StringIO(text)))
        assert [row["key"] for row in table] == ["acme/research/alice", "acme/sales/bob", "other/team/eve"]
        assert table[0]["cost"] == "0.014000" and table[0]["requests"] == "1"
        assert "/v1/usage/requests" in (await running.get("/openapi.json"))[1]


async def test_an_operator_with_a_team_sees_everything(tmp_path: Path) -> None:
    stored = {"key_store": str(tmp_path / "keys.sqlite")}
    async with (
        FakeReplica(lambda seen: Script(tokens=WORDS)) as replica,
        billed(tmp_path, replica, **stored) as running,
    ):
        for name in KEYS:
            assert (await ask(running, name))[0] == 200
        new = {"name": "acme/research/boss", "role": "operator"}
        status, _, made = await running.post("/admin/keys", new, authorization=f"Bearer {TOKEN}")
        assert status == 200, made
        for query in ("group_by=key", "group_by=key&tenant="):
            found = await usage(running, query, made["key"])
            assert found["tenant"] == "" and len(found["data"]) == 3
        assert [row["key"] for row in (await usage(running, "group_by=key&tenant=other", made["key"]))["data"]] == [
            "other/team/eve"
        ]


WRONG = [
    ("group_by=week", "group_by: must be some of hour, day, month, org"),
    ("from=yesterday", "from: must be a date such as 2026-11-23"),
    ("from=2026-11-24&to=2026-11-23", "to: must not be before from"),
    ("from=2026-11-22T10:01:00", "from: must be a quarter of an hour"),
    ("time_zone=Mars", "time_zone: must be an IANA time zone"),
    ("format=xml", "format: must be one of json, csv"),
    ("colour=red", "colour: is not known: must be one of from, to"),
]


async def test_a_query_that_cannot_be_answered_is_named(tmp_path: Path) -> None:
    async with FakeReplica() as replica, billed(tmp_path, replica) as running:
        for query, message in WRONG:
            status, answer = await usage(running, query)
            assert status == 400 and message in answer
        for name in ("limit", "after"):
            status, answer = await usage(running, f"{name}={'9' * 5000}", path="/v1/usage/requests")
            assert status == 400 and json.loads(answer)["error"]["param"] == name, answer


async def test_requests_are_paged(tmp_path: Path) -> None:
    async with FakeReplica(lambda seen: Script(tokens=WORDS)) as replica, billed(tmp_path, replica) as running:
        asked = [(await ask(running, prompt=f"number {number}"))[1]["x-request-id"] for number in range(5)]
        found, after = [], 0
        while True:
            page = await usage(running, f"limit=2&after={after}", KEYS["alice"], "/v1/usage/requests")
            found += [one["request_id"] for one in page["data"]]
            after = page["last"]
            if not page["has_more"]:
                break
        assert found == asked
        one = await usage(running, f"request_id={asked[3]}", path="/v1/usage/requests")
        assert [record["request_id"] for record in one["data"]] == [asked[3]]


async def test_what_was_cut_failed_or_cached_is_charged_once_and_right(tmp_path: Path) -> None:
    text = config(more='[reuse]\nengine = "e1"\n')
    async with FakeReplica(lambda seen: Script(tokens=WORDS)) as replica, billed(tmp_path, replica, text) as running:
        first = await ask(running, temperature=0.0)
        again = await ask(running, temperature=0.0)
        assert again[1]["x-trident-cache"] == "hit"
        replica.script = lambda seen: Script(tokens=WORDS * 10, fail_after=3, error=EngineFailed("broke"))
        failed = await ask(running, prompt="fails")
        records = {one["request_id"]: one for one in (await usage(running, path="/v1/usage/requests"))["data"]}
        assert len(records) == 3 and failed[0] == 500
        hit = records[again[1]["x-request-id"]]
        assert (hit["source"], hit["micros"], hit["completion_tokens"]) == ("cache", 0, 0)
        assert records[first[1]["x-request-id"]]["completion_tokens"] == len(WORDS)
        assert records[failed[1]["x-request-id"]]["completion_tokens"] == 3


async def test_a_hard_limit_refuses_and_says_until_when_and_a_soft_one_warns(tmp_path: Path) -> None:
    text = config("soft_tokens_per_month = 5", "money_per_day = 0.05")
    async with FakeReplica(lambda seen: Script(tokens=WORDS)) as replica, billed(tmp_path, replica, text) as running:
        status, headers, answer = await ask(running)
        assert status == 200 and "acme soft_tokens_per_month" in headers["x-trident-budget-warning"]
        answers = [await ask(running, prompt=f"again {number}") for number in range(4)]
        status, headers, answer = answers[-1]
        assert status == 429 and answer["error"]["code"] == answer["error"]["type"] == "insufficient_quota"
        assert "acme/research has 0.0" in answer["error"]["message"] and "money_per_day" in answer["error"]["message"]
        left_s = 86_400 - time.time() % 86_400
        assert abs(int(headers["retry-after"]) - left_s) < 60
        assert (await ask(running, "bob"))[0] == 200  # of another team
        spent = sum(row["micros"] for row in (await usage(running, "tenant=acme/research"))["data"])
        assert 0 < spent <= 50_000
        samples = await running.metrics()
        assert samples['trident_gateway_budget_warnings_total{at="limit",limit="soft_tokens_per_month"}'] == 1
        ratio = samples['trident_gateway_budget_used_ratio{level="acme/research",limit="money_per_day"}']
        assert spent / 50_000 <= ratio <= 1  # as of the latest request, with what it had reserved
        assert samples['trident_gateway_rejections_total{reason="quota"}'] >= 1
        assert (
            samples['trident_gateway_tenant_prompt_tokens_count{operation="text_completion",tenant="acme/sales"}'] == 1
        )


async def test_a_part_of_the_requests_has_a_limit_of_its_own(tmp_path: Path) -> None:
    org = '[[orgs.acme.limits]]\nendpoint = "text_completion"\ntokens_per_day = 10\n'
    async with (
        FakeReplica(lambda seen: Script(tokens=WORDS)) as replica,
        billed(tmp_path, replica, config(org)) as running,
    ):
        status, _, answer = await ask(running, max_tokens=20)
        assert status == 400 and "more than acme endpoint=text_completion may ever use" in answer["error"]["message"]
        body = {"model": "demo", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
        authorization = f"Bearer {KEYS['alice']}"
        assert (await running.post("/v1/chat/completions", body, authorization=authorization))[0] == 200


async def test_a_stream_that_its_reader_leaves_is_charged_what_it_had(tmp_path: Path) -> None:
    import aiohttp

    async with (
        FakeReplica(lambda seen: Script(tokens=WORDS * 50, gap_s=0.01)) as replica,
        billed(tmp_path, replica) as running,
    ):
        body = {"model": "demo", "prompt": "one two", "max_tokens": 200, "stream": True}
        headers = {"authorization": f"Bearer {KEYS['alice']}"}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{running.base_url}/v1/completions", json=body, headers=headers) as answer:
                await answer.content.readany()
        await until(lambda: not len(running.service.live))
        (record,) = (await usage(running, path="/v1/usage/requests"))["data"]
        assert 0 < record["completion_tokens"] < 200 and record["micros"] > 0


async def test_prices_change_for_later_requests(tmp_path: Path) -> None:
    async with FakeReplica(lambda seen: Script(tokens=WORDS)) as replica, billed(tmp_path, replica) as running:
        await ask(running, prompt="a")
        path = running.service.configuration.path
        assert path is not None
        path.write_text(path.read_text().replace("output = 3.0", "output = 5.0"))
        await running.service.configuration.reload()
        await ask(running, prompt="a again")
        first, second = (await usage(running, path="/v1/usage/requests"))["data"]
        assert second["micros"] - first["micros"] == 2000 * len(WORDS) + 1000 * (
            second["prompt_tokens"] - first["prompt_tokens"]
        )


async def test_an_embedding_costs_its_tokens(tmp_path: Path) -> None:
    async with EncoderReplica() as replica, FakeReplica() as plain:
        rules = f'[pools]\n"" = 1.0\nsmall = {{ kind = "encoder", replicas = "{replica.url}" }}\n'
        rules += '[models.vectors]\npools = ["small"]\nprice = { input = 0.5 }\n'
        async with billed(tmp_path, plain, config(more=rules)) as running:
            body = {"model": "vectors", "input": ["a b", "c"]}
            status, headers, answer = await running.post("/v1/embeddings", body, authorization=f"Bearer {KEYS['bob']}")
            assert status == 200, answer
            (record,) = (await usage(running, "endpoint=embeddings", KEYS["bob"], "/v1/usage/requests"))["data"]
    assert (record["request_id"], record["model"]) == (headers["x-request-id"], "vectors")
    assert (record["prompt_tokens"], record["completion_tokens"], record["micros"]) == (3, 0, 1500)


async def test_what_another_replica_goes_on_with_is_charged_once(tmp_path: Path) -> None:
    script = first_then(CRASHED)
    async with FakeReplica(script) as one, FakeReplica(script) as two:
        where = {"replicas": f"{one.url},{two.url}", "metrics_urls": {}, "continuations": 2}
        async with billed(tmp_path, one, **where) as running:
            status, headers, answer = await ask(running, max_tokens=12)
            assert status == 200 and headers["x-trident-continued"] == "1" and one.seen and two.seen
            (record,) = (await usage(running, path="/v1/usage/requests"))["data"]
    assert record["completion_tokens"] == answer["usage"]["completion_tokens"] == 12
    assert record["prompt_tokens"] == answer["usage"]["prompt_tokens"]
