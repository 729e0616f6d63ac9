"""A network of the demo model's kind, small enough to train in a second. Needs torch and transformers."""

from build.demo_model import network

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def tiny_model(seed=0):
    return network.new_model(seed, **TINY)
