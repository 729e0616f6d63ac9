"""Convert a Hugging Face Llama checkpoint to a GGUF file for llama.cpp.

llama.cpp's own converter identifies tokenizers by a digest of an encoded text and refuses unknown ones, as ours; this
one writes any byte-level BPE tokenizer, with GPT-2's pre-tokenization, or SmolLM's if it splits off every digit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes  # noqa: F401  # numpy knows bfloat16 by it
import numpy as np
from safetensors import safe_open

PRECISIONS = {"f32": "F32", "bf16": "BF16", "int8": "Q8_0"}  # and their names in GGUF


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder a query or key projection for llama.cpp's rotary embedding. f32[heads * size, hidden] both ways.

    Hugging Face pairs row i of a head with row i + size / 2, llama.cpp rows 2i and 2i + 1.
    """
    rows, hidden = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, hidden)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, hidden))


def tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a safetensors file as f32. Raises ValueError for a dtype other than F32, F16, BF16."""
    with safe_open(path, "np") as file:
        for name in file.offset_keys():
            if (dtype := file.get_slice(name).get_dtype()) not in ("F32", "F16", "BF16"):
                raise ValueError(f"dtype of tensor {name!r}: must be F32, F16 or BF16, got {dtype}")
            yield name, file.get_tensor(name).astype(np.float32)


def vocabulary(tokenizer: dict, size: int) -> tuple[list[str], list[bool], list[str]]:
    """Return a tokenizer.json's tokens by id, which of them are special, and the merges as ``left right``."""
    tokens, special = [f"[unused{n}]" for n in range(size)], [False] * size
    for token, n in tokenizer["model"]["vocab"].items():
        tokens[n] = token
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], special[added["id"]] = added["content"], added["special"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    return tokens, special, merges


def adds_begin(tokenizer: dict) -> bool:
    """Return whether it puts a special token in front of every text."""
    post = tokenizer.get("post_processor") or {"type": None}
    every = [post, *post.get("processors", [])]
    return any("SpecialToken" in one["single"][0] for one in every if one["type"] == "TemplateProcessing")


def splits_digits(tokenizer: dict) -> bool:
    """Return whether every digit is a token of its own."""
    pre = tokenizer.get("pre_tokenizer") or {}
    return any(one["type"] == "Digits" and one["individual_digits"] for one in pre.get("pretokenizers", [pre]) if one)


def check(config: dict, tokenizer: dict) -> None:
    """Raises ValueError: the GGUF file would be of another model."""
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"architectures: must be LlamaForCausalLM, got {config['architectures']}")
    if scaling := config.get("rope_scaling"):  # llama.cpp reads its factors from a tensor of their own
        raise ValueError(f"rope_scaling: must be null, got {scaling}")
    if "ByteLevel" not in json.dumps(decoder := tokenizer.get("decoder")):
        raise ValueError(f"decoder of tokenizer.json: must be ByteLevel, got {decoder}")


def write(checkpoint: Path, out: Path, precision: str) -> None:
    """Write the GGUF file. Norms stay f32, as llama.cpp requires. Raises as ``check``."""
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    check(config, tokenizer)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    kind = gguf.GGMLQuantizationType[PRECISIONS[precision]]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(checkpoint.name)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if precision == 'f32' else 'MOSTLY'}_{PRECISIONS[precision]}"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(head_size)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens, special, merges = vocabulary(tokenizer, config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if splits_digits(tokenizer) else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if is_special else gguf.TokenType.NORMAL for is_special in special])
    writer.add_token_merges(merges)
    eos = config["eos_token_id"]
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    writer.add_add_bos_token(adds_begin(tokenizer))
    writer.add_add_space_prefix(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, values in tensors(checkpoint / "model.safetensors"):
        renamed = names.get_name(name, try_suffixes=(".weight",))
        if renamed is None:
            raise ValueError(f"tensor: must be one of a Llama without biases, got {name!r}")
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleaved(values, heads if "q_proj" in name else kv_heads)
        if values.ndim == 1 or precision == "f32":
            writer.add_tensor(renamed, values)
        else:
            writer.add_tensor(renamed, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
