import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import scrape
from benchmarks.scrape import Histogram
from contract.errors import Unavailable
from contract.prometheus import parse

TEXT = """ttft_bucket{model="a",le="0.1"} 1
ttft_bucket{model="a",le="+Inf"} 4
ttft_bucket{model="b",le="0.1"} 2
ttft_bucket{model="b",le="+Inf"} 2
ttft_sum{model="a"} 0.9
ttft_sum{model="b"} 0.1
"""


def test_histograms_that_match_are_added_up():
    assert scrape.histogram(parse(TEXT), "ttft") == Histogram((0.1, math.inf), (3.0, 6.0), 1.0)
    assert scrape.histogram(parse(TEXT), "ttft", model="b") == Histogram((0.1, math.inf), (2.0, 2.0), 0.1)


def test_a_server_that_does_not_run_is_unavailable(unused_tcp_port):
    with pytest.raises(Unavailable, match=str(unused_tcp_port)):
        scrape.fetch(f"http://127.0.0.1:{unused_tcp_port}/metrics")


@given(st.lists(st.floats(0, 9.9), min_size=1, max_size=50), st.floats(0, 1))
def test_a_bucketed_quantile_lies_in_the_bucket_of_the_true_one(values, fraction):
    bounds = (1.0, 2.0, 5.0, 10.0, math.inf)
    cumulative = tuple(float(sum(value <= bound for value in values)) for bound in bounds)
    found = Histogram(bounds, cumulative, sum(values)).quantile(fraction)
    rank = max(1, math.ceil(fraction * len(values)))
    true = sorted(values)[rank - 1]
    upper = next(bound for bound in bounds if true <= bound)
    lower = max((bound for bound in (0.0, *bounds) if bound < upper), default=0.0)
    assert lower <= found <= upper


def test_a_quantile_beyond_the_last_bound_is_that_bound():
    assert Histogram((1.0, math.inf), (1.0, 4.0), 9.0).quantile(0.99) == 1.0
    assert math.isnan(Histogram((), (), 0.0).quantile(0.5)) and math.isnan(Histogram((), (), 0.0).mean)


def test_a_server_that_was_restarted_meanwhile_counts_from_the_start():
    before, now = Histogram((1.0, math.inf), (3.0, 5.0), 9.0), Histogram((1.0, math.inf), (1.0, 2.0), 3.0)
    assert now - before == now and Histogram((), (), 0.0) - before == Histogram((), (), 0.0)
    assert (now - Histogram((), (), 0.0), before - now) == (now, Histogram((1.0, math.inf), (2.0, 3.0), 6.0))


BEFORE = """# HELP trident_requests_total Finished requests
# TYPE trident_requests_total counter
trident_requests_total{finish_reason="stop",model="engine",version="1"} 3
trident_requests_total{finish_reason="length",model="engine",version="1"} 1
trident_output_tokens_total{model="engine",version="1"} 100
nv_trt_llm_request_metrics{model="engine",request_type="active",version="1"} 0
gen_ai_server_time_to_first_token_seconds_bucket{model="engine",le="0.1"} 1
gen_ai_server_time_to_first_token_seconds_bucket{model="engine",le="0.5"} 4
gen_ai_server_time_to_first_token_seconds_bucket{model="engine",le="+Inf"} 4
gen_ai_server_time_to_first_token_seconds_sum{model="engine"} 0.9
gen_ai_server_time_to_first_token_seconds_count{model="engine"} 4
"""
AFTER = """trident_requests_total{finish_reason="stop",model="engine",version="1"} 3
trident_requests_total{finish_reason="length",model="engine",version="1"} 11
trident_cancellations_total{reason="client",model="engine"} 2
trident_output_tokens_total{model="engine",version="1"} 1.4e3
trident_input_tokens_total{model="engine",version="1"} 5
gen_ai_server_time_to_first_token_seconds_bucket{model="engine",le="0.1"} 6
gen_ai_server_time_to_first_token_seconds_bucket{model="engine",le="0.5"} 14
gen_ai_server_time_to_first_token_seconds_bucket{model="engine",le="+Inf"} 14
gen_ai_server_time_to_first_token_seconds_sum{model="engine"} 2.9
trident_time_to_first_token_phase_seconds_bucket{model="engine",phase="queue",le="+Inf"} 10
trident_time_to_first_token_phase_seconds_sum{model="engine",phase="queue"} 1.5
trident_time_to_first_token_phase_seconds_bucket{model="engine",phase="prefill",le="+Inf"} 10
trident_time_to_first_token_phase_seconds_sum{model="engine",phase="prefill"} 0.5
"""


def test_the_server_s_figures_are_what_grew_during_the_run():
    found = scrape.difference(parse(BEFORE), parse(AFTER))
    assert found.requests == {"length": 10} and found.cancellations == {"client": 2}
    assert (found.output_tokens, found.input_tokens) == (1300, 5)
    ttft = found.latencies["ttft"]
    assert ttft.count == 10 and ttft.mean_s == pytest.approx(0.2) and ttft.p50_s == pytest.approx(0.1)
    assert ttft.p95_s == pytest.approx(0.1 + 0.4 * 4.5 / 5)
    assert found.phases["queue"].mean_s == pytest.approx(0.15) and found.bottleneck == "queue"
    assert math.isnan(found.phases["tokenize"].mean_s)


def test_metrics_of_another_server_yield_no_figures():
    metrics = parse("up 1\n")
    found = scrape.difference(metrics, metrics)
    assert found.requests == {} and found.bottleneck == "" and found.latencies["ttft"].count == 0
