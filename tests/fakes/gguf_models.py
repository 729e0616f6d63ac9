"""GGUF files of tiny random models, written with the library's writer as llama.cpp's converter arranges them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from tests.fakes import checkpoints

NORMAL, CONTROL, UNUSED, BYTE = 1, 3, 5, 6
# Blocks of 256 columns and where their f16 scales stand: the library reads these types and cannot write them.
SUPER_BLOCKS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{ending}"
    return f"{_NAMES[stem]}.{ending}"


def to_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """What convert_hf_to_gguf.py does to the query and key rows of Llama models."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def random_blocks(shape: tuple[int, ...], kind: str, random: np.random.Generator) -> np.ndarray:
    """u8[rows, bytes]: any bits with scales that keep the weights around 0.1."""
    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (shape[0], shape[1] // columns, size), dtype=np.uint8)
    for at in SUPER_BLOCKS[kind]:
        scales = (random.random(blocks.shape[:2]) * 1e-4 + 1e-5).astype("<f2")
        blocks[:, :, at : at + 2] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(shape[0], -1)


def write(
    path: Path,
    config: Mapping,
    kind: str = "F32",
    *,
    architecture: str | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, object] | None = None,
    tokenizer: str | None = "gpt2",
) -> Path:
    """A file of ``checkpoints.tensors(config)`` (or ``tensors``), matrices stored as ``kind``.

    metadata: keys that replace or, with None, remove what would be written. tokenizer: ``gpt2``, ``llama`` or None.
    """
    values = dict(checkpoints.tensors(dict(config)) if tensors is None else tensors)
    model = architecture or str(config["model_type"])
    random = np.random.default_rng(1)
    keys = _keys(model, config) | (_tokenizer(tokenizer, config) if tokenizer else {})
    keys |= {name.replace("ARCH", model): value for name, value in (metadata or {}).items()}
    writer = GGUFWriter(path, str(keys.pop("general.architecture", model)))
    for name, value in keys.items():
        if value is not None:
            _add(writer, name, value)
    for name, value in values.items():
        if model == "llama" and name.endswith(("q_proj.weight", "q_proj.bias")):
            value = to_pairs(value, config["num_attention_heads"])
        if model == "llama" and name.endswith(("k_proj.weight", "k_proj.bias")):
            value = to_pairs(value, config["num_key_value_heads"])
        stored = name if name.startswith("rope_freqs") or name.startswith("blk.") else gguf_name(name)
        if value.ndim == 1 or kind == "F32":
            writer.add_tensor(stored, np.ascontiguousarray(value, dtype=np.float32))
        elif kind in SUPER_BLOCKS:
            blocks = random_blocks(value.shape, kind, random)
            writer.add_tensor(stored, blocks, raw_dtype=GGMLQuantizationType[kind])
        else:
            dtype = GGMLQuantizationType[kind]
            data = value.astype(np.float16) if kind == "F16" else quantize(np.ascontiguousarray(value), dtype)
            writer.add_tensor(stored, data, raw_dtype=None if kind == "F16" else dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _keys(model: str, config: Mapping) -> dict[str, object]:
    keys: dict[str, object] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float((config.get("rope_parameters") or config)["rope_theta"]),
    }
    if "head_dim" in config:
        keys |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    return {f"{model}.{name}": value for name, value in keys.items()}


def _tokenizer(kind: str, config: Mapping) -> dict[str, object]:
    """``checkpoints.write_tokenizer``'s vocabulary, or a small SentencePiece one, filled up to the model's."""
    if kind == "llama":
        return spm_keys(config["vocab_size"])
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>", "<|begin|>"]
    types = [NORMAL] * 256 + [CONTROL] * 2
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": checkpoints.BOS,
        "tokenizer.ggml.eos_token_id": checkpoints.EOS,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    } | _filled(tokens, types, config["vocab_size"])


PIECES = (
    *("t", "h", "e", "r", "i", "n", "g", "a", "s", "o", "l", "w", "d", ".", ",", "é"),
    *("th", "he", "in", "er", "an", "ing", "the", "▁t", "▁th", "▁the", "▁a", "▁w", "or", "ld", "▁wor", "▁world"),
    *("he", "ll", "hell", "hello", "▁hello", "▁▁", "▁▁▁▁", "aa", "aaa"),
)


def spm_keys(vocab_size: int, **changes: object) -> dict[str, object]:
    """Metadata of a SentencePiece BPE with byte fallback: <unk>, <s>, </s>, 256 bytes, pieces by descending score."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *dict.fromkeys(PIECES)]
    types = [2, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    scores = [0.0] * 259 + [-float(n) for n in range(len(tokens) - 259)]
    filled = _filled(tokens, types, vocab_size)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": scores + [-1e4] * (len(filled["tokenizer.ggml.tokens"]) - len(scores)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **filled,
        **changes,
    }


def _filled(tokens: list[str], types: list[int], vocab_size: int) -> dict[str, list]:
    missing = vocab_size - len(tokens)
    return {
        "tokenizer.ggml.tokens": tokens + [f"[PAD{len(tokens) + n}]" for n in range(missing)],
        "tokenizer.ggml.token_type": types + [UNUSED] * missing,
    }


def _add(writer: GGUFWriter, name: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def as_json(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())
