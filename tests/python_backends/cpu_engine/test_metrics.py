import numpy as np
import pytest

from contract.errors import Overloaded
from python_backends.cpu_engine.metrics import CANCEL_REASONS, EngineLoad, EngineMetrics
from python_backends.ensemble.token_increment import StreamEvent
from python_backends.ensemble.worker_messages import StepOutput, StepReport
from python_backends.metrics import Metrics
from python_backends.triton_io import metric_family
from tests.python_backends.cpu_engine.test_stream import add, stream

NAMES = {"model": "engine", "version": "1"}
SECOND = 1_000_000_000


@pytest.fixture
def metrics(triton):
    return EngineMetrics(Metrics(metric_family), **NAMES)


def load(**changes):
    report = StepReport(0, 5_000, [StepOutput(1, [7], [], StreamEvent.RUNNING)], 1, 2, 30, 0.25)
    return EngineLoad(
        **{"running": 3, "waiting": 4, "slots": 8, "blocks": 40, "last_step": report, "steps": 9} | changes
    )


def observed(triton, name, **labels):
    """The values that a histogram has."""
    return triton.families[name].Metric(labels, [1.0]).calls


def test_the_gauges_are_those_of_tensorrt_llm(metrics, triton):
    metrics.show(load())
    requests = {"active": 7, "max": 8, "scheduled": 3, "context": 2, "waiting": 4}
    for state, value in requests.items():
        assert triton.metric_value("nv_trt_llm_request_metrics", **NAMES, request_type=state) == value
    blocks = {"max": 40, "used": 10, "free": 30, "tokens_per": 32, "fraction": 0.25}
    for kind, value in blocks.items():
        assert triton.metric_value("nv_trt_llm_kv_cache_block_metrics", **NAMES, kv_cache_block_type=kind) == value
    assert triton.metric_value("nv_trt_llm_general_metrics", **NAMES, general_type="iteration_counter") == 9


def test_a_page_read_between_two_gauges_that_says_nothing_runs_has_counted_the_steps(metrics, triton, monkeypatch):
    metric = type(triton.families["nv_trt_llm_general_metrics"].Metric({}))
    metrics.show(load())
    plain_set, pages = metric.set, []

    def watched_set(self, value):
        plain_set(self, value)
        active = triton.metric_value("nv_trt_llm_request_metrics", **NAMES, request_type="active")
        steps = triton.metric_value("nv_trt_llm_general_metrics", **NAMES, general_type="iteration_counter")
        used = triton.metric_value("nv_trt_llm_kv_cache_block_metrics", **NAMES, kv_cache_block_type="used")
        pages.append((active, steps, used))

    monkeypatch.setattr(metric, "set", watched_set)
    metrics.show(load(running=0, waiting=0, steps=10, last_step=StepReport(0, 6_000)))
    assert {page[1:] for page in pages if page[0] == 0} == {(10, 0)}
    assert any(page[0] for page in pages)


def test_requests_are_counted_by_adapter(triton):
    metrics = EngineMetrics(Metrics(metric_family), **NAMES, adapters=("poet", "lawyer"))
    metrics.accepted(stream(adapter="poet"))
    metrics.accepted(stream())
    metrics.show(load(running_adapters={"poet": 1}, waiting_adapters={"poet": 2, "lawyer": 1}))
    totals = [
        triton.metric_value("trident_adapter_requests_total", **NAMES, adapter=name) for name in ("poet", "lawyer")
    ]
    assert totals == [1, 0]
    for adapter, state, count in (("poet", "running", 1), ("poet", "waiting", 2), ("lawyer", "running", 0)):
        labels = {"adapter": adapter, "state": state}
        assert triton.metric_value("trident_adapter_requests", **NAMES, **labels) == count
    info = {"max_lora": "2", "running_lora_adapters": "poet,lawyer", "waiting_lora_adapters": ""}
    assert triton.metric_value("vllm:lora_requests_info", **info) > 1e9


def test_an_engine_without_adapters_has_no_series_of_theirs(metrics, triton):
    metrics.show(load())
    assert not [name for name in triton.families if "lora" in name or "adapter" in name]


def test_a_refusal_and_a_cancellation_count_by_their_reason(metrics, triton):
    metrics.refused(Overloaded("full"))
    for reason in CANCEL_REASONS:
        metrics.cancelled(reason)
    metrics.show(load())
    assert triton.metric_value("trident_errors_total", **NAMES, error_type="Overloaded") == 1
    for reason in CANCEL_REASONS:
        assert triton.metric_value("trident_cancellations_total", **NAMES, reason=reason) == 1


def test_a_finished_stream_counts_its_tokens_and_its_reason(metrics, triton):
    one = stream()
    metrics.accepted(one)
    add(one, 1, 2, now_ns=SECOND)
    add(one, 3, now_ns=3 * SECOND)
    one.finish(StreamEvent.LENGTH)
    metrics.finished(one, 4 * SECOND)
    metrics.show(load())
    assert triton.metric_value("trident_input_tokens_total", **NAMES) == one.request.input_ids.size
    assert triton.metric_value("trident_output_tokens_total", **NAMES) == 3
    assert triton.metric_value("trident_requests_total", **NAMES, finish_reason="length") == 1


def test_what_drafts_gained_is_counted_for_engines_that_draft(triton):
    metrics = EngineMetrics(Metrics(metric_family), **NAMES, drafts=True)
    metrics.drafted(3, 2)
    metrics.drafted(1, 0)
    metrics.show(load())
    assert triton.metric_value("trident_speculative_steps_total", **NAMES) == 4
    assert triton.metric_value("trident_speculative_accepted_tokens_total", **NAMES) == 2


def test_an_engine_without_drafts_has_no_series_of_theirs(metrics, triton):
    metrics.show(load())
    assert not [name for name in triton.families if "speculative" in name]


def test_the_time_between_responses_is_observed_of_a_sample(metrics, triton):
    one = stream()
    for nth in range(1, 101):
        add(one, 1)
        metrics.sent([(one, one.take(nth * SECOND))])
    metrics.show(load())
    metrics.show(load())
    for name in ("trident_inter_token_latency_seconds", "trident_coalescing_wait_seconds"):
        assert triton.metric_value(name, **NAMES) == 4


def test_of_a_continued_stream_only_what_this_replica_generated_is_counted(metrics, triton):
    continued = {"arrival_ns": 0, "input_ids": np.arange(40), "continued": 30}
    one, waited = stream(**continued), stream(**continued)
    for each in (one, waited):
        metrics.accepted(each)
    one.num_cached_tokens = 32
    add(one, 1, 2, now_ns=SECOND)
    add(one, 3, now_ns=3 * SECOND)
    for each in (one, waited):
        each.finish(StreamEvent.CANCELLED)
        metrics.finished(each, 4 * SECOND)
    metrics.show(load())
    assert triton.metric_value("trident_input_tokens_total", **NAMES) == 2 * 10
    assert triton.metric_value("trident_output_tokens_total", **NAMES) == 3
    assert triton.metric_value("trident_cached_prompt_tokens_total", **NAMES) == 10
    assert observed(triton, "gen_ai_server_time_per_output_token_seconds", **NAMES) == [1.0]
    assert observed(triton, "nv_llm_output_token_len", **NAMES, response_metric_type="total_output_tokens") == [3, 0]
