"""Pages of real gateways, added up; pages that are late, wrong or gone; gateways that are told what was decided."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from cluster.scaling.law import Decision
from cluster.scaling.reader import MAX_BYTES, Reader
from contract.errors import InvalidArgument
from tests.gateway.running import gateway

PAGE = """\
# HELP trident_gateway_pool_ready 1
trident_gateway_pool_ready{{pool="main"}} 1.0
trident_gateway_pool_waiting{{pool="main"}} 3.0
trident_gateway_pool_running{{pool="main"}} 2.0
trident_gateway_pool_token_cost{{pool="main"}} 0.5
trident_gateway_pool_drain_tokens_per_second{{pool="main"}} {drain}
trident_gateway_pool_backlog_tokens{{pool="main",priority="1",state="queued"}} {queued}
trident_gateway_pool_backlog_tokens{{pool="main",priority="1",state="running"}} 40.0
trident_gateway_pool_arrived_tokens_total{{pool="main"}} {arrived}
trident_gateway_pool_starting{{pool="main"}} {starting}
trident_gateway_pool_starting_seconds{{pool="main"}} 7.5
trident_gateway_replica_healthy{{replica="a:1",pool="main"}} 1.0
trident_gateway_replica_healthy{{replica="b:1",pool="main"}} {healthy}
trident_gateway_replica_slots{{replica="a:1",pool="main"}} 8.0
trident_gateway_replica_slots{{replica="b:1",pool="main"}} 0.0
trident_gateway_replica_tokens_per_second{{replica="a:1",pool="main"}} {speed}
trident_gateway_replica_tokens_per_second{{replica="b:1",pool="main"}} 0.0
other_metric{{x="y"}} NaN
"""
LARGE = "x" * (MAX_BYTES + 1)
USUAL = {"drain": 0, "queued": 100, "arrived": 1000, "healthy": 0, "speed": 200, "starting": 0}


def page(**more: object) -> str:
    return PAGE.format(**{**USUAL, **more})


class Pages:
    """Serves what ``texts`` says at /1, /2, …; an exception's status where it is a number, silence for None."""

    def __init__(self) -> None:
        self.texts: dict[str, str | int | None] = {}
        self.base = ""

    def reader(self, *names: str, **more: float) -> Reader:
        return Reader([f"{self.base}/{name}" for name in names], **more)

    async def handle(self, request: web.Request) -> web.Response:
        text = self.texts[request.match_info["name"]]
        if text is None:
            await asyncio.sleep(30)
        if isinstance(text, int):
            return web.Response(status=text)
        return web.Response(text=text)


@pytest.fixture
async def pages() -> AsyncIterator[Pages]:
    found, app = Pages(), web.Application()
    app.router.add_get("/{name}", found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


@contextlib.asynccontextmanager
async def session(timeout_s: float = 60.0) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout_s)) as http:
        yield http


async def test_gateways_add_up_and_replicas_are_counted_once(pages: Pages):
    pages.texts = {"1": page(starting=2), "2": page(queued=50, healthy=1, speed=100)}
    reader = pages.reader("1", "2")
    async with session() as http:
        await reader.read(http)
        load = reader.load("main")
        assert load is not None and load.complete and reader.pools() == ["main"] and not reader.problems()
        assert load.queued == {1: 150.0} and load.running == {1: 80.0}
        assert (load.queued_requests, load.running_requests) == (6, 4)
        assert (load.starting, load.starting_s) == (2, 7.5)
        assert load.ready == 2 and load.slots == 8 and load.cost == 0.5
        assert load.tokens_per_s == 150  # the mean of what two gateways measured at the same replica
        assert load.arrived_per_s is None  # one reading is no rate
        assert reader.load("other") is None
        pages.texts["1"] = page(arrived=1500)
        await asyncio.sleep(0.05)
        await reader.read(http)
        rate = reader.load("main").arrived_per_s
        assert rate is not None and 0 < rate < 500 / 0.05


async def test_what_the_whole_pool_drains_stands_in_for_a_capacity_that_is_not_measured(pages: Pages):
    pages.texts = {"1": page(speed=0, drain=600, healthy=1)}
    reader = pages.reader("1")
    async with session() as http:
        await reader.read(http)
    assert reader.load("main").tokens_per_s == 600 * 0.5 / 2


async def test_pages_that_are_read_rarely_tell_the_rate_all_the_same(
    pages: Pages, clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cluster.scaling.reader.time", SimpleNamespace(monotonic=clock))
    reader = pages.reader("1")
    async with session() as http:
        for arrived, rate in ((1000, 0), (1600, 10), (2800, 20)):
            pages.texts = {"1": page(arrived=arrived)}
            await reader.read(http)
            assert (reader.load("main").arrived_per_s or 0) == pytest.approx(rate)
            clock.advance(60)


async def test_a_gateway_that_starts_again_does_not_turn_the_rate_negative(pages: Pages):
    reader = pages.reader("1")
    async with session() as http:
        for arrived in (1000, 5):
            pages.texts = {"1": page(arrived=arrived)}
            await reader.read(http)
        assert reader.load("main").arrived_per_s is None
        pages.texts = {"1": page(arrived=25)}
        await reader.read(http)
        assert reader.load("main").arrived_per_s > 0


@pytest.mark.parametrize(
    "broken",
    [
        503,
        None,
        "hello",
        "",
        page(queued="NaN"),
        page(queued=-1),
        page(queued=1e300),
        page().replace('priority="1"', 'priority="high"'),
        LARGE,
        "trident_gateway_pool_arrived_tokens_total{ 1",
    ],
)
async def test_a_page_that_fails_makes_the_sum_incomplete_and_then_unknown(
    pages: Pages, broken: str | int | None, clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("cluster.scaling.reader.time", SimpleNamespace(monotonic=clock))
    pages.texts = {"1": page(), "2": page()}
    reader = pages.reader("1", "2", stale_s=15.0)
    async with session(0.5 if broken is None else 60.0) as http:
        await reader.read(http)
        pages.texts["2"] = broken
        await reader.read(http)
        assert reader.load("main").complete  # the latest reading is young enough
        assert len(reader.problems()) == 1
        clock.advance(16)
        await reader.read(http)
        load = reader.load("main")
        assert not load.complete and load.queued == {1: 100.0}
        pages.texts["1"] = broken
        clock.advance(16)
        await reader.read(http)
        assert reader.load("main") is None and reader.pools() == []
        pages.texts = {"1": page(), "2": page()}
        await reader.read(http)
        assert reader.load("main").complete and not reader.problems()


async def test_every_address_of_a_name_is_a_gateway(monkeypatch: pytest.MonkeyPatch, pages: Pages):
    reader = Reader(["dns:///gateways:9002"])
    loop, found = asyncio.get_running_loop(), ["127.0.0.1", "::1"]

    async def addresses(name: str, port: int, **more: object) -> list:
        assert (name, port) == ("gateways", 9002)
        if not found:
            raise OSError("no such name")
        return [(0, 0, 0, "", (host, port)) for host in found]

    monkeypatch.setattr(loop, "getaddrinfo", addresses)
    read: list[str] = []

    async def note(http: object, url: str, page: object) -> None:
        read.append(url)

    monkeypatch.setattr(reader, "_read", note)
    async with session() as http:
        await reader.read(http)
        assert read == ["http://127.0.0.1:9002/metrics", "http://[::1]:9002/metrics"]
        found.clear()
        await reader.read(http)
        assert read[2:] == read[:2]  # those that were known stay


@pytest.mark.parametrize("name", ["no-such-name.invalid", "a..b"])
async def test_a_name_that_never_resolves_is_unknown_and_logged_once(name: str, caplog: pytest.LogCaptureFixture):
    reader = Reader([f"dns:///{name}:9002"])
    async with session() as http:
        for _ in range(3):
            await reader.read(http)
    assert len([record for record in caplog.records if "does not resolve" in record.message]) == 1
    assert reader.load("main") is None and "has not resolved" in str(reader.problems())


@pytest.mark.parametrize(
    "url",
    [
        "localhost:9002",
        "ftp://host/x",
        "http://",
        "dns:///name",
        "dns:///:1",
        "dns:///a:0",
        "http://h:x/",
        "http://h:0/",
    ],
)
def test_wrong_addresses_are_named(url: str):
    with pytest.raises(InvalidArgument, match="must be http://HOST:PORT/metrics or dns:///NAME:PORT, got"):
        Reader([url])


def test_no_address_is_no_reader():
    with pytest.raises(InvalidArgument, match="must name one metrics page at least"):
        Reader([" "])


DECISION = Decision(3, "load", "1,840 tokens/s are expected: 3 replicas", 1, 1840.0, 1840.0, 700.0)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    return path


def telling(consoles: str, token: Path) -> Reader:
    return Reader(["http://127.0.0.1:9"], consoles=consoles, token_file=token)


async def shown(base_url: str) -> list[dict]:
    async with aiohttp.ClientSession(headers={"authorization": "Bearer 0123456789abcdef"}) as session:
        async with session.get(f"{base_url}/admin/events") as answer:
            event = await answer.content.readuntil(b"\n\n")
    return json.loads(event.removeprefix(b"data: "))["scaling"]


async def test_gateways_show_what_was_decided_once(token):
    async with gateway(admin_token_file=token, replicas="registered") as running, aiohttp.ClientSession() as http:
        for where in (f"127.0.0.1:9,127.0.0.1:{running.port}", f"dns:///localhost:{running.port}"):
            told = telling(where, token)
            await told.tell(http)
            told.decisions["main"] = DECISION
            await told.tell(http)
            await told.tell(http)
        [entry] = await shown(running.base_url)
        assert (entry["pool"], entry["replicas"], entry["reason"]) == ("main", 3, DECISION.reason)


async def test_a_gateway_that_is_away_or_refuses_is_logged_once(token, caplog):
    async with gateway(admin_token_file=token, replicas="registered") as running, aiohttp.ClientSession() as http:
        away, refusing = telling("127.0.0.1:9", token), telling(f"127.0.0.1:{running.port}", token.with_name("other"))
        for reader in (away, refusing):
            reader.decisions["main"] = DECISION
            await reader.tell(http)
            await reader.tell(http)
        assert [record.getMessage()[:39] for record in caplog.records] == [
            "decisions cannot be told to the gateway"
        ] * 2
        token.with_name("other").write_text("another-token-0123")
        await refusing.tell(http)
        assert await shown(running.base_url) == []


def test_addresses_are_checked_when_it_is_made(token):
    with pytest.raises(InvalidArgument, match="consoles: must be HOST:PORT,HOST:PORT or dns:///NAME:PORT, got"):
        telling("http://127.0.0.1:9000", token)
