import time

from contract.errors import PromptTooLong
from python_backends.encoder.metrics import EncoderMetrics
from python_backends.metrics import Metrics
from python_backends.triton_io import metric_family

LABELS = {"model": "encoder", "version": "1"}


def test_routers_and_drains_read_load_and_progress_in_the_families_they_know(triton):
    engine = {"engine": "e", "kind": "embedding", "manifest_sha256": "0"}
    metrics = EncoderMetrics(Metrics(metric_family), "encoder", "1", 64, engine)
    assert triton.metric_value("nv_trt_llm_request_metrics", **LABELS, request_type="max") == 64
    metrics.began(3)
    assert triton.metric_value("nv_trt_llm_request_metrics", **LABELS, request_type="scheduled") == 3
    metrics.passed(3, 48)
    metrics.done(20)
    metrics.refused(PromptTooLong("text_input[0]", "must be shorter"))
    metrics.ended(time.monotonic())
    assert triton.metric_value("nv_trt_llm_request_metrics", **LABELS, request_type="scheduled") == 0
    assert triton.metric_value("nv_trt_llm_general_metrics", **LABELS, general_type="iteration_counter") == 1
    assert triton.metric_value("trident_input_tokens_total", **LABELS) == 20
    assert triton.metric_value("trident_encoder_padded_tokens_total", **LABELS) == 48
    assert triton.metric_value("trident_errors_total", **LABELS, error_type="PromptTooLong") == 1
    assert triton.metric_value("trident_engine_info", **engine) == 1
