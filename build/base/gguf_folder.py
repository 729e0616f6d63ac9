"""A GGUF file as a checkpoint folder: config.json, the tokenizer's files and an index of the weights, which stay in it.

The folder lies under ``.cache/models/gguf`` and is named by the file's content and by the code that writes it, so it is
written once and never outdated.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np

from build.base import digest, layout
from build.base import rope as rotary
from build.base.gguf_file import Gguf, open_gguf, write_index
from build.base.json_fields import BadField, CheckpointError, Fields, shown

SUFFIX = ".gguf"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What the published Llama 3 models have beside the factor; the file keeps only what comes of it.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Keys below the architecture's name that change what is computed and that no such model has.
_REFUSED = """
    attention.clamp_kqv attention.scale attn_logit_softcapping embedding_scale expert_count final_logit_softcapping
    logit_scale residual_scale
""".split()
# Control tokens that end an answer, whether the metadata names them or not; llama.cpp knows them by these texts too.
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_SOURCES = ("gguf_file.py", "gguf_folder.py", "gguf_tokenizer.py")


def of(path: Path) -> Path:
    """The checkpoint folder at ``path``: a folder itself, or one for a GGUF file or for a folder of nothing but one."""
    if path.is_dir():
        inside = [] if (path / "config.json").exists() else list(path.glob(f"*{SUFFIX}"))
        return unpacked(inside[0]) if len(inside) == 1 else path
    return unpacked(path)


def unpacked(path: Path) -> Path:
    """The checkpoint folder of a GGUF file. Raises CheckpointError with one sentence."""
    path = path.resolve()
    try:
        name = f"{path.name.removesuffix(SUFFIX)[:80]}-{digest.sha256_file(path)[:16]}-{_code()}"
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    folder = layout.FETCHED / "gguf" / digest.sha256_json(str(path))[:12] / name
    if folder.is_dir():
        return folder
    try:
        with layout.made_once(folder) as partial:
            _write(open_gguf(path), partial)
    except BadField as exc:
        raise CheckpointError(str(exc)) from exc
    return folder


@cache
def _code() -> str:
    here = Path(__file__).parent
    return digest.sha256_json([digest.sha256_file(here / name) for name in _SOURCES])[:8]


def _write(opened: Gguf, folder: Path) -> None:
    from build.base import gguf_tokenizer

    metadata = opened.metadata
    config = _config(opened)
    made, tokens = gguf_tokenizer.tokenizer(metadata), metadata.texts("tokenizer.ggml.tokens")
    made.save(str(folder / "tokenizer.json"))
    named = {name: gguf_tokenizer.token(metadata, name, tokens) for name in ("bos", "eos", "eot", "eom", "padding")}
    ids = {name: tokens.index(text) for name, text in named.items() if text is not None}
    control = {added.content: number for number, added in made.get_added_tokens_decoder().items() if added.special}
    ends = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    ends = list(dict.fromkeys([*ends, *(control[text] for text in _ENDS_OF_TURN if text in control)]))
    generation = {"bos_token_id": ids.get("bos"), "eos_token_id": ends or None, "pad_token_id": ids.get("padding")}
    texts = {
        "bos_token": named["bos"],
        "eos_token": named["eos"],
        "pad_token": named["padding"],
        "unk_token": gguf_tokenizer.token(metadata, "unknown", tokens),
        "chat_template": metadata.text("tokenizer.chat_template"),
    }
    tokenizer_config = {key: text for key, text in texts.items() if text is not None}
    files = {
        "config.json": config,
        "generation_config.json": {key: value for key, value in generation.items() if value is not None},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"} | tokenizer_config,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_index(folder, opened)


def _config(opened: Gguf) -> dict[str, object]:
    metadata, tensors = opened.metadata, opened.tensors
    name = metadata.text("general.architecture")
    if name not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise BadField(f"{opened.path}: general.architecture must be one of {allowed}, got {shown(name)}")
    if metadata.integer("split.count", 1, low=0) > 1:
        raise BadField(f"{opened.path} is one of several parts; join them first (llama-gguf-split --merge)")
    own = Fields({k.removeprefix(f"{name}."): v for k, v in metadata.values.items()}, f"{opened.path}: {name}")
    for key in _REFUSED:
        if own.get(key):
            raise BadField(f"{opened.path}: {name}.{key} is {shown(own.get(key))}; such models are not supported")
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise BadField(f"{opened.path}: the weights lack token_embd.weight [vocabulary, hidden]")
    hidden, heads = own.integer("embedding_length"), own.integer("attention.head_count")
    if own.get("attention.key_length") is None and hidden % heads:
        raise BadField(f"{opened.path}: {name}.embedding_length {hidden} is not a multiple of {heads} heads")
    head_dim = own.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.integer(key, head_dim) != head_dim:
            raise BadField(f"{opened.path}: {name}.{key} is {own.integer(key)}; supported is {head_dim}, the head's")
    theta = own.number("rope.freq_base", rotary.DEFAULT_THETA)
    kinds = {tensor.dtype for tensor in tensors.values() if len(tensor.shape) == 2}
    dtype = {"BF16": "bfloat16", "F16": "float16"}.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": own.integer("feed_forward_length"),
        "num_hidden_layers": own.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": own.integer("context_length"),
        "rms_norm_eps": float(str(np.float32(own.number("attention.layer_norm_rms_epsilon")))),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(opened, own, rotary.Rope(theta, "default", {}), head_dim),
        "attention_bias": name == "llama" and "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in tensors,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": dtype,
    }


def _rope_scaling(opened: Gguf, own: Fields, plain: rotary.Rope, head_dim: int) -> dict[str, object] | None:
    """config.json's block for the file's scaling keys, or for its table of factors (Llama 3)."""
    if opened.rope_freqs is not None:
        return _llama3(opened, own, plain, head_dim)
    kind = own.text("rope.scaling.type") or "linear"  # as llama.cpp has it, and so the older key
    factor = own.number("rope.scaling.factor" if own.get("rope.scaling.factor") else "rope.scale_linear", 1.0)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind not in ("linear", "yarn"):
        raise BadField(f"{own.where}.rope.scaling.type must be none, linear or yarn, got {shown(kind)}")
    block: dict[str, object] = {"rope_type": kind, "factor": factor}
    if own.get("rope.scaling.original_context_length") is not None:
        block["original_max_position_embeddings"] = own.integer("rope.scaling.original_context_length")
    if kind == "yarn" and own.get("rope.scaling.attn_factor") is not None:
        block["attention_factor"] = own.number("rope.scaling.attn_factor")
    return block


def _llama3(opened: Gguf, own: Fields, plain: rotary.Rope, head_dim: int) -> dict[str, object] | None:
    """The Llama 3 scaling whose frequencies are the file's: its table holds base frequency over scaled frequency."""
    given = opened.rope_freqs
    base, _ = rotary.inverse_frequencies(plain, head_dim)
    if given is None or given.shape != base.shape or not np.isfinite(given).all() or not given.min() > 0:
        raise BadField(f"{opened.path}: rope_freqs.weight must hold {len(base)} positive numbers")
    if np.allclose(given, 1.0):
        return None
    originals = (own.get("rope.scaling.original_context_length"), LLAMA3_ROPE["original_max_position_embeddings"])
    for original in originals:
        block = LLAMA3_ROPE | {"factor": float(given.max()), "original_max_position_embeddings": original}
        if isinstance(original, int) and original > 0:
            scaled, _ = rotary.inverse_frequencies(rotary.Rope(plain.theta, "llama3", block), head_dim)
            if np.allclose(base / scaled, given, rtol=1e-3):
                return {"rope_type": "llama3"} | block
    raise BadField(f"{opened.path}: rope_freqs.weight is not Llama 3's scaling of the frequencies; no other is known")
