"""Metrics of a server, and detection of an idle one."""

from server.server_metrics import IdleDetector, ServerMetrics, parse

METRICS = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
nv_inference_request_success{model="tokenizer",version="1"} 100
nv_inference_request_success{model="detokenizer",version="1"} 40
nv_inference_request_success{model="detokenizer",version="2"} 2
nv_inference_request_failure{model="detokenizer",reason="OTHER",version="1"} 1
nv_inference_request_duration_us{model="detokenizer",version="1"} 123456
nv_trt_llm_request_metrics{model="engine",request_type="active",version="1"} 3
nv_trt_llm_request_metrics{model="engine",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="engine",request_type="max",version="1"} 64
"""


def test_responses_are_of_the_last_model_and_requests_in_the_engine_exclude_the_maximum():
    assert parse(METRICS, "detokenizer") == ServerMetrics(responses=43, in_engine=5)


def test_requests_in_queues_and_streams_in_the_detokenizer_are_counted():
    more = METRICS + (
        'nv_inference_pending_request_count{model="detokenizer",version="1"} 4\n'
        'nv_inference_pending_request_count{model="tokenizer",version="1"} 1\n'
        'trident_open_streams{model="detokenizer"} 2\n'
    )
    assert parse(more, "detokenizer") == ServerMetrics(responses=43, in_engine=5, outside_engine=7)


def test_a_server_with_an_empty_engine_is_not_idle_while_the_detokenizer_has_streams():
    detector = IdleDetector(0.5)
    history = [
        detector.is_idle(ServerMetrics(5, 0, outside), now_s)
        for now_s, outside in ((0, 1), (9, 1), (10, 0), (10.25, 0), (10.5, 0))
    ]
    assert history == [False] * 4 + [True]


def test_steps_are_the_engines_iteration_counter():
    more = (
        'nv_trt_llm_general_metrics{general_type="iteration_counter",model="engine",version="1"} 321\n'
        'nv_trt_llm_general_metrics{general_type="timestamp",model="engine",version="1"} 99\n'
    )
    assert parse(METRICS + more, "detokenizer") == ServerMetrics(responses=43, in_engine=5, steps=321)


def test_what_the_last_step_generated_is_the_engines_gauge():
    family = "nv_trt_llm_inflight_batcher_metrics"
    more = "".join(
        f'{family}{{inflight_batcher_specific_metric="{name}",model="engine",version="1"}} {value}\n'
        for name, value in (("generation_requests", 0), ("total_context_tokens", 256))
    )
    assert parse(METRICS + more, "detokenizer") == ServerMetrics(responses=43, in_engine=5, generating=0)


def test_an_engine_without_gauges_has_no_request_count():
    assert parse("", "detokenizer") == ServerMetrics(responses=0, in_engine=None)


def idle_at_each(*history):
    """history: (time in s, responses, requests in the engine); idle means half a second."""
    detector = IdleDetector(0.5)
    return [detector.is_idle(ServerMetrics(responses, in_engine), now_s) for now_s, responses, in_engine in history]


def test_idle_needs_an_empty_engine_and_no_response_for_that_long():
    assert idle_at_each((0.0, 5, 1), (0.5, 6, 0), (1.0, 7, 0), (1.25, 7, 0), (1.5, 7, 0)) == [False] * 4 + [True]


def test_a_late_response_or_request_restarts_the_clock():
    history = [(0.0, 5, 0), (0.25, 6, 0), (0.75, 6, 1), (1.0, 6, 0), (1.25, 6, 0), (1.5, 6, 0)]
    assert idle_at_each(*history) == [False] * 5 + [True]


def test_an_engine_with_requests_and_no_progress_is_not_idle():
    assert not any(idle_at_each((0.0, 5, 1), (9.0, 5, 1)))


def test_a_server_without_gauges_is_never_idle():
    assert not any(idle_at_each((0.0, 5, None), (9.0, 5, None)))
