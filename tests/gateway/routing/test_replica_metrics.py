"""The load that a replica's metrics report."""

from __future__ import annotations

import pytest

from gateway.routing.replica_metrics import ReplicaMetrics, read
from tests.fakes.replica import FakeReplica

PAGE = """# HELP nv_inference_count Number
nv_inference_count{model="engine"} 5
nv_trt_llm_request_metrics{model="engine",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="engine",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="engine",request_type="max",version="1"} 16
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="engine",version="1"} 0.25
"""


def test_the_families_of_tensorrt_llm_are_read():
    assert read(PAGE) == ReplicaMetrics(running=3, waiting=2, max_running=16, kv_usage=0.25)
    assert read(FakeReplica(slots=7).metrics_page()) == ReplicaMetrics(max_running=7)
    adapted = read(FakeReplica(slots=7, adapters=("poet", "lawyer")).metrics_page())
    assert adapted == ReplicaMetrics(max_running=7, adapters=("poet", "lawyer"))


def test_the_engines_steps_are_read_and_no_other_general_metric():
    page = (
        'nv_trt_llm_general_metrics{general_type="timestamp",model="engine",version="1"} 9e15\n'
        'nv_trt_llm_general_metrics{general_type="iteration_counter",model="engine",version="1"} 1234567\n'
    )
    assert read(PAGE + page).steps == 1_234_567 and read(PAGE).steps == 0
    for value in ("NaN", "-1", "+Inf"):
        with pytest.raises(ValueError, match="iteration_counter"):
            read(page.replace("1234567", value))


def test_a_page_without_them_says_nothing_and_a_broken_one_is_no_page():
    assert read("") == ReplicaMetrics() and read("a_metric 1\n") == ReplicaMetrics()
    with pytest.raises(ValueError):
        read('nv_trt_llm_request_metrics{request_type="waiting"} many\n')


@pytest.mark.parametrize("value", ["+Inf", "-Inf", "NaN", "-1", "1e300"])
def test_a_page_that_says_what_cannot_be_is_no_page(value: str):
    for family in (
        'nv_trt_llm_request_metrics{request_type="waiting"}',
        'nv_trt_llm_request_metrics{request_type="max"}',
    ):
        with pytest.raises(ValueError, match="nv_trt_llm_request_metrics"):
            read(f"{family} {value}\n")
    with pytest.raises(ValueError, match="fraction"):
        read(f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="fraction"}} {value}\n')


STEP = 'trident_engine_step_seconds{term="step_s"} 0.01\ntrident_engine_step_seconds{term="sequence_s"} 0.001\n'


def test_a_calibrated_engine_tells_how_long_its_steps_take():
    step = read(PAGE + STEP).step
    assert step is not None and step.seconds(8, 0, 0) == pytest.approx(0.018)
    assert read(PAGE).step is None
    with pytest.raises(ValueError, match="trident_engine_step_seconds: step_s: must be a finite number from 0"):
        read(STEP.replace("0.01", "NaN"))
