"""The lint of an engine's configuration: parameters, tensors and policies of the TensorRT-LLM backend."""

import pytest
from gpu_recipes import make

from build.lint.repository import ERROR, WARNING
from build.package import model_configs
from tests.fakes.small_repository import faults, put


def trtllm(**changes: str) -> str:
    """A right TensorRT-LLM configuration with parameters changed or, set to None, left out."""
    text = model_configs.render(make())
    for key, value in changes.items():
        lines = [row for row in text.splitlines() if f'key: "{key}"' not in row]
        row = [] if value is None else [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}']
        text = "\n".join([*lines, *row]) + "\n"
    return text


def test_a_packaged_engine_is_without_a_fault(tmp_path):
    assert faults(put(tmp_path, {"engine": trtllm()})) == []


@pytest.mark.parametrize(
    ("changes", "severity", "part"),
    [
        (
            {"gpt_model_type": "V1"},
            ERROR,
            "must be inflight_batching or inflight_fused_batching, got 'V1'",
        ),
        ({"gpt_model_type": "inflight"}, ERROR, "got 'inflight'"),
        ({"gpt_model_type": None}, ERROR, "parameter gpt_model_type must be there"),
        ({"xgrammar_tokenizer_info_path": None}, ERROR, "parameter xgrammar_tokenizer_info_path must be there"),
        ({"gpt_model_path": ""}, ERROR, "there is no engine to load"),
        (
            {"enable_kv_cache_reuse": "yes"},
            ERROR,
            "enable_kv_cache_reuse: must be true or false, got 'yes', which counts as unset",
        ),
        ({"batch_scheduler_policy": "max_util"}, ERROR, "must be guaranteed_no_evict or max_utilization"),
        ({"decoding_mode": "lookahead"}, ERROR, "decoding_mode lookahead throws without lookahead_ngram_size"),
        ({"decoding_mode": "greedy"}, ERROR, "lookahead or eagle, got 'greedy', which counts as unset"),
        ({"max_beam_width": "one"}, ERROR, "must be a whole number"),
        ({"kv_cache_free_gpu_mem_fraction": "1.5"}, ERROR, "a share above 0 and at most 1"),
        ({"gpu_weights_percent": "0.0"}, ERROR, "a share above 0 and at most 1"),
        ({"worker_path": "/x"}, WARNING, "the backend reads no parameter worker_path"),
        ({"enable_kv_reuse": "true"}, WARNING, "nearest is 'enable_kv_cache_reuse'"),
        ({"exclude_input_in_output": "false"}, WARNING, "repeats its prompt"),
    ],
)
def test_a_parameter_the_backend_would_not_take_is_named(tmp_path, changes, severity, part):
    found = faults(put(tmp_path, {"engine": trtllm(**changes)}))
    assert any(row[0] == severity and part in row[3] for row in found), found


@pytest.mark.parametrize(
    ("old", "new", "severity", "part"),
    [
        ("decoupled: true", "decoupled: false", ERROR, "it is not decoupled"),
        ("max_queue_delay_microseconds: 0", "max_queue_delay_microseconds: 500", WARNING, "only delays"),
        ("KIND_CPU count: 1", "KIND_GPU count: 1", ERROR, "say instance_group KIND_CPU count 1"),
        ("{ max_queue_size: 64 }", "{ }", ERROR, "grows without bound"),
        (
            '"seed" data_type: TYPE_UINT64',
            '"seed" data_type: TYPE_INT64',
            ERROR,
            "input 'seed' is TYPE_INT64; the backend's is TYPE_UINT64",
        ),
        (
            '"stop_words_list" data_type: TYPE_INT32 dims: [ 2, -1 ]',
            '"stop_words_list" data_type: TYPE_INT32 dims: [ -1 ]',
            ERROR,
            "dims [-1]; the backend's are [2, -1]",
        ),
        (
            '"end_id" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] }',
            '"end_id" data_type: TYPE_INT32 dims: [ 1 ]',
            ERROR,
            "input 'end_id' needs reshape { shape: [ ] }",
        ),
        (
            'name: "temperature"',
            'name: "temprature"',
            ERROR,
            "the backend has no input 'temprature'; nearest is 'temperature'",
        ),
        ('name: "sequence_length"', 'name: "cum_log_probs_"', ERROR, "required output 'sequence_length' is missing"),
        ('name: "input_lengths"', 'name: "encoder_output_lengths"', ERROR, "required input 'input_lengths' is missing"),
        ('backend: "tensorrtllm"', 'backend: "tensorrt_llm"', ERROR, "must be tensorrtllm or python"),
    ],
)
def test_a_tensor_or_policy_the_backend_would_not_take_is_named(tmp_path, old, new, severity, part):
    text = trtllm()
    assert old in text
    found = faults(put(tmp_path, {"engine": text.replace(old, new, 1)}))
    assert any(row[0] == severity and part in row[3] for row in found), found


def test_logits_of_another_type_than_the_engines_are_named(tmp_path):
    text = model_configs.render(make(build={"gather_context_logits": True}))
    assert faults(put(tmp_path / "right", {"engine": text})) == []
    wrong = text.replace('"context_logits" data_type: TYPE_FP32', '"context_logits" data_type: TYPE_FP16')
    assert any("the backend's is TYPE_FP32" in row[3] for row in faults(put(tmp_path / "wrong", {"engine": wrong})))
