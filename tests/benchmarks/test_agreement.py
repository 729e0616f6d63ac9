"""When two clients agree; ``make bench-clients`` runs the real ones."""

import random

from benchmarks import agreement, perf_analyzer
from benchmarks.agreement import Comparison


def test_clients_agree_if_their_medians_differ_by_no_more_than_their_rounds():
    one = Comparison("other", 8)
    for ours, theirs in ((100.0, 110.0), (118.0, 112.0), (105.0, 111.0)):
        one.add({"requests/s": ours, "TTFT p50, ms": 1.0}, {"requests/s": theirs})
    assert one.agrees("requests/s") and list(one.theirs) == ["requests/s"]
    far = Comparison("other", 8, {"x": [100.0, 101.0]}, {"x": [120.0, 121.0]})
    assert not far.agrees("x") and not Comparison("other", 8, far.theirs, far.ours).agrees("x")
    assert "NO" in agreement.described([far]) and "yes" in agreement.described([one])
    [apart] = agreement.compared([far]).values()
    assert apart["values"] == [1.2, 121 / 101]


def test_prompts_are_those_of_the_other_clients_file():
    prompts = agreement.GivenPrompts(perf_analyzer.INPUTS / "streaming.json")
    assert prompts.text(random.Random(1), 128) in (perf_analyzer.INPUTS / "streaming.json").read_text()
