"""config.json in, shapes out; and the sentence when it does not fit."""

import pytest

from build.base.architecture import from_config
from build.base.json_fields import BadField
from tests.fakes import checkpoints

LLAMA = checkpoints.CONFIGS["llama_gqa"]


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_expected_tensors_are_those_a_checkpoint_of_the_family_has(name):
    config = checkpoints.CONFIGS[name]
    found = {name: value.shape for name, value in checkpoints.tensors(config).items()}
    arch = from_config(config)
    assert arch.expected_tensors() == found
    assert arch.num_parameters() == sum(value.size for value in checkpoints.tensors(config).values())


def test_head_dim_may_differ_from_hidden_over_heads():
    arch = from_config(LLAMA | {"head_dim": 48})
    assert arch.expected_tensors()["model.layers.0.self_attn.q_proj.weight"] == (4 * 48, 64)


def test_a_missing_number_of_kv_heads_means_one_per_head():
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert from_config(config).num_kv_heads == 4


def test_qwen2_has_biases_on_q_k_v_only():
    names = from_config(checkpoints.CONFIGS["qwen2"]).expected_tensors()
    assert "model.layers.0.self_attn.k_proj.bias" in names and "model.layers.0.self_attn.o_proj.bias" not in names


def test_a_window_that_is_switched_off_or_as_long_as_the_model_is_full_attention():
    assert from_config(checkpoints.CONFIGS["qwen2"] | {"sliding_window": 16}).max_positions == 512
    assert from_config(checkpoints.CONFIGS["mistral_mqa"] | {"sliding_window": 512}).max_positions == 512


def test_a_shorter_window_bounds_the_sequences_that_are_computed_exactly():
    assert from_config(checkpoints.CONFIGS["mistral_mqa"] | {"sliding_window": 64}).max_positions == 64
    qwen = checkpoints.CONFIGS["qwen2"] | {"sliding_window": 64, "use_sliding_window": True}
    assert from_config(qwen).max_positions == 64


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures is GPT2LMHeadModel; supported are LlamaForCausalLM, Mistral",
        ),
        ({"architectures": []}, "architectures is none"),
        ({"architectures": None}, "architectures is none"),
        ({"quantization_config": {"quant_method": "gptq"}}, "already quantised (gptq)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is silu"),
        ({"hidden_size": 65}, "hidden_size 65 is not a multiple of num_attention_heads 4; set head_dim"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"vocab_size": None}, "vocab_size must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"intermediate_size": "96"}, "intermediate_size must be a positive integer"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "config.json: rope type 'longrope' is not supported"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
        ({"sliding_window": "abc"}, "sliding_window must be a positive integer"),
        ({"quantization_config": "fp8"}, "already quantised (fp8)"),
        ({"quantization_config": {"quant_method": 8}}, "already quantised (8)"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling: rope_type must be a string"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, "rope 'factor' must be 1e-06 to"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta must be a"),
        ({"rope_theta": -1}, "rope_theta must be a number above 1"),
        ({"rope_theta": 10**400}, "rope_theta must be a number above 1"),
        ({"layer_types": 3}, "layer_types must be a list of strings"),
        ({"layer_types": ["linear_attention"]}, "layer_types linear_attention are not supported"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be an integer up to 10000"),
        ({"head_dim": 2**40}, "head_dim must be an integer up to"),
        ({"hidden_act": ["silu"]}, "hidden_act must be a string"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
    ],
)
def test_what_the_graph_cannot_compute_is_refused(changes, says):
    with pytest.raises(BadField) as caught:
        from_config(LLAMA | changes)
    assert says in str(caught.value)
