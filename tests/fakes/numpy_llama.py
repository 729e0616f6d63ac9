"""A Llama / Qwen2 / Qwen3 forward pass in f32 numpy, straight from the papers: what the graph is held to.

It shares no code with ``build/``: it reads the raw config and a plain ``{name: f32 array}`` and recomputes the
whole sequence for every token.
"""

from __future__ import annotations

import math

import numpy as np


def logits(config: dict, tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """f32[len(ids), vocab]."""
    eps = config["rms_norm_eps"]
    hidden = tensors["model.embed_tokens.weight"][np.asarray(ids)]
    cos, sin = _rotation(config, len(ids))
    for layer in range(config["num_hidden_layers"]):
        part = {
            k.removeprefix(f"model.layers.{layer}."): v
            for k, v in tensors.items()
            if k.startswith(f"model.layers.{layer}.")
        }
        hidden = hidden + _attention(config, part, _norm(hidden, part["input_layernorm.weight"], eps), cos, sin)
        normed = _norm(hidden, part["post_attention_layernorm.weight"], eps)
        gate = _linear(part, "mlp.gate_proj", normed)
        hidden = hidden + _linear(
            part, "mlp.down_proj", gate / (1 + np.exp(-gate)) * _linear(part, "mlp.up_proj", normed)
        )
    head = tensors["model.embed_tokens.weight"] if config.get("tie_word_embeddings") else tensors["lm_head.weight"]
    return (_norm(hidden, tensors["model.norm.weight"], eps) @ head.T).astype(np.float32)


def greedy(
    config: dict, tensors: dict[str, np.ndarray], ids: list[int], max_tokens: int, eos: tuple[int, ...] = ()
) -> list[int]:
    """New ids, the end id not among them."""
    ids, new = list(ids), []
    while len(new) < max_tokens:
        best = int(logits(config, tensors, ids)[-1].argmax())
        if best in eos:
            break
        ids.append(best)
        new.append(best)
    return new


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _linear(part: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    return x @ part[f"{name}.weight"].T + part.get(f"{name}.bias", np.float32(0))


def _attention(
    config: dict, part: dict[str, np.ndarray], x: np.ndarray, cos: np.ndarray, sin: np.ndarray
) -> np.ndarray:
    length, heads = len(x), config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    query = _linear(part, "self_attn.q_proj", x).reshape(length, heads, size)
    key = _linear(part, "self_attn.k_proj", x).reshape(length, kv_heads, size)
    value = _linear(part, "self_attn.v_proj", x).reshape(length, kv_heads, size)
    if "self_attn.q_norm.weight" in part:
        query = _norm(query, part["self_attn.q_norm.weight"], config["rms_norm_eps"])
        key = _norm(key, part["self_attn.k_norm.weight"], config["rms_norm_eps"])
    query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    out = np.empty((length, heads, size), np.float32)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = query[:, head] @ key[:, shared].T / math.sqrt(size)
        scores[np.triu_indices(length, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ value[:, shared]
    return _linear(part, "self_attn.o_proj", out.reshape(length, heads * size))


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Pairs (i, i + d/2) turned by their angle; x: f32[length, heads, d], cos and sin: f32[length, d/2]."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rotation(config: dict, length: int) -> tuple[np.ndarray, np.ndarray]:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    block = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = block.get("rope_theta") or config.get("rope_theta", 10_000.0)
    kind = block.get("rope_type") or block.get("type") or "default"
    wave = [theta ** (2 * i / size) for i in range(size // 2)]  # radians per turn / 2 pi
    if kind == "linear":
        wave = [w * block["factor"] for w in wave]
    elif kind == "llama3":
        wave = [_llama3(w, block) for w in wave]
    elif kind != "default":
        raise ValueError(kind)
    angles = np.arange(length)[:, None] / np.array(wave)[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _llama3(wave: float, block: dict) -> float:
    length, wavelength = block["original_max_position_embeddings"], 2 * math.pi * wave
    if wavelength < length / block["high_freq_factor"]:
        return wave
    if wavelength > length / block["low_freq_factor"]:
        return wave * block["factor"]
    smooth = (length / wavelength - block["low_freq_factor"]) / (block["high_freq_factor"] - block["low_freq_factor"])
    return 1 / ((1 - smooth) / (wave * block["factor"]) + smooth / wave)
