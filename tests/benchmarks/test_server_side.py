import math

import pytest

from benchmarks import server_side
from contract.prometheus import parse

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
    found = server_side.difference(parse(BEFORE), parse(AFTER))
    assert found.requests == {"length": 10} and found.cancellations == {"client": 2}
    assert (found.output_tokens, found.input_tokens) == (1300, 5)
    ttft = found.latencies["ttft"]
    assert ttft.count == 10 and ttft.mean_s == pytest.approx(0.2) and ttft.p50_s == pytest.approx(0.1)
    assert ttft.p95_s == pytest.approx(0.1 + 0.4 * 4.5 / 5)
    assert found.phases["queue"].mean_s == pytest.approx(0.15) and found.bottleneck == "queue"
    assert math.isnan(found.phases["tokenize"].mean_s)


def test_metrics_of_another_server_yield_no_figures():
    metrics = parse("up 1\n")
    found = server_side.difference(metrics, metrics)
    assert found.requests == {} and found.bottleneck == "" and found.latencies["ttft"].count == 0
