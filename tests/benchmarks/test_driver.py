"""The load generator against servers whose latencies are known. Only lower bounds of times are asserted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks import driver, figures
from benchmarks.arrivals import Arrival, Trace
from benchmarks.driver import Extent, Load, Share
from benchmarks.lengths import Fixed
from benchmarks.prompts import Prompts
from benchmarks.target import DeltaTarget, EnsembleTarget
from benchmarks.workload import Workload
from contract.errors import EngineFailed, Overloaded
from contract.generation import FinishReason, TokenDelta
from tests.fakes.replica import FakeReplica, Script

pytestmark = pytest.mark.slow

COUNT = Extent(None, 0.0, 12)


def paced(tokens=5, **options):
    return lambda seen: Script(tuple("abcdefghij"[:tokens]), FinishReason.LENGTH, **options)


async def drive(url, load, extent=COUNT, share=Share()):  # noqa: B008
    target = EnsembleTarget(url)
    try:
        return await driver.drive(load, target, Prompts(), extent, share=share)
    finally:
        await target.close()


async def test_nothing_is_sent_before_instant_zero(monkeypatch):
    """A timer that fires early made requests count as a part of the warm-up."""
    sleep = asyncio.sleep
    monkeypatch.setattr(driver.asyncio, "sleep", lambda delay_s: sleep(delay_s / 2))
    started_s = time.monotonic() + 0.05
    async with FakeReplica(paced()) as server:
        target = EnsembleTarget(server.url)
        for load in (Workload(3, None, Fixed(7), Fixed(5)), Workload(arrivals=ALL_AT_ONCE)):
            result = await driver.drive(load, target, Prompts(), COUNT, start=lambda: started_s)
            assert result.records and all(record.sent_s >= started_s for record in result.records)
        await target.close()


async def test_known_latencies_come_out():
    async with FakeReplica(paced(5, first_token_s=0.04, gap_s=0.02)) as server:
        records = (await drive(server.url, Workload(3, None, Fixed(7), Fixed(5)))).records
    assert [record.index for record in records] == list(range(12))
    for record in records:
        assert record.ok and record.tokens == record.usage_tokens == 5 and record.input_tokens == 7
        assert record.ttft_s >= 0.04 and record.latency_s >= 0.04 + 4 * 0.02
        assert len(record.messages) == 5
    found = figures.compute(records, figures.window_of(records, records[0].intended_s, 0, None))
    assert found.ttft_s.p50 >= 0.04 and found.latency_s.p50 >= 0.12 and found.tokens_per_message == 1


async def test_coalesced_tokens_are_counted_one_by_one():
    async with FakeReplica(paced(10, gap_s=0.03, tokens_per_response=5)) as server:
        records = (await drive(server.url, Workload(2, None, Fixed(7), Fixed(10)))).records
    assert all([count for _, count in record.messages] == [5, 5] for record in records)
    assert figures.of_gaps([gap for one in records for gap in one.gaps]).count == 5 * len(records)


async def test_a_closed_loop_keeps_its_concurrency_and_no_more():
    async with FakeReplica(paced(first_token_s=0.1)) as server:
        await drive(server.url, Workload(4))
        assert (server.counts.most_running, server.counts.started, server.counts.finished) == (4, 12, 12)


ALL_AT_ONCE = Trace(tuple(Arrival(0.001 * n) for n in range(12)))


async def test_an_open_loop_goes_on_sending_when_nothing_is_answered():
    gate = asyncio.Event()
    async with FakeReplica(paced(gate=gate)) as server:
        driving = asyncio.create_task(drive(server.url, Workload(arrivals=ALL_AT_ONCE)))
        while server.counts.running < 12:
            assert not driving.done()
            await asyncio.sleep(0.01)
        gate.set()
        result = await driving
    for number, record in enumerate(result.records):
        assert record.intended_s == result.started_s + 0.001 * number
        assert record.sent_s >= record.intended_s


async def test_an_open_loop_counts_the_queue_of_a_server_that_serves_one_at_a_time():
    async with FakeReplica(paced(1, first_token_s=0.03), slots=1) as server:
        result = await drive(server.url, Workload(arrivals=ALL_AT_ONCE))
    latencies = sorted(record.latency_s for record in result.records)
    # The n-th to be served had to wait for n others, 30 ms each, and was due within the first 11 ms.
    assert all(latency >= 0.03 * (n + 1) - 0.011 for n, latency in enumerate(latencies))


class BlockingTarget(DeltaTarget):
    """A target that blocks the event loop, so that the generator falls behind."""

    def open(self, request):
        time.sleep(0.05)
        return self._answer()

    async def _answer(self):
        yield TokenDelta("a", (1,), (), FinishReason.LENGTH)


async def test_latency_counts_from_the_intended_instant_also_when_the_generator_is_late():
    result = await driver.drive(Workload(arrivals=ALL_AT_ONCE), BlockingTarget(), Prompts(), COUNT)
    for number, record in enumerate(result.records):
        assert record.ttft_s >= 0.05 * (number + 1) - 0.001 * number
    assert max(result.generators[0].lags_s) >= 0.05 - driver.LAG_SAMPLE_S


async def test_the_lag_of_a_loop_that_is_blocked_until_the_end_is_counted():
    overdue_s = time.monotonic() - 1.0  # no request is waited for: all are sent in one turn of the loop
    load = Workload(arrivals=ALL_AT_ONCE)
    result = await driver.drive(load, BlockingTarget(), Prompts(), COUNT, start=lambda: overdue_s)
    assert max(result.generators[0].lags_s) >= 0.05 - driver.LAG_SAMPLE_S


async def test_cancelled_requests_are_no_failures():
    async with FakeReplica(paced(10, gap_s=0.02)) as server:
        load = Workload(2, None, Fixed(5), Fixed(10), cancel_fraction=1.0)
        records = (await drive(server.url, load)).records
        assert server.counts.cancelled > 0
    assert all(record.cancelled and not record.ok and not record.error for record in records)
    planned = [load.request(record.index, Prompts()).cancel_after_tokens for record in records]
    assert [record.tokens for record in records] == planned


async def test_failures_are_records_and_are_not_tried_again():
    async with FakeReplica(lambda seen: Script(refuse=Overloaded("full"))) as server:
        records = (await drive(server.url, Workload(2))).records
        assert server.counts.started == 12
    assert all(record.error == "Overloaded: full" and not record.ok for record in records)


async def test_a_request_has_the_options_of_the_workload():
    async with FakeReplica() as server:
        load = Workload(1, None, Fixed(9), Fixed(3), stream=False)
        records = (await drive(server.url, load, Extent(None, 0.0, 1))).records
        seen = server.seen[0]
    assert seen.value("max_tokens") == 3 and seen.value("ignore_eos") is True and not seen.value("stream")
    assert len(seen.value("text_input").split()) == 9
    assert len(records[0].messages) == 1 and records[0].tokens == 3


async def test_a_duration_ends_a_closed_loop():
    async with FakeReplica(paced(first_token_s=0.01)) as server:
        result = await drive(server.url, Workload(2), Extent(0.2, 0.1))
    assert all(record.intended_s - result.started_s < 0.3 for record in result.records)
    # A request that ends just before the end may leave no time to send another.
    assert max(record.ended_s for record in result.records) - result.started_s > 0.2


@pytest.mark.parametrize("load", [Workload(5), Workload(arrivals=ALL_AT_ONCE)], ids=["closed", "open"])
async def test_shares_of_several_generators_make_one_load(load):
    async with FakeReplica() as server:
        parts = [await drive(server.url, load, share=Share(nth, 3)) for nth in range(3)]
        prompts = sorted(seen.value("text_input") for seen in server.seen)
    assert sorted(record.index for part in parts for record in part.records) == list(range(12))
    assert prompts == sorted(load.request(n, Prompts()).prompt for n in range(12))


async def test_a_load_that_counts_answers_is_warm_once_every_client_had_one():
    async with FakeReplica(paced(5, first_token_s=0.05, gap_s=0.01)) as server:
        result = await drive(
            server.url, Workload(3, None, Fixed(7), Fixed(5)), Extent(0.01, 60.0, answers=6, most_s=60.0)
        )
        begin_s, end_s, steady = result.steady
        firsts = sorted(record.ended_s for record in result.records)[:3]
        assert steady and begin_s >= firsts[-1] and sum(begin_s < r.ended_s <= end_s for r in result.records) >= 6
        longer = await drive(
            server.url, Workload(3, None, Fixed(7), Fixed(5)), Extent(0.25, 60.0, answers=3, most_s=60.0)
        )
        begin_s, end_s, _ = longer.steady
        ended = sum(begin_s < record.ended_s <= end_s for record in longer.records)
        assert end_s - begin_s >= 0.25 and ended > 3 and ended % 3 == 0, "whole rounds of the clients"
        late = await drive(
            server.url, Workload(3, None, Fixed(7), Fixed(5)), Extent(0.01, 0.001, answers=99, most_s=0.2)
        )
        assert late.steady[2] is False and late.steady[1] - late.steady[0] >= 0.2


def load(url, requests=12, **options):
    workload = Workload(4, None, Fixed(5), Fixed(3))
    return Load(workload, Extent(None, 0.0, requests), partial(EnsembleTarget, url), Prompts, **options)


@pytest.mark.parametrize("processes", [1, 2])
def test_generators_share_one_load(replica, processes):
    server = replica()
    result = driver.run(load(server.url), processes)
    assert [record.index for record in result.records] == list(range(12))
    assert all(record.ok for record in result.records) and len(result.generators) == processes
    assert server.counts.started == 12


def test_loads_of_their_own_run_together_while_a_context_is_open(replica):
    server, seen = replica(), []

    class Watch:
        def __enter__(self):
            seen.append(server.counts.started)

        def __exit__(self, *exc):
            seen.append(server.counts.finished)

    loads = [(load(server.url, 5, uvloop=True), Share()), (load(server.url, 7), Share())]
    first, second = driver.run_apart(loads, while_running=Watch())
    assert (len(first.records), len(second.records)) == (5, 7) and seen == [0, 12]
    assert first.started_s == second.started_s


class NotedPrompts(Prompts):
    def __init__(self, notes):
        super().__init__()
        self._notes = notes

    def text(self, rng, tokens, prefix=""):
        with self._notes.open("a") as notes:
            notes.write("made\n")
        return super().text(rng, tokens, prefix)


def test_prompts_are_made_before_the_load_begins(replica, tmp_path):
    made = []

    class Watch(contextlib.nullcontext):
        def __enter__(self):
            made.extend((tmp_path / "notes").read_text().split())

    one = dataclasses.replace(load(replica().url), prompts=partial(NotedPrompts, tmp_path / "notes"))
    driver.run_apart([(one, Share(nth, 2)) for nth in range(2)], while_running=Watch())
    assert made == ["made"] * 12


def test_a_generator_that_fails_is_an_error(replica):
    broken = Load(Workload(1), Extent(None, 0.0, 1), partial(int, "x"), Prompts)
    with pytest.raises(EngineFailed, match="ended with code 1"):
        driver.run_apart([(broken, Share())])


def test_a_generator_that_ends_without_a_result_is_an_error(replica):
    ended = dataclasses.replace(load(replica().url), prompts=partial(sys.exit, 0))
    with pytest.raises(EngineFailed, match="ended with code 0"):
        driver.run_apart([(ended, Share())], timeout_s=5)


def test_a_load_that_takes_too_long_is_an_error(replica):
    with pytest.raises(EngineFailed, match="did not report within 0 s"):
        driver.run_apart([(load(replica().url, 100_000), Share())], timeout_s=0.2)


INTERRUPTED = """
import sys
from functools import partial
from benchmarks.command_line import main
if __name__ == "__main__":
    sys.exit(main(["run", "--url", sys.argv[1], "--generators", "2", "--output", "200", "--duration", "60"]))
"""


def test_ctrl_c_ends_the_generators_without_a_word(replica, tmp_path):
    server = replica(lambda seen: Script(tuple("ab" * 100), FinishReason.LENGTH, gap_s=0.05))
    (program := tmp_path / "program.py").write_text(INTERRUPTED)
    command, environ = (
        [sys.executable, str(program), server.url],
        {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits that it is ignored
    try:
        child = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)
    while not server.counts.started:
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    assert b"Traceback" not in child.communicate()[1] and child.returncode == 130
