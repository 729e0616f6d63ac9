"""The tour against replicas that batch in flight, and one that does not."""

from __future__ import annotations

import json

import pytest

from clients import AsyncClient, demo
from tests.fakes.replica import FakeReplica, Script, SeenRequest, echo

pytestmark = pytest.mark.slow


def paced(seen: SeenRequest) -> Script:
    script = echo(seen)
    return Script(script.tokens, script.finish_reason, first_token_s=0.002, gap_s=0.002)


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(demo, "_STAGE_S", 0.5)


async def test_the_tour_shows_the_figures_and_proves_in_flight_batching(quick, monkeypatch, capsys) -> None:
    async with FakeReplica(paced) as replica, AsyncClient(replica.url) as client:
        monkeypatch.setenv("TRIDENT_METRICS_URL", replica.metrics_url)
        assert await demo.tour(client) == 0
    shown = capsys.readouterr().out
    assert shown.count("def fibonacci(n):") > 1
    for part in ("time to first token", "inter-token latency", "tokens/s", "before the other ended", "8 streams"):
        assert part in shown
    assert f"read from {replica.metrics_url}: 8\n" in shown


async def test_a_question_is_asked_as_a_chat(quick, monkeypatch, capsys) -> None:
    async with FakeReplica(paced) as replica, AsyncClient(replica.url) as client:
        monkeypatch.setenv("TRIDENT_METRICS_URL", replica.metrics_url)
        assert await demo.tour(client, "Why is the sky blue?") == 0
        assert json.loads(replica.seen[0].value("messages")) == [{"role": "user", "content": "Why is the sky blue?"}]
    shown = capsys.readouterr().out
    assert "An answer from" in shown and "> Why is the sky blue?\n" in shown and "def fibonacci" not in shown


async def test_a_server_that_takes_one_request_at_a_time_is_found_out(quick, monkeypatch, capsys) -> None:
    async with FakeReplica(paced, slots=1) as replica, AsyncClient(replica.url) as client:
        monkeypatch.setenv("TRIDENT_METRICS_URL", replica.metrics_url)
        assert await demo.tour(client) == 1
    shown = capsys.readouterr().out
    assert "AFTER the other ended" in shown
    assert f"read from {replica.metrics_url}: 1\n" in shown


async def test_a_first_run_that_no_sample_of_the_metrics_fell_into_is_repeated(quick, monkeypatch, capsys) -> None:
    async with FakeReplica(paced) as replica, AsyncClient(replica.url) as client:
        sampled, runs = demo._most_sequences, []

        async def starved() -> tuple[float, str]:
            runs.append(None)
            seen = await sampled()
            return (1.0, "") if len(runs) == 1 else seen

        monkeypatch.setattr(demo, "_most_sequences", starved)
        monkeypatch.setenv("TRIDENT_METRICS_URL", replica.metrics_url)
        assert await demo.tour(client) == 0
    assert len(runs) == 2
    assert f"read from {replica.metrics_url}: 8\n" in capsys.readouterr().out


async def test_without_a_metrics_page_the_tour_says_so(quick, monkeypatch, capsys, unused_tcp_port) -> None:
    async with FakeReplica(paced) as replica, AsyncClient(replica.url) as client:
        monkeypatch.setenv("TRIDENT_METRICS_URL", f"http://127.0.0.1:{unused_tcp_port}/metrics")
        assert await demo.tour(client) == 0
    assert "Sequences per engine step: unknown" in capsys.readouterr().out
