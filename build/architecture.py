"""What a dense decoder of the Llama family looks like: config.json in, shapes and expected tensors out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import rope as rotary

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class UnsupportedModel(ValueError):
    """config.json describes a model this graph cannot compute exactly."""


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder: RMSNorm, rotary GQA attention, gated SiLU MLP.

    qkv_bias, output_bias, mlp_bias: linear layers with a bias. qk_norm: RMSNorm on every query and key head
    (Qwen3). tied: lm_head is the embedding matrix. max_positions: the length the model was made for.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: rotary.Rope
    max_positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the graph reads, by its Hugging Face name, with its shape ([out, in] for a matrix)."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        tensors = {"model.embed_tokens.weight": (self.vocab_size, hidden), "model.norm.weight": (hidden,)}
        if not self.tied:
            tensors["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}"
            tensors[f"{at}.input_layernorm.weight"] = (hidden,)
            tensors[f"{at}.post_attention_layernorm.weight"] = (hidden,)
            linears = {
                "self_attn.q_proj": (q_rows, hidden, self.qkv_bias),
                "self_attn.k_proj": (kv_rows, hidden, self.qkv_bias),
                "self_attn.v_proj": (kv_rows, hidden, self.qkv_bias),
                "self_attn.o_proj": (hidden, q_rows, self.output_bias),
                "mlp.gate_proj": (ffn, hidden, self.mlp_bias),
                "mlp.up_proj": (ffn, hidden, self.mlp_bias),
                "mlp.down_proj": (hidden, ffn, self.mlp_bias),
            }
            for name, (rows, columns, bias) in linears.items():
                tensors[f"{at}.{name}.weight"] = (rows, columns)
                if bias:
                    tensors[f"{at}.{name}.bias"] = (rows,)
            if self.qk_norm:
                tensors[f"{at}.self_attn.q_norm.weight"] = (self.head_dim,)
                tensors[f"{at}.self_attn.k_norm.weight"] = (self.head_dim,)
        return tensors

    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.expected_tensors().values())


def from_config(config: Mapping[str, object]) -> Architecture:
    """Raises UnsupportedModel with a sentence that names the key and what is supported."""
    name = _name(config)
    _refuse_what_the_graph_lacks(name, config)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UnsupportedModel(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise UnsupportedModel(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set head_dim")
    head_dim = _size(config, "head_dim", 128 if name == "Qwen3ForCausalLM" else hidden // heads)
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim {head_dim} is odd; rotary embedding needs an even one")
    # Llama's attention_bias covers o_proj, Qwen3's too; Qwen2 has q, k, v biases always and no key for it.
    attention_bias = bool(config.get("attention_bias", False)) and name in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    try:
        rope = rotary.from_config(config)
        rotary.inverse_frequencies(rope, head_dim)
    except rotary.UnsupportedRope as exc:
        raise UnsupportedModel(f"config.json: {exc}") from exc
    return Architecture(
        name=name,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=_size(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=_size(config, "max_position_embeddings", 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=True if name == "Qwen2ForCausalLM" else attention_bias,
        output_bias=False if name == "Qwen2ForCausalLM" else attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and name == "LlamaForCausalLM",
        qk_norm=name == "Qwen3ForCausalLM",
    )


def _name(config: Mapping[str, object]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED:
        said = ", ".join(map(str, names)) if isinstance(names, list) and names else "none"
        raise UnsupportedModel(f"config.json: architectures is {said}; supported are {', '.join(SUPPORTED)}")
    return names[0]


def _refuse_what_the_graph_lacks(name: str, config: Mapping[str, object]) -> None:
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")  # type: ignore[call-overload]
        raise UnsupportedModel(
            f"config.json: the checkpoint is already quantised ({method}); give the bf16, fp16 or f32 one"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"config.json: hidden_act {activation!r} is not supported; supported is silu")
    window = config.get("sliding_window")
    # Qwen writes a window and switches it off; Mistral has no switch, only null. A window as long as the
    # model never cuts anything.
    uses_window = window is not None and config.get("use_sliding_window", name == "MistralForCausalLM")
    if uses_window and int(window) < _size(config, "max_position_embeddings", 2048):  # type: ignore[call-overload]
        raise UnsupportedModel(f"config.json: sliding_window {window} is not supported; only full attention is")
    layer_types = set(config.get("layer_types") or [])  # type: ignore[call-overload]
    if layer_types - {"full_attention"} and uses_window:
        said = ", ".join(sorted(layer_types))
        raise UnsupportedModel(f"config.json: layer_types {said} are not supported; only full_attention is")


def _size(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} is {value!r}; allowed is a positive integer")
    return value


def _positive(config: Mapping[str, object], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UnsupportedModel(f"config.json: {key} is {value!r}; allowed is a positive number")
    return float(value)
