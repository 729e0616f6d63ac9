"""When two clients agree; ``make bench-clients`` runs the real ones."""

import json
import time

import pytest

from benchmarks import agreement, figures
from benchmarks.agreement import Comparison, Offered
from benchmarks.other_clients import Tool
from benchmarks.prompts import Prompts
from benchmarks.target import Target
from contract.errors import EngineFailed, InvalidArgument
from contract.generation import FinishReason
from tests.fakes.replica import Script


def test_clients_agree_if_their_medians_differ_by_no_more_than_their_rounds():
    one = Comparison("other", "8 at once")
    for ours, theirs in ((100.0, 110.0), (118.0, 112.0), (105.0, 111.0)):
        one.add({"requests/s": ours, "TTFT p50, ms": 1.0}, {"requests/s": theirs})
    assert [met for *_, met in one.goals()] == [True] and list(one.theirs) == ["requests/s"]
    far = Comparison("other", "8 at once", {"x": [100.0, 101.0]}, {"x": [120.0, 121.0]})
    assert not far.goals()[0][3] and not Comparison("other", "8 at once", far.theirs, far.ours).goals()[0][3]
    assert "NO" in agreement.described([far]) and "yes" in agreement.described([one])
    [(label, apart)] = agreement.compared([far]).items()
    assert label == "clients apart, factor: other, x, 8 at once" and apart["values"] == [1.2, 121 / 101]


def test_the_cpu_of_the_clients_is_told_and_not_compared():
    one = Comparison("other", "8 at once", {agreement.CPU: [0.1]}, {agreement.CPU: [5.0]})
    assert "NO" not in agreement.described([one]) and not agreement.compared([one]) and not one.goals()
    assert agreement.share(one) == "other, 8 at once: 5.0 s of CPU, its start included; ours 0.1"


def test_a_load_is_of_streams_or_of_even_instants():
    assert str(Offered(4)) == "4 at once" and Offered(4).workload(9, True, 0).concurrency == 4
    load = Offered(per_s=2.0).workload(3, False, 0)
    assert str(Offered(per_s=2.0)) == "2 a second" and not load.stream
    assert [arrival.at_s for arrival in load.schedule(10.0)] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("load", [Offered(2), Offered(per_s=100.0)])
def test_every_request_of_ours_counts_also_the_first(load, monkeypatch):
    seen = []

    class Instant(Target):
        async def send(self, request, record):
            record.messages, record.finish_reason = [(time.monotonic(), request.max_tokens)], "length"

    monkeypatch.setattr(figures, "compute", lambda *of, compute=figures.compute: seen.append(compute(*of)) or seen[-1])
    agreement.ours(Instant(), Prompts(), load.workload(6, True, 1), 6)
    assert seen[0].requests == seen[0].ok == 6


@pytest.mark.slow
def test_loads_are_measured_in_turns_and_a_client_that_cannot_run_is_told(replica, tmp_path, monkeypatch, capsys):
    server, asked = replica(lambda seen: Script(tuple("abcd"), FinishReason.LENGTH)), []

    def tool(url, prompts, stream):
        def command(load, requests, seed, folder):
            asked.append((*load, requests))
            return ["true"]

        read = lambda folder: {"requests/s": 100.0, "latency p50, ms": 10.0}  # noqa: E731
        return Tool("perf_analyzer", "--streams", "--rate", (), command, read, {})

    def missing(*_):
        raise EngineFailed("no AIPerf today")

    monkeypatch.setattr(agreement.other_clients, "perf_analyzer", tool)
    monkeypatch.setattr(agreement.peer_servers, "gateway", missing)
    monkeypatch.setattr(agreement.manifest, "load", lambda folder: None)
    names = ["perf_analyzer", "AIPerf"]
    assert agreement.run(names, "none", server.url, (2,), (50.0,), 4, 1, False, tmp_path) == 0
    assert asked == [("--streams", "2", 4), ("--rate", "50", 4)]
    kept = json.loads((tmp_path / "clients.json").read_text())
    assert [one["load"] for one in kept["comparisons"]] == ["2 at once", "50 a second"] and len(kept["goals"]) == 4
    assert agreement.run(["AIPerf"], "none", "", (2,), (), 4, 1, False, tmp_path) == 1
    assert "skipped: AIPerf: no AIPerf today" in capsys.readouterr().out
    for client, url in (("perf_analyzer", "http://127.0.0.1:9000"), ("AIPerf", server.url)):
        with pytest.raises(InvalidArgument, match=f"url: must be HOST:PORT for perf_analyzer, .* got '{url}'"):
            agreement.run([client], "none", url, (2,), (), 4, 1, False, tmp_path)
