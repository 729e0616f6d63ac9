"""Tiny random Hugging Face checkpoints, complete enough to build and serve an engine from.

``write(folder, config)`` fills a folder as ``save_pretrained`` would and returns the exact stored values in f32,
which is what ``numpy_llama`` computes with.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

EOS, BOS = 256, 257

SIZES = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_BASE = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# One per way in which checkpoints of these families differ.
CONFIGS: dict[str, dict] = {
    "llama_gqa": _BASE,
    "llama_mha_tied": _BASE | {"num_key_value_heads": 4, "tie_word_embeddings": True, "vocab_size": 300},
    "llama_bias_llama3_rope": _BASE | {"attention_bias": True, "mlp_bias": True, "rope_scaling": _LLAMA3_ROPE},
    "llama_linear_rope_wide_heads": _BASE | {"head_dim": 32, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral_mqa": _BASE
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_key_value_heads": 1,
        "sliding_window": None,
    },
    "qwen2": _BASE
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "use_sliding_window": False,
        "sliding_window": 128,
        "vocab_size": 337,
    },
    "qwen3": _BASE
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "vocab_size": 311,
    },
}


def tensors(config: dict, seed: int = 0, sharpness: float = 1.0) -> dict[str, np.ndarray]:
    """f32 values by Hugging Face name. sharpness scales the output matrix: larger means surer predictions."""
    random = np.random.default_rng(seed)
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_rows, kv_rows = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    is_qwen2 = config["model_type"] == "qwen2"

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float32)

    def norm(length: int) -> np.ndarray:
        return (1 + 0.2 * random.standard_normal(length)).astype(np.float32)

    out = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 2.0), "model.norm.weight": norm(hidden)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(config["vocab_size"], hidden, 2.0 * sharpness)
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q_rows, hidden, config.get("attention_bias") or is_qwen2),
            "self_attn.k_proj": (kv_rows, hidden, config.get("attention_bias") or is_qwen2),
            "self_attn.v_proj": (kv_rows, hidden, config.get("attention_bias") or is_qwen2),
            "self_attn.o_proj": (hidden, q_rows, config.get("attention_bias") and not is_qwen2),
            "mlp.gate_proj": (ffn, hidden, config.get("mlp_bias")),
            "mlp.up_proj": (ffn, hidden, config.get("mlp_bias")),
            "mlp.down_proj": (hidden, ffn, config.get("mlp_bias")),
        }
        at = f"model.layers.{layer}"
        for name, (rows, columns, bias) in shapes.items():
            out[f"{at}.{name}.weight"] = matrix(rows, columns, 1.5)
            if bias:
                out[f"{at}.{name}.bias"] = (0.3 * random.standard_normal(rows)).astype(np.float32)
        out[f"{at}.input_layernorm.weight"] = norm(hidden)
        out[f"{at}.post_attention_layernorm.weight"] = norm(hidden)
        if config["model_type"] == "qwen3":
            out[f"{at}.self_attn.q_norm.weight"], out[f"{at}.self_attn.k_norm.weight"] = norm(size), norm(size)
    return out


def write(folder: Path, config: dict, *, dtype: str = "BF16", shards: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    """Writes config, tokenizer and weights (``dtype`` BF16, F16 or F32, in ``shards`` files); returns what it wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(folder)
    return write_weights(folder, tensors(config, seed), dtype=dtype, shards=shards)


def write_weights(
    folder: Path, values: dict[str, np.ndarray], *, dtype: str = "BF16", shards: int = 1
) -> dict[str, np.ndarray]:
    stored = {name: _as_stored(value, dtype) for name, value in values.items()}
    names = list(stored)
    if shards == 1:
        _save(folder / "model.safetensors", stored, names, dtype)
    else:
        index: dict[str, str] = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            _save(folder / file, stored, names[shard::shards], dtype)
            index |= dict.fromkeys(names[shard::shards], file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return {name: exact for name, (_, exact) in stored.items()}


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE without merges: 256 bytes, an end and a begin token, a small chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|begin|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}<|begin|>assistant\n"
    settings = {"eos_token": "<|end|>", "bos_token": "<|begin|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _as_stored(value: np.ndarray, dtype: str) -> tuple[bytes, np.ndarray]:
    if dtype == "BF16":
        bits = value.astype("<f4").view("<u4")
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # to nearest, ties to even
        return rounded.tobytes(), (rounded.astype("<u4") << 16).view("<f4").reshape(value.shape)
    narrow = value.astype({"F16": "<f2", "F32": "<f4"}[dtype])
    return narrow.tobytes(), narrow.astype(np.float32)


def _save(path: Path, stored: dict[str, tuple[bytes, np.ndarray]], names: list[str], dtype: str) -> None:
    """The safetensors format, spelled out: u64 header length, JSON header padded to 8 bytes, bytes of all tensors."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        data, exact = stored[name]
        header[name] = {"dtype": dtype, "shape": list(exact.shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(stored[name][0] for name in names))
