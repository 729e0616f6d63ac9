"""The operators' page: its files, its events, and what a scaler reports for it. tests/gateway/test_console_page.py
shows it in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import re
from pathlib import Path

import aiohttp
import orjson
import pytest

from gateway.api import console
from tests.fakes.replica import FakeReplica
from tests.gateway.running import Running, gateway

TOKEN = "0123456789abcdef"
KEY = {"authorization": f"Bearer {TOKEN}"}
FOLDER = Path(console.__file__).parents[1] / "console"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


async def get(running: Running, path: str, **headers: str) -> tuple[int, aiohttp.typedefs.LooseHeaders, str]:
    async with aiohttp.ClientSession() as session:
        async with session.get(running.base_url + path, headers=headers) as answer:
            return answer.status, answer.headers, await answer.text()


async def next_event(answer: aiohttp.ClientResponse) -> dict:
    data = await answer.content.readuntil(b"\n\n")
    assert data.startswith(b"data: ")
    event: dict = orjson.loads(data[6:])
    return event


async def test_the_page_runs_only_what_it_brings(token_file):
    async with gateway(admin_token_file=token_file, replicas="registered") as running:
        for path, file in (("console", "index.html"), ("console/console.css", ""), ("console/console.js", "")):
            status, headers, text = await get(running, f"/{path}")
            assert status == 200 and text == (FOLDER / (file or Path(path).name)).read_text()
            assert headers["content-type"].partition(";")[0] == mimetypes.guess_type(file or path)[0]
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
        for path in ("/console/../app.py", "/console/%2e%2e/app.py", "/console/none.js"):
            assert (await get(running, path))[0] == 404


async def test_without_a_token_file_there_is_no_page():
    async with gateway(replicas="registered") as running:
        for path in ("/console", "/console/console.js", "/admin/events"):
            assert (await get(running, path))[0] == 404


def test_the_page_is_small_loads_nothing_else_and_puts_text_in_as_text():
    files = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert sum(map(len, files.values())) < 64 * 1024
    for name, text in files.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|//cdn|@import", text), name
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\bstyle=", files["console.js"])
    assert not re.search(r"<style|<script>|\son\w+=|style=", files["index.html"])


async def test_events_tell_the_state_once_a_second_to_operators_only(token_file, monkeypatch):
    monkeypatch.setattr(console, "PERIOD_S", 0.02)
    config = '[releases.r]\nstable = "stable"\ncandidate = "next"\n'
    async with FakeReplica() as one, FakeReplica() as two:
        where = f"stable={one.url};next={two.url}"
        async with gateway(one, two, replicas=where, config=config, admin_token_file=token_file) as running:
            assert (await get(running, "/admin/events"))[0] == 401
            body = {"model": "demo", "prompt": "one two", "max_tokens": 4}
            assert (await running.post("/v1/completions", body))[0] == 200
            async with aiohttp.ClientSession(headers=KEY) as session:
                async with session.get(f"{running.base_url}/admin/events") as answer:
                    assert answer.content_type == "text/event-stream"
                    first, second = await next_event(answer), await next_event(answer)
                    assert second["time"] > first["time"] and first["ready"] and not first["draining"]
                    assert first["pools"]["stable"]["requests"] == 1 and first["pools"]["stable"]["ttft_p95_s"] > 0
                    assert [{"replica": one.url, "pool": "stable"}, 1.0] in first["samples"]["replica_healthy"]
                    [tokens] = [
                        n for labels, n in first["samples"]["replica_tokens_total"] if labels["pool"] == "stable"
                    ]
                    assert tokens == first["pools"]["stable"]["output_tokens"] > 0
                    assert first["releases"][0]["name"] == "r" and first["scaling"] == first["registered"] == []
                    await running.service.drain(0.0)  # which no page holds up
                    await asyncio.wait_for(answer.read(), 30)


@contextlib.asynccontextmanager
async def followed(token_file):
    """A gateway, and the response of its events after the first of them."""
    async with gateway(admin_token_file=token_file, replicas="registered") as running:
        async with aiohttp.ClientSession(headers=KEY) as session:
            async with session.get(f"{running.base_url}/admin/events") as answer:
                await next_event(answer)
                yield running, answer


async def test_events_end_once_their_token_holds_no_more(token_file, monkeypatch):
    monkeypatch.setattr(console, "PERIOD_S", 0.02)
    async with followed(token_file) as (running, answer):
        token_file.write_text("another-token-16")
        await asyncio.wait_for(answer.read(), 20)
        assert (await get(running, "/admin/events", **KEY))[0] == 401


async def test_more_pages_than_allowed_are_refused(token_file, monkeypatch):
    monkeypatch.setattr(console, "MAX_READERS", 1)
    async with followed(token_file) as (running, _):
        status, _, text = await get(running, "/admin/events", **KEY)
        assert status == 429 and "1 pages are connected" in text


async def test_decisions_of_a_scaler_are_kept_where_they_change(token_file, monkeypatch):
    monkeypatch.setattr(console, "PERIOD_S", 0.01)
    async with gateway(admin_token_file=token_file, replicas="registered") as running:
        async with aiohttp.ClientSession(headers=KEY) as session:

            async def report(*decisions: dict) -> tuple[int, str]:
                async with session.put(f"{running.base_url}/admin/scaling", json={"decisions": decisions}) as answer:
                    return answer.status, await answer.text()

            small = {"pool": "a", "replicas": 1, "reason": "nothing to do", "rule": "floor"}
            for decision in (small, small, {**small, "replicas": 3, "reason": "<b>load</b>"}):
                assert (await report(decision, {**small, "pool": "b", "at": 5.0}))[0] == 200
            async with session.get(f"{running.base_url}/admin/events") as answer:
                kept = (await next_event(answer))["scaling"]
            assert [(one["pool"], one["replicas"]) for one in kept] == [("a", 3), ("b", 1), ("a", 1)]
            assert kept[0]["reason"] == "<b>load</b>" and kept[1]["at"] == 5.0
            for wrong, message in (
                ({**small, "replicas": -1}, "decisions.0.replicas"),
                ({**small, "reason": "x" * 2001}, "decisions.0.reason"),
                ({"pool": "a", "replicas": 1}, "decisions.0.reason"),
            ):
                status, text = await report(wrong)
                assert status == 400 and message in text
