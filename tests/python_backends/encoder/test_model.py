import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import Cancelled, PromptTooLong, Unavailable, from_text
from python_backends.encoder.model import EncoderMetrics, TritonPythonModel
from python_backends.metrics import Metrics
from python_backends.triton_io import metric_family
from tests.fakes.tiny_encoders import WORDS

pytestmark = pytest.mark.slow  # builds engines
TYPES = {"input_ids": "INT32", "dimensions": "INT32", "truncate_prompt_tokens": "INT32"}


def tensors(answer):
    assert not answer.has_error(), answer.error().message()
    return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}


@pytest.fixture
def load(triton, encoder_engine, monkeypatch):
    models = []

    def load(name):
        monkeypatch.setenv("TRIDENT_ENGINE_DIR", str(encoder_engine(name)))
        model = TritonPythonModel()
        model.initialize({"model_name": "encoder", "model_version": "1"})
        models.append(model)
        return model

    yield load
    for model in models:
        model.finalize()


@pytest.fixture
def incoming(triton):
    def incoming(**inputs):
        return triton.incoming({name: (TYPES.get(name, "BYTES"), values) for name, values in inputs.items()})

    return incoming


def test_a_texts_embedding_has_length_1_and_its_tokens_are_counted(load, incoming):
    [answer] = load("embedding").execute([incoming(text_input=[["the man eats"], ["food"]])])
    found = tensors(answer)
    assert found["embedding"].shape == (2, 32) and found["num_input_tokens"].tolist() == [[5], [3]]
    assert np.allclose(np.linalg.norm(found["embedding"], axis=1), 1, atol=1e-6)


def test_one_requests_fault_is_its_own(load, incoming):
    left = incoming(text_input=[["a"]])
    left.cancelled = True
    requests = [incoming(text_input=[["a"]]), incoming(text_input=[["a " * 99]]), left, incoming(text_input=[["b"]])]
    good, long, cancelled, last = load("embedding").execute(requests)
    assert isinstance(from_text(long.error().message()), PromptTooLong)
    assert isinstance(from_text(cancelled.error().message()), Cancelled)
    for answer in (good, last):
        assert tensors(answer)["embedding"].shape == (1, 32)


def test_a_draining_server_refuses(load, incoming, monkeypatch, tmp_path):
    monkeypatch.setenv("TRIDENT_DRAIN_FILE", str(tmp_path / "drain"))
    model = load("embedding")
    (tmp_path / "drain").touch()
    [answer] = model.execute([incoming(text_input=[["a"]])])
    assert isinstance(from_text(answer.error().message()), Unavailable)


def test_an_embedding_is_cut_to_the_dimensions_that_the_model_was_trained_for(load, incoming):
    model = load("matryoshka")
    whole, cut = model.execute([incoming(text_input=[["a"]]), incoming(text_input=[["a"]], dimensions=[[8]])])
    whole, cut = (tensors(answer)["embedding"][0] for answer in (whole, cut))
    assert np.allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)


@pytest.mark.parametrize("name", ["rerank", "decoder-rerank", "embedding"])
def test_pairs_have_scores(load, incoming, name):
    pairs = {"text_input": [["the man"], ["the man"]], "text_pair": [["eats"], ["the man"]]}
    [answer] = load(name).execute([incoming(**pairs, truncate_prompt_tokens=[[-1], [-1]])])
    found = tensors(answer)
    assert found["score"].shape == (2, 1) and found["num_input_tokens"].shape == (2, 1)
    assert (np.abs(found["score"]) <= 1 + 1e-6).all()


@settings(max_examples=10)
@given(data=st.data())
def test_what_else_is_in_the_batch_changes_nothing(encoder_engine, triton_types, data):
    words = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)
    texts = data.draw(st.lists(words, min_size=1, max_size=9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIDENT_ENGINE_DIR", str(encoder_engine("embedding")))
        model = TritonPythonModel()
        model.initialize({"model_name": "encoder", "model_version": "1"})
    requests = [triton_types.incoming({"text_input": ("BYTES", [[text]])}) for text in texts]
    try:
        together = [tensors(answer)["embedding"] for answer in model.execute(requests)]
        for request, vector in zip(requests, together, strict=True):
            [alone] = model.execute([request])
            assert np.abs(tensors(alone)["embedding"] - vector).max() < 1e-5
    finally:
        model.finalize()


# ---- metrics ---------------------------------------------------------------------------------------------------------


LABELS = {"model": "encoder", "version": "1"}


def test_routers_and_drains_read_load_and_progress_in_the_families_they_know(triton):
    metrics = EncoderMetrics(Metrics(metric_family), "encoder", "1", 64)
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
