"""Budgets and bills of whole processes: workers, gateways that share a Redis, drains and kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.config.settings import Settings
from gateway.usage import report
from gateway.usage.store import UsageStore
from tests.fakes.replica import FakeReplica, Script
from tests.gateway.api.test_usage import KEYS, config
from tests.gateway.test_main import process
from tests.gateway.test_workers import children

pytestmark = pytest.mark.slow
ALWAYS = {"from": "2020-01-01", "to": "2999-01-01"}


async def ask(url: str, name: str = "alice", max_tokens: int = 8, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEYS[name]}"}) as session:
        body = {"model": "demo", "prompt": "one two", "max_tokens": max_tokens, **body}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            return answer.status, await answer.json()


async def asked_until_refused(url: str, name: str) -> int:
    """Returns the tokens of all answers."""
    tokens = 0
    while True:
        status, answer = await ask(url, name)
        if status == 429:
            assert answer["error"]["code"] == "insufficient_quota"
            return tokens
        assert status == 200, answer
        tokens += answer["usage"]["total_tokens"]


def recorded(*paths: Path) -> dict[str, int]:
    return report.sums(paths, ALWAYS, "", "UTC").rows[0]


def reserved(path: Path) -> list[float]:
    """Returns the amounts of all reservations, as they were written."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT leases FROM budgets").fetchall()
    return [amount for (leases,) in rows for amount, _ in json.loads(leases).values()]


async def stopped(gateway: asyncio.subprocess.Process) -> list[dict[str, Any]]:
    """Ends it as an operator does; returns the lines of its request log."""
    gateway.send_signal(signal.SIGTERM)
    _, text = await asyncio.wait_for(gateway.communicate(), 60)
    lines = [json.loads(line) for line in text.splitlines() if line.startswith(b"{")]
    return [line for line in lines if "finish_reason" in line]


async def test_two_gateways_spend_one_budget_and_their_bills_are_their_logs(tmp_path: Path, redis_socket: Path) -> None:
    limit = 2000
    path = tmp_path / "gateway.toml"
    path.write_text(config(f"tokens_per_day = {limit}") + f'[budgets]\nredis = "unix://{redis_socket}?db=3"\n')
    databases = [tmp_path / name for name in ("one.db", "two.db")]
    async with FakeReplica(lambda seen: Script((" a",) * 5)) as replica, contextlib.AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(
                process(replica, CONFIG=str(path), USAGE_DB=str(database), LOG_FORMAT="json")
            )
            for database in databases
        ]
        callers = [asked_until_refused(url, name) for _, url in gateways for name in ("alice", "bob") for _ in range(6)]
        told = sum(await asyncio.gather(*callers))
        assert limit - 24 * 30 < told <= limit  # of the last that were refused, each might have needed some 20
        lines = [line for gateway, _ in gateways for line in await stopped(gateway)]
    bill = recorded(*databases)
    assert bill["prompt_tokens"] + bill["completion_tokens"] == told
    assert sum(line["input_tokens"] + line["output_tokens"] for line in lines) == told
    assert sum(round(line["cost"] * 1e6) for line in lines) == bill["micros"] > 0
    assert {line["request_id"] for line in lines} == {
        one["request_id"] for one in report.requests(databases, ALWAYS, "", "UTC").rows
    }


async def test_a_budget_outlives_kill_9_and_what_ran_counts_as_used(tmp_path: Path) -> None:
    path, database = tmp_path / "gateway.toml", tmp_path / "usage.db"
    path.write_text(config("tokens_per_month = 1000"))
    settings = {"CONFIG": str(path), "USAGE_DB": str(database), "WORKERS": "2", "LOG_LEVEL": "error"}
    async with FakeReplica(lambda seen: Script((" a",) * 5)) as replica:
        async with process(replica, **settings) as (gateway, url):
            answers = [await ask(url) for _ in range(6)]
            told = sum(answer["usage"]["total_tokens"] for _, answer in answers)
            while not (rows := report.sums([database], ALWAYS, "", "UTC").rows) or rows[0]["requests"] < 6:
                await asyncio.sleep(0.05)
            replica.script = lambda seen: Script((" a",) * 500, stall_after=2)
            running = asyncio.ensure_future(ask(url, max_tokens=400, stream=True))
            while not replica.counts.running:
                await asyncio.sleep(0.01)
            for pid in (gateway.pid, *children(gateway.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(aiohttp.ClientError):
                await running
        replica.script = lambda seen: Script((" a",) * 5)
        assert recorded(database)["requests"] == 6
        async with process(replica, **settings) as (gateway, url):
            more = await asked_until_refused(url, "bob")
            assert 1000 - 420 - 30 < told + more <= 1000 - 400
            await stopped(gateway)
    bill = recorded(database)
    assert bill["prompt_tokens"] + bill["completion_tokens"] == told + more
    store = UsageStore(Settings(usage_db=database))
    ((spent, leases),) = store.budgets().values()
    assert spent == told + more and [amount > 400 for amount, _ in json.loads(leases).values()] == [True]
    store.close()
