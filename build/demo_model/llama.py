"""The Llama architecture in plain PyTorch, with parameters named as HuggingFace's LlamaForCausalLM names them.

RMSNorm before each block, rotary positions (half-split layout), grouped-query attention, SwiGLU, and one matrix
shared by the embedding and the output. Shapes: B sequences, T tokens, D hidden, H heads, K key/value heads, d head.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaConfig:
    """The architecture's numbers, under the names of HuggingFace's config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def to_huggingface(self) -> dict:
        """config.json; the special token ids are those of tokenizer.SPECIAL_TOKENS."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": [0, 5],
            "pad_token_id": 1,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_tables(config: LlamaConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and frequency, each f32[max_position_embeddings, d]."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_position_embeddings, device=device, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + d/2]) by its position's angle; x is [B, heads, T, d], cos and sin [T, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        key_value_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        queries = self.q_proj(x).view(batch, length, heads, -1).transpose(1, 2)  # [B, H, T, d]
        keys = self.k_proj(x).view(batch, length, kv_heads, -1).transpose(1, 2)  # [B, K, T, d]
        values = self.v_proj(x).view(batch, length, kv_heads, -1).transpose(1, 2)  # [B, K, T, d]
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        group = heads // kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)  # [B, H, T, d]
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)  # [B, H, T, d]
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights of deviation 0.02; those that end a residual branch are scaled down by depth."""
        residual_scale = (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = residual_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale, generator=generator)

    def forward(self, input_ids: Tensor) -> Tensor:
        """i64[B, T] -> logits [B, T, vocab_size], in the autocast dtype."""
        x = self.embed_tokens(input_ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = rotary_tables(self.config, x.device)
        length = input_ids.shape[1]
        cos, sin = cos[:length].to(x.dtype), sin[:length].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def save_weights(model: Llama, folder: Path) -> None:
    """Write config.json and model.safetensors (bf16), loadable as LlamaForCausalLM."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_huggingface(), indent=2) + "\n")
    weights = {
        f"model.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    file = folder / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # the library writes 0600, which other users of the machine could not serve


def load_weights(folder: Path) -> Llama:
    """Read what `save_weights` wrote; parameters become f32 holding the bf16 values."""
    stored = json.loads((folder / "config.json").read_text())
    model = Llama(LlamaConfig(**{name: stored[name] for name in LlamaConfig.__dataclass_fields__}))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in weights.items()})
    return model.eval()
