"""What stands in for tensorrt_llm, and what is added to ModelOpt's config.json."""

import sys

import pytest

from build.base.architecture import from_config
from build.quantise import exporters
from tests.fakes import checkpoints

QWEN2, LLAMA = (from_config(checkpoints.CONFIGS[name]) for name in ("qwen2", "llama_gqa"))


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({"rope_theta": 1e6}, None),
        ({"rope_scaling": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"type": "linear", "rope_type": "linear", "factor": 2.0}),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0},
        ),
    ],
)
def test_rope_scaling_is_written_as_transformers_4_does(config, scaling):
    assert exporters.rope_scaling(config) == scaling


@pytest.mark.parametrize("before", [None, object()], ids=["absent", "present"])
def test_the_stand_in_modules_are_gone_afterwards_also_after_an_error(monkeypatch, before):
    if before is not None:
        monkeypatch.setitem(sys.modules, "tensorrt_llm.models", before)
    with pytest.raises(RuntimeError, match="inside"), exporters.exporter_modules(QWEN2):
        from tensorrt_llm.models import MODEL_MAP
        from tensorrt_llm.models.modeling_utils import Mapping, QuantConfig

        given = MODEL_MAP["Qwen2ForCausalLM"].config_class.from_hugging_face(
            hf_config_or_dir=None,
            dtype="bfloat16",
            mapping=Mapping.from_dict({"tp_size": 2}),
            quant_config=QuantConfig.from_dict({"quant_algo": "FP8"}),
        )
        expected = {"dtype": "bfloat16", "mapping": {"tp_size": 2}, "quantization": {"quant_algo": "FP8"}}
        assert given.to_dict() == expected
        raise RuntimeError("inside")
    assert sys.modules.get("tensorrt_llm.models") is before
    assert "tensorrt_llm" not in sys.modules and "tensorrt_llm.models.modeling_utils" not in sys.modules


def test_llama_needs_no_stand_in():
    with exporters.exporter_modules(LLAMA):
        assert "tensorrt_llm" not in sys.modules
