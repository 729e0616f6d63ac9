"""The demo model's network: a small `transformers` Llama, how it begins, and its files."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from build.demo_model.tokenizer import generation_config

CHECKPOINT = Path(__file__).resolve().parent / "checkpoint"
# What decides the weights' shapes and the arithmetic, under the names of Hugging Face's config.json.
ARCHITECTURE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
}


def new_model(seed: int, **changes: int) -> LlamaForCausalLM:
    """A network with normal weights of deviation 0.02; those that end a residual branch are scaled down by depth."""
    config = LlamaConfig(
        **ARCHITECTURE | changes,
        tie_word_embeddings=True,
        **generation_config(),
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    generator, depth = torch.Generator().manual_seed(seed), 2 * config.num_hidden_layers
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scale = depth**-0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            torch.nn.init.normal_(parameter, std=0.02 * scale, generator=generator)
    return model


def save_weights(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config.json and model.safetensors (bf16)."""
    folder.mkdir(parents=True, exist_ok=True)
    about = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    about["use_cache"] = True
    (folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    state = model.state_dict()
    state.pop("lm_head.weight")  # the embedding
    file = folder / "model.safetensors"
    weights = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # the library writes 0600, which other users of the machine could not serve
