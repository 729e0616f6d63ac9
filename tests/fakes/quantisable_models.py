"""Models small enough to quantise in a second and large enough for AWQ's blocks of 128 input columns."""

from pathlib import Path

import numpy as np

from build.model.calibration import TokenBlocks
from tests.fakes import checkpoints

LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
# The geometry of tests/build/quantise/checkpoint_tensors_observed.json.
LLAMA = checkpoints.CONFIGS["llama_gqa"] | {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2, "max_position_embeddings": 512,
    "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "rms_norm_eps": 1e-6,
}  # fmt: skip
PLAIN = {k: v for k, v in LLAMA.items() if k not in ("rope_scaling", "rope_theta")}
QWEN = PLAIN | {"use_sliding_window": False, "rope_theta": 1e6}
MODELS = {
    "llama": LLAMA,
    "llama_mha_tied": LLAMA | {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "llama_mqa": PLAIN | {"num_key_value_heads": 1},
    "llama_odd_vocab": PLAIN | {"vocab_size": 1001},
    "llama_tied_odd_vocab": PLAIN | {"vocab_size": 1001, "tie_word_embeddings": True},
    "llama_bias": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama_one_layer_narrow_heads": PLAIN | {"num_hidden_layers": 1, "head_dim": 32, "num_attention_heads": 8},
    "mistral": PLAIN | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": QWEN | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen2_tied_odd_vocab": QWEN
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 1001},
    "qwen3": QWEN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_wide_heads": PLAIN
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": True,
       "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}  # fmt: skip
BLOCKS = TokenBlocks(np.random.default_rng(3).integers(0, 1000, (8, 64)), 8)
HELD_OUT = np.random.default_rng(4).integers(0, 1000, (2, 24))


def write(folder: Path, name: str) -> None:
    """Random weights, the queries and keys small: sharp random attention would multiply every rounding error."""
    checkpoints.write(folder, MODELS[name])
    values = checkpoints.tensors(MODELS[name])
    for tensor in values:
        if ".q_proj." in tensor or ".k_proj." in tensor:
            values[tensor] = 0.3 * values[tensor]
    checkpoints.write_weights(folder, values)
