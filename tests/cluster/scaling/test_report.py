"""What scalers decide reaches every gateway's page, and a gateway that is away stops nothing."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from cluster.scaling.law import Decision
from cluster.scaling.report import Report
from contract.errors import InvalidArgument
from tests.gateway.running import gateway

DECISION = Decision(3, "load", "1,840 tokens/s are expected: 3 replicas", 1, 1840.0, 1840.0, 700.0)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    return path


async def shown(base_url: str) -> list[dict]:
    async with aiohttp.ClientSession(headers={"authorization": "Bearer 0123456789abcdef"}) as session:
        async with session.get(f"{base_url}/admin/events") as answer:
            event = await answer.content.readuntil(b"\n\n")
    return json.loads(event.removeprefix(b"data: "))["scaling"]


async def test_gateways_show_what_was_decided_once(token):
    async with gateway(admin_token_file=token, replicas="registered") as running, aiohttp.ClientSession() as http:
        for where in (f"127.0.0.1:9,127.0.0.1:{running.port}", f"dns:///localhost:{running.port}"):
            report = Report(where, token)
            await report.send(http)
            report.decisions["main"] = DECISION
            await report.send(http)
            await report.send(http)
        [entry] = await shown(running.base_url)
        assert (entry["pool"], entry["replicas"], entry["reason"]) == ("main", 3, DECISION.reason)


async def test_a_gateway_that_is_away_or_refuses_is_logged_once(token, caplog):
    async with gateway(admin_token_file=token, replicas="registered") as running, aiohttp.ClientSession() as http:
        away, refusing = Report("127.0.0.1:9", token), Report(f"127.0.0.1:{running.port}", token.with_name("other"))
        for report in (away, refusing):
            report.decisions["main"] = DECISION
            await report.send(http)
            await report.send(http)
        assert [record.getMessage()[:39] for record in caplog.records] == [
            "decisions cannot be told to the gateway"
        ] * 2
        token.with_name("other").write_text("another-token-0123")
        await refusing.send(http)
        assert await shown(running.base_url) == []


def test_addresses_are_checked_when_it_is_made(token):
    with pytest.raises(InvalidArgument, match="consoles: must be HOST:PORT,HOST:PORT or dns:///NAME:PORT, got"):
        Report("http://127.0.0.1:9000", token)
