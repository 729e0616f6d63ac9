"""What a decoder looks like: config.json in, shapes and, for the Llama family, expected tensors out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from build.base import rope as rotary
from build.base.json_fields import BadField, Fields, shown

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_DECODERS = ("ForCausalLM", "LMHeadModel")
# Far beyond any published model: a config.json with a zero too many must not make the reader allocate gigabytes.
MOST_LAYERS, MOST_HEADS, MOST_HEAD_DIM, MOST_WIDE = 10_000, 2**16, 2**14, 2**26


@dataclass(frozen=True)
class Architecture:
    """A pre-norm decoder: RMSNorm, rotary GQA attention, gated SiLU MLP.

    qkv_bias, output_bias, mlp_bias: linear layers with a bias. qk_norm: RMSNorm on every query and key head
    (Qwen3). tied: lm_head is the embedding matrix. max_positions: the longest sequence this graph computes
    exactly: what the model was made for, or its attention window where that is shorter (None: no window), because
    a sequence within the window is never cut. exported: of another family, whose graph optimum-intel writes; the sizes
    are then for limits and memory only, and parameters is what the weight files hold.
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
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    exported: bool = False
    parameters: int | None = None

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

    @property
    def family(self) -> str:
        """``llama`` or ``qwen``: which of TensorRT-LLM's converters and decoders it is."""
        return "qwen" if self.name.startswith("Qwen") else "llama"

    def num_parameters(self) -> int:
        return self.parameters or sum(math.prod(shape) for shape in self.expected_tensors().values())


def from_config(config: Mapping[str, object], any_family: bool = False) -> Architecture:
    """Raises BadField. any_family: also a decoder that optimum-intel may export, which is known when it has tried."""
    fields = Fields(config, "config.json")
    names = fields.texts("architectures")
    if any_family and len(names) == 1 and names[0] not in SUPPORTED and names[0].endswith(_DECODERS):
        return _exported(names[0], fields)
    return _read(fields)


def _exported(name: str, config: Fields) -> Architecture:
    _refuse_quantised(config)

    def size(*keys: str, default: int | None = None, high: int = MOST_WIDE) -> int:
        key = next((key for key in keys if config.get(key) is not None), keys[0])
        return config.integer(key, default, high=high)

    hidden = size("hidden_size", "n_embd", "d_model")
    heads = size("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", high=MOST_HEADS)
    # Falcon's newer architecture has num_kv_heads in place of the switch.
    grouped = config.boolean("new_decoder_architecture", False)
    one_kv_head = config.boolean("multi_query", False) and not grouped
    return Architecture(
        name=name,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden),
        num_layers=size("num_hidden_layers", "n_layer", "n_layers", "num_layers", high=MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=1 if one_kv_head else size("num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=size("head_dim", default=max(1, hidden // heads), high=MOST_HEAD_DIM),
        rms_norm_eps=1e-6,
        rope=rotary.Rope(rotary.DEFAULT_THETA, "default", {}),
        max_positions=size("max_position_embeddings", "n_positions", "max_seq_len", default=2048),
        tied=config.boolean("tie_word_embeddings", True),
        exported=True,
    )


class Sizes(TypedDict):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int


def sizes(config: Fields) -> Sizes:
    """The fields of an architecture that every family's config.json has under the same name."""
    return {
        "vocab_size": config.integer("vocab_size", high=MOST_WIDE),
        "hidden_size": config.integer("hidden_size", high=MOST_WIDE),
        "intermediate_size": config.integer("intermediate_size", high=MOST_WIDE),
        "num_layers": config.integer("num_hidden_layers", high=MOST_LAYERS),
        "num_heads": config.integer("num_attention_heads", high=MOST_HEADS),
    }


def _read(config: Fields) -> Architecture:
    names = config.texts("architectures")
    if len(names) != 1 or names[0] not in SUPPORTED:
        message = shown(", ".join(names))[1:-1] or "none"
        raise BadField(f"config.json: architectures is {message}; supported are {', '.join(SUPPORTED)}")
    name = names[0]
    _refuse_what_the_graph_lacks(config)
    common = sizes(config)
    hidden, heads = common["hidden_size"], common["num_heads"]
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise BadField(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise BadField(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set head_dim")
    default = 128 if name == "Qwen3ForCausalLM" else hidden // heads
    head_dim = config.integer("head_dim", default, high=MOST_HEAD_DIM)
    if head_dim % 2:
        raise BadField(f"head_dim {head_dim} is odd; rotary embedding needs an even one")
    # Llama's attention_bias covers o_proj, Qwen3's too; Qwen2 has q, k, v biases always and no key for it.
    biased = config.boolean("attention_bias", False) and name in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    rope = rotary.from_config(config.values)
    rotary.inverse_frequencies(rope, head_dim)
    positions = config.integer("max_position_embeddings", 2048)
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    # Qwen writes a window and switches it off; Mistral has no switch, only null.
    if window is not None and not config.boolean("use_sliding_window", name == "MistralForCausalLM"):
        window = None
    return Architecture(
        name=name,
        **common,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6, high=1.0),
        rope=rope,
        max_positions=positions if window is None else min(positions, window),
        tied=config.boolean("tie_word_embeddings", False),
        qkv_bias=True if name == "Qwen2ForCausalLM" else biased,
        output_bias=False if name == "Qwen2ForCausalLM" else biased,
        mlp_bias=config.boolean("mlp_bias", False) and name == "LlamaForCausalLM",
        qk_norm=name == "Qwen3ForCausalLM",
        window=window,
    )


def _refuse_quantised(config: Fields) -> None:
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        message = shown(method) if not isinstance(method, str) else shown(method)[1:-1]
        raise BadField(f"config.json: the checkpoint is already quantised ({message}); give the bf16, fp16 or f32 one")


def _refuse_what_the_graph_lacks(config: Fields) -> None:
    _refuse_quantised(config)
    activation = config.text("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise BadField(f"config.json: hidden_act {shown(activation)} is not supported; supported is silu")
    if unknown := set(config.texts("layer_types")) - {"full_attention", "sliding_attention"}:
        message = shown(", ".join(sorted(unknown)))[1:-1]
        raise BadField(f"config.json: layer_types {message} are not supported; only full_attention is")
