"""The lint of an engine's configuration: what the TensorRT-LLM backend needs to load and to stream."""

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
        ('backend: "tensorrtllm"', 'backend: "tensorrt_llm"', ERROR, "must be tensorrtllm or python"),
    ],
)
def test_a_policy_the_backend_would_not_take_is_named(tmp_path, old, new, severity, part):
    text = trtllm()
    assert old in text
    found = faults(put(tmp_path, {"engine": text.replace(old, new, 1)}))
    assert any(row[0] == severity and part in row[3] for row in found), found
