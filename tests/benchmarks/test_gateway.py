"""The gateway's benchmark: what it says is what was scripted, and who misses a goal is told so."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

from benchmarks.gateway import burst, contenders, driven, load, relaying, run, script
from benchmarks.gateway.asked import Asked
from benchmarks.gateway.load import Plan
from benchmarks.gateway.relaying import Relayed
from benchmarks.gateway.script import Pace
from clients.wire import infer_request
from clients.wire.request import build
from clients.wire.response_reader import ResponseReader

PACE = Pace(0.05, 0.01, 0.0)


def test_a_pace_is_read_back_from_anywhere_in_a_request():
    pace = Pace(0.25, 0.02, 0.004)
    assert script.pace_of(infer_request.generation(build(pace.prompt()), "ensemble")) == pace
    assert script.pace_of(b'{"prompt": "hello"}') == Pace()


def test_tokens_are_due_in_order_and_never_before_the_first():
    due = Pace(0.1, 0.01, 0.05).instants(50, 100.0, random.Random(1))
    assert due[0] == 100.1 and due == sorted(due) and len(due) == 50


def test_a_token_that_arrives_tells_how_long_it_travelled():
    asked, before_ns = Asked(), time.monotonic_ns()
    asked.read(b"data: " + script.stamp() + b" " + script.stamp())
    asked.read(b": keep-alive")
    assert asked.tokens == 2 and len(asked.gaps_ns) == 1
    assert 0 <= max(asked.travelled_ns) <= time.monotonic_ns() - before_ns


def test_arrivals_are_as_many_as_their_phases_ask_for():
    found = load.arrivals(((10.0, 20.0), (500.0, 2.0)), random.Random(1))
    assert found == sorted(found)
    assert 150 < sum(at < 20 for at in found) < 250 and 900 < sum(at >= 20 for at in found) < 1100


def test_recovery_is_counted_from_the_bursts_end_to_the_last_bad_window():
    def row(at_s, ttft_s, end="ok"):
        return [at_s, ttft_s, ttft_s, end, False]

    good = [row(10 + n / 10, 0.05) for n in range(100)]
    assert burst.recovered_s(good, 50.0, 10.0, 20.0) == 0.0
    assert burst.recovered_s([*good, row(11.2, 0.0, "refused")], 50.0, 10.0, 20.0) == 1.5
    assert burst.recovered_s([row(10 + n / 10, 0.5) for n in range(100)], 50.0, 10.0, 20.0) == float("inf")


def test_a_goal_is_missed_by_what_is_over_it():
    direct = Relayed("replica itself", "", 16, True, tokens=100, ttft_ms=[1.0] * 99, travelled_ms=[0.1] * 99)
    slow = Relayed("gateway, http", "replica itself", 16, True, 100, 1.0, 0.02, [1.5] * 99, [1.2] * 99, [1.0])
    verdicts = {what: met for what, _, _, met in run.goals([direct, slow], [], [])}
    assert verdicts["gateway, http, 16 streams paced: added to the first token, p50, ms, at most"] is True
    assert verdicts["gateway, http, 16 streams paced: added to a token, p50, ms, at most"] is False
    assert verdicts["gateway, http, 16 streams paced: CPU, µs per token, at most"] is False
    slow.errors = {"status 500": 1}
    assert not {what: met for what, _, _, met in run.goals([direct, slow], [], [])}[
        "gateway, http, 16 streams paced: requests failed, at most"
    ]


@pytest.mark.slow
def test_the_scripted_replica_answers_as_the_ensemble_does(tmp_path: Path):
    """The official client's messages and ours read it alike."""
    asked = build(PACE.prompt(), max_tokens=3, request_id="mine")
    with contenders.scripted("replica", tmp_path) as url, grpc.insecure_channel(url) as channel:
        call = channel.unary_stream(infer_request.GENERATE)(infer_request.generation(asked, "ensemble"), timeout=60)
        messages = list(call)
    answer = ResponseReader(asked)
    deltas = [answer.read(data) for data in messages]
    assert [delta.token_ids for delta in deltas] == [(0,), (1,), (2,)] and answer.complete
    assert answer.last.usage.output_tokens == 3
    for data in messages:
        inner = service_pb2.ModelStreamInferResponse.FromString(data).infer_response
        assert inner.id == "mine" and len(inner.outputs) == len(inner.raw_output_contents)


@pytest.mark.slow
def test_every_token_is_seen_through_both_doors_and_from_both_sources(tmp_path: Path):
    wanted = {"tokens": 5, "streams": 3, "ramp_s": 0.1}
    with contenders.scripted("replica", tmp_path) as replica, contenders.gateway(replica, tmp_path) as ours:
        for door, url in (("grpc", replica), *ours.doors.items()):
            found = driven.drive(Plan(door, url, PACE, **wanted), ours, tmp_path)
            assert found.seen.ends == {"ok": 3} and found.seen.tokens == 15, door
            assert min(found.seen.ttft_ms) >= 50 and found.peak_rss_bytes > 0
        refused = driven.drive(Plan("http", ours.doors["http"], PACE, model="none", **wanted), ours, tmp_path)
        assert refused.errors == {"status 404": 3}
    with contenders.scripted("openai", tmp_path) as upstream:
        found = driven.drive(Plan("http", upstream, PACE, **wanted), None, tmp_path)
        assert found.seen.ends == {"ok": 3} and found.seen.tokens == 15


@pytest.mark.slow
def test_an_unknown_part_is_refused_by_name():
    command = [sys.executable, "-m", "benchmarks", "gateway", "--only", "speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "only" in done.stderr and "latency" in done.stderr


def test_a_spread_of_nothing_is_nan():
    assert relaying.spread([])["p50"] != relaying.spread([])["p50"]
